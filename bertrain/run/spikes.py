"""Which losses stand out from those before them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 64  # steps that a loss is compared with
FEWEST = 16  # of them, before any is judged: the first steps of a run fall steeply
DEVIATIONS = 6.0  # above the median that make a spike, if losses were normally distributed
SMALLEST = 0.05  # of the median: less is no spike, however quiet the steps before were


class SpikeWatch:
    """Compares each loss with the median of those before it, and their median absolute deviation from that.

    Neither is moved by the spikes themselves. A loss that rises and stays there stops being one after half a window.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._recent: deque[float] = deque(filter(math.isfinite, losses), maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Whether the next loss stands out; one that is not finite is another matter, and is not taken in."""
        if not math.isfinite(loss):
            return False
        before = list(self._recent)
        self._recent.append(loss)
        return len(before) >= FEWEST and loss > spike_limit(before)


def spike_limit(losses: list[float]) -> float:
    """The loss beyond which one after these is a spike."""
    middle = statistics.median(losses)
    deviation = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)  # of a normal distribution, at that
    return middle + max(DEVIATIONS * deviation, SMALLEST * abs(middle))
