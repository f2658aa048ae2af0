"""`train.budget`: how many steps and evaluations fit into a given time, fitted again as the speed changes.

Each fit is a pair in `train.fits`: a step, and the last step of the run as known after it. The learning rate of a step
follows from the newest fit before it. Until the first one the end is unknown, so the rate is that of the warm-up, or
else the base rate; or with train.epochs, the end is theirs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bertrain.base.formatting import duration
from bertrain.base.units import parse_duration
from bertrain.config.settings import ScheduleSettings, Settings
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run

UNKNOWN_STEPS = sys.maxsize  # of a run whose end is not known: its learning rate does not decay, to the last bit
RESERVE = 0.01  # of the time left, for the last save and for slower steps
FIT_SHARE = 0.02  # of the budget between two fits
TOLERANCE = 0.01  # a fit that moves the end of the run by less is not made
EVALUATION_SHARE = 0.05  # of the budget, for all evaluations
FEWEST_EXAMPLES = 100  # of an evaluation that is made smaller
LARGEST_SHARE, LEAST_EXAMPLES = 0.2, 10  # of the budget, for one on that many: where they take longer, it has fewer
SLACK = 1.2  # plans of evaluations are exceeded by this factor before they are changed
FORWARD_SHARE = 0.4  # of the time to train on an example, to evaluate on one; until the first evaluation is timed


@dataclass(frozen=True)
class BudgetPlan:
    """The rest of a run under its budget."""

    last_step: int
    evaluation_interval: int
    """Examples trained on between evaluations; 0: only at the end."""
    num_examples: int
    """Examples of an evaluation."""

    def describe(self, before: BudgetPlan, train_budget: str, seconds_per_evaluation: float) -> str:
        """How the evaluations differ from those of the plan `before`, in a sentence; empty if they do not."""
        changes = []
        if self.evaluation_interval != before.evaluation_interval:
            often = f"every {self.evaluation_interval:,}" if self.evaluation_interval else "only at the end"
            changes.append(f"evaluating {often} instead of every {before.evaluation_interval:,} samples")
        if self.num_examples != before.num_examples:
            changes.append(f"on {self.num_examples:,} examples instead of {before.num_examples:,}")
        share = seconds_per_evaluation / parse_duration(train_budget, "train.budget")
        cost = f"an evaluation would take about {duration(seconds_per_evaluation)}, {share:.1%} of train.budget"
        return f"{cost}: {', '.join(changes)}" if changes else ""


def plan_budget(
    settings: Settings,
    before: BudgetPlan,
    progress: Progress,
    seconds_per_step: float,
    seconds_per_evaluation: float,
    *,
    can_shrink: bool,
    steps_ahead: Callable[[float], float] = lambda steps: steps,
) -> BudgetPlan:
    """The plan of a run that has reached `progress`, at its present speed.

    Evaluations take at most EVALUATION_SHARE of the budget: fewer of them, and fewer examples if one alone takes much
    of that. `can_shrink` is false if all examples must be evaluated. `steps_ahead` converts a number of steps
    of the present size into the number of next steps that take as long, if step sizes grow.
    """
    budget = parse_duration(settings.train.budget, "train.budget")
    left, each = budget - progress.seconds, seconds_per_evaluation
    interval, num_examples = before.evaluation_interval, before.num_examples
    share = EVALUATION_SHARE * budget
    most_each = share / 3 if interval else share
    affordable = int(LARGEST_SHARE * budget * num_examples / each) if each else FEWEST_EXAMPLES
    fewest = max(LEAST_EXAMPLES, min(FEWEST_EXAMPLES, affordable))
    if can_shrink and each > SLACK * most_each and num_examples > fewest:
        num_examples = max(fewest, _rounded(num_examples * most_each / each))
        each *= num_examples / before.num_examples
    samples_per_step = progress.samples / progress.step
    samples_left = max(0.0, left) / seconds_per_step * samples_per_step
    if interval and each:
        most = int(max(0.0, share - progress.evaluation_seconds) / each) - 1  # the last evaluation comes besides
        if samples_left / interval > SLACK * max(0, most) + 1:
            interval = _rounded(samples_left / most, up=True) if most > 0 else 0
    per_step = seconds_per_step + (samples_per_step / interval * each if interval else 0.0)
    last_step = progress.step + int(steps_ahead(max(0.0, (left * (1 - RESERVE) - each) / per_step)))
    if settings.train.epochs:
        last_step = min(last_step, settings.train.max_steps)
    if last_step > progress.step and abs(last_step - before.last_step) <= TOLERANCE * before.last_step:
        last_step = before.last_step
    return BudgetPlan(last_step, interval, num_examples)


def schedule_of(step: int, settings: Settings, fits: Sequence[tuple[int, int]]) -> ScheduleSettings:
    """The schedule of a step of a run with these fits.

    A warm-up that is a share of an unknown length has a rate of 0 until the first fit, and begins there: else the rate
    would jump.
    """
    schedule, train = settings.schedule, settings.train
    if fits and step > fits[0][0] and schedule.warmup_share and not train.epochs:
        return replace(schedule, start_warmup_step=fits[0][0])
    return schedule


def _rounded(value: float, *, up: bool = False) -> int:
    """Two digits of a number."""
    unit = 10 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return (math.ceil if up else math.floor)(value / unit) * unit


def with_fits(settings: Settings, begun: Run) -> Settings:
    """`settings` with the fits that the begun run has added to its own, if its budget is the same."""
    ours, theirs = settings.train, begun.settings.train
    if not ours.budget or ours.budget != theirs.budget or not theirs.fits.startswith(ours.fits):
        return settings
    return replace(settings, train=replace(ours, fits=theirs.fits, max_steps=theirs.max_steps))
