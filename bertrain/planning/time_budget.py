"""`train.budget`: how many steps fit into a given time, measured on the first steps.

Until then the end of the run is not known, so the learning rate is that of the warm-up, or else the base rate. Then
`max_steps` is fixed in config.json for good, and the schedule ends there.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bertrain.base.units import parse_duration
from bertrain.config.settings import Settings
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run

WARM_UP_STEPS = 5  # of each start: kernels are compiled and memory is allocated
TIMED_STEPS = 20
RESERVE = 0.02  # of the time left, for saving and for steps slower than those timed
UNKNOWN_STEPS = sys.maxsize  # so many that the rate does not decay, not even in its last bit


@dataclass(frozen=True)
class Measured:
    """The measured speed of a run, and the number of steps that follows from it."""

    measured_until: int
    """The last step that was taken before the end of the run was known."""
    seconds_per_step: float
    seconds_per_evaluation: float
    max_steps: int

    def describe(self, budget: str) -> str:
        """The measurement and its result, in a sentence."""
        evaluation = f", {self.seconds_per_evaluation:.3g} s an evaluation" if self.seconds_per_evaluation else ""
        return (
            f"train.budget {budget}: {self.seconds_per_step:.3g} s a step (median of the {TIMED_STEPS} before step "
            f"{self.measured_until + 1}){evaluation}; {RESERVE:.0%} kept for saving and for slower steps: the run and "
            f"its schedule end after step {self.max_steps}"
        )


def measure(
    settings: Settings,
    durations: Sequence[float],
    progress: Progress,
    *,
    seconds: float,
    seconds_per_evaluation: float,
    evaluation_interval: int,
) -> Measured:
    """The length of a run that has reached `progress` after `seconds`, from the times of its newest steps.

    It leaves time for an evaluation every `evaluation_interval` examples, and one at the end.
    """
    per_step = statistics.median(durations)
    evaluations_per_step = progress.samples / progress.step / evaluation_interval if evaluation_interval else 0.0
    budget = parse_duration(settings.train.budget, "train.budget")
    left = (budget - seconds) * (1 - RESERVE) - seconds_per_evaluation
    fits = int(left / (per_step + evaluations_per_step * seconds_per_evaluation))
    return Measured(progress.step, per_step, seconds_per_evaluation, progress.step + max(0, fits))


def without_an_end(settings: Settings) -> Settings:
    """The settings of a step taken before the end of the run was known."""
    return replace(settings, train=replace(settings.train, max_steps=UNKNOWN_STEPS))


def with_measured_length(settings: Settings, begun: Run) -> Settings:
    """`settings` with the `max_steps` that the begun run has measured for the same budget, if it has."""
    if not begun.measured or begun.settings.train.budget != settings.train.budget:
        return settings
    return replace(settings, train=replace(settings.train, max_steps=begun.settings.train.max_steps))
