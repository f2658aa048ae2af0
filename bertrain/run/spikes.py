"""Detects loss spikes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 64  # previous steps that a loss is compared with
MIN_STEPS = 16  # before any spike is detected: the loss falls steeply at the start of a run
DEVIATIONS = 6.0  # standard deviations above the median that make a spike
DIVERGED = 1.3  # times the loss of the first steps, for a whole window
MIN_RISE = 0.05  # of the median: a smaller rise is no spike, however small the deviation


class SpikeWatch:
    """Compares each loss with the median and the median absolute deviation of the losses before it.

    Both are robust to the spikes themselves. A loss that rises and stays high is no spike after half a window.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._recent: deque[float] = deque(filter(math.isfinite, losses), maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Whether the next loss is a spike. A loss that is not finite is ignored."""
        if not math.isfinite(loss):
            return False
        before = list(self._recent)
        self._recent.append(loss)
        return len(before) >= MIN_STEPS and loss > spike_limit(before)


class DivergenceWatch:
    """Detects losses that stay far above those of the first steps: finite, but the model no longer learns.

    Unlike spikes, this is also detected in fine-tuning, and if the loss rises slowly.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        """`losses` are those of the run's steps so far, from the first on."""
        self._first = list(itertools.islice(itertools.filterfalse(math.isnan, losses), MIN_STEPS))
        self._in_a_row = 0

    def has_diverged(self, loss: float) -> bool:
        """Whether the loss has now been too high for WINDOW steps in a row; true only once. Ignores skipped steps."""
        if math.isnan(loss):
            return False
        if len(self._first) < MIN_STEPS:
            self._first.append(loss)
            return False
        self._in_a_row = self._in_a_row + 1 if loss > DIVERGED * statistics.median(self._first) else 0
        return self._in_a_row == WINDOW


def spike_limit(losses: list[float]) -> float:
    """The largest loss after these that is no spike."""
    middle = statistics.median(losses)
    deviation = statistics.median(abs(loss - middle) for loss in losses)
    deviation *= 1.4826  # the standard deviation, if the distribution is normal
    return middle + max(DEVIATIONS * deviation, MIN_RISE * abs(middle))
