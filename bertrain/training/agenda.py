"""Decides what is due after each step of a run: a log line, an evaluation, a save, the end.

All ranks count the same steps and examples. Only the first rank measures time; the others receive its requests when
ranks agree on the largest request after each step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal

from bertrain.base.units import parse_duration, parse_fits, parse_steps
from bertrain.config.settings import EvaluateSettings, Settings, TrainSettings
from bertrain.data.feed.step_size import StepSize
from bertrain.planning.convergence import mlperf_interval
from bertrain.planning.time_budget import FIT_SHARE, FORWARD_SHARE, UNKNOWN_STEPS, BudgetPlan, plan_budget, schedule_of
from bertrain.ranks.signals import CONTINUE, END, FIT, REQUEUE, SAVE, STOP
from bertrain.run.checkpoint import Progress

FIRST_FIT = 4  # steps after which a budget is first fitted; then after 8, 16, 32, ..., or more often by time
NUM_MARKS, MARK_SHARE = 8, 1 / 64  # the speed is that of the last eighth of the steps, at first of the last half
SETTLED, SETTLE_SHARE = 1.25, 0.1
"""After each start, a budget is first fitted when the speed of the last half of the steps differs from that of the
steps before by at most this factor, or after this share of the time that was left.

The first steps compile kernels. A fit to their low speed would expect a short run, and so end its warm-up at once.
"""


@dataclass(frozen=True)
class Due:
    """Events that are due after a step."""

    logs: bool = False
    evaluates: bool = False
    fits: bool = False
    """Whether to fit the length of the run to its budget."""
    saves: bool = False
    stops: bool = False
    """Whether a signal stops the run here."""
    ending: str = ""
    """Why this is the last step of the run; empty if it is not."""

    @property
    def flushes(self) -> bool:
        """Whether the metrics of the steps so far are needed now."""
        return self.logs or self.evaluates or self.fits or self.saves or self.stops


class Agenda:
    """The events of a run that has reached `progress`, by its settings and the clock."""

    def __init__(
        self,
        settings: Settings,
        progress: Progress,
        *,
        num_examples: int = 0,
        evaluation: Mapping[str, int] | None = None,
        keeps_time: bool = True,
        step_size: StepSize | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_examples` are those of an evaluation; `evaluation` is Run.evaluation; the first rank `keeps_time`.

        Without `step_size`, all steps have one size.
        """
        self._step_size = step_size
        self.settings = settings
        self._fits = parse_fits(settings.train.fits, "train.fits")
        self._keeps_time, self._now = keeps_time, now
        self._seconds_before = progress.seconds
        self.spent = {"evaluation": progress.evaluation_seconds, "saving": progress.saving_seconds}
        self._progress = progress
        self._num_timed, self._next_fit = 0, FIRST_FIT
        self.start_clock()
        self.seconds_per_step = self._samples_per_step = math.nan
        self._has_settled, self._earlier = False, (0, math.nan)
        """Whether the speed has settled; the steps timed, and their speed, when this was last checked."""
        self._all_examples = num_examples
        self._is_estimated = self._are_slow = False
        self._seconds_per_example = math.nan
        """Of the newest evaluation."""
        self._best_step, self._best_accuracy = progress.best_step, progress.best_accuracy
        self._skipped = parse_steps(settings.train.skip_steps, "train.skip_steps")
        interval = evaluation_interval(settings.evaluate, settings.nominal_sequences)
        given = {"evaluation_interval": interval, "num_examples": num_examples} | dict(evaluation or {})
        self.plan = BudgetPlan(self.last_step(progress.step), **given)

    # --- before and during a step ------------------------------------------------------------------

    def start_clock(self) -> None:
        """Count time from now on: building and warming up do not count."""
        self._started = self._last_save = self._now()
        self._last_fit = self._seconds_before
        self._marks = deque([(self._training_seconds(), 0, self._progress.samples)], maxlen=NUM_MARKS)

    def last_step(self, step: int) -> int:
        """The last step of the run as known after `step`."""
        train = self.settings.train
        is_fitted = bool(train.budget or self._fits)  # a repeated run has the fits of the first, but no budget
        unfitted = UNKNOWN_STEPS if is_fitted and not train.epochs else train.max_steps
        return next((last for after, last in reversed(self._fits) if after <= step), unfitted)

    def skips_step(self, step: int) -> bool:
        """Whether train.skip_steps names this step."""
        return any(step in stretch for stretch in self._skipped)

    def settings_of(self, step: int) -> Settings:
        """The settings of a step; its learning rate depends on the last step of the run as known before this step."""
        train = replace(self.settings.train, max_steps=self.last_step(step - 1))
        return replace(self.settings, train=train, schedule=schedule_of(step, self.settings, self._fits))

    # --- after it ----------------------------------------------------------------------------------

    def seconds(self) -> float:
        """Time in the loop, over all starts of the run."""
        return self._seconds_before + self._now() - self._started

    def _training_seconds(self) -> float:
        return self.seconds() - self.spent["evaluation"]

    def clock_request(self, step: int) -> int:
        """The request of this rank's clock after `step`."""
        if not self._keeps_time:
            return CONTINUE
        if self.seconds() >= time_limit(self.settings.train)[0]:
            return END
        if self._is_fit_due(step):
            return FIT
        every = 60 * self.settings.checkpoint.every_minutes
        return SAVE if every and self._now() - self._last_save >= every else CONTINUE

    def _is_fit_due(self, step: int) -> bool:
        """Whether to compare the speed with the budget; only once the fits that are known are all in effect."""
        budget, num_timed = parse_duration(self.settings.train.budget, "train.budget"), self._num_timed + 1
        if not budget or (self._fits and step <= self._fits[-1][0]):
            return False
        is_time = num_timed > 1 and self.seconds() - self._last_fit >= FIT_SHARE * budget
        return is_time or num_timed >= self._next_fit

    def after(self, before: Progress, progress: Progress, agreed: int) -> Due:
        """The events due after the step from `before` to `progress`, once ranks have agreed on `agreed`."""
        saving, step = self.settings.checkpoint, progress.step
        self._num_timed += not self.skips_step(step)
        self._progress, self.plan = progress, replace(self.plan, last_step=self.last_step(step))
        ending = self.end_reason(progress) or (time_limit(self.settings.train)[1] if agreed == END else "")
        asks_to_save = (
            (saving.every_steps and step % saving.every_steps == 0)
            or passes_multiple(before.samples, progress.samples, saving.every_samples)
            or agreed == SAVE
        )
        asks_to_evaluate = passes_multiple(before.samples, progress.samples, self.plan.evaluation_interval)
        asks_to_evaluate &= self.plan.last_step < UNKNOWN_STEPS  # its share of the time is unknown before the first fit
        is_early = progress.samples < saving.first_after_samples
        return Due(
            logs=step % self.settings.log.every_steps == 0 or self._num_timed == 1,
            evaluates=bool(ending) or asks_to_evaluate,
            fits=bool(self.settings.train.budget and self._num_timed)
            and (agreed == END or (agreed == FIT and not ending) or step >= self.plan.last_step),
            saves=saving.enabled and (bool(ending) or agreed in (STOP, REQUEUE) or bool(asks_to_save and not is_early)),
            stops=agreed in (STOP, REQUEUE),
            ending=ending,
        )

    def after_evaluation(self, due: Due, progress: Progress, accuracy: float) -> Due:
        """`due` after an evaluation: the best so far is saved, and reaching the target ends the run."""
        saving, target = self.settings.checkpoint, self.settings.evaluate.target_accuracy
        if target and accuracy >= target:
            due = self._ended(due, due.ending or _target_sentence(target))
        is_early = progress.samples < saving.first_after_samples
        if (not self._best_step or accuracy > self._best_accuracy) and (due.ending or not is_early):
            self._best_step, self._best_accuracy = progress.step, accuracy
            due = replace(due, saves=due.saves or saving.keep_best)
        return due

    @contextmanager
    def timing(self, what: Literal["evaluation", "saving"]) -> Iterator[None]:
        """Count the time of the body as spent on this."""
        began = self.seconds()
        yield
        taken = self.seconds() - began
        self.spent[what] += taken
        if what == "evaluation" and self.plan.num_examples:
            self._seconds_per_example = taken / self.plan.num_examples

    def seconds_left(self) -> float:
        """Measure the speed, now that the device has finished a step; the time to the end of the run."""
        if self._num_timed > self._marks[-1][1]:
            now = (self._training_seconds(), self._num_timed, self._progress.samples)
            first_second, first_step, first_sample = self._marks[0]
            self._samples_per_step = (now[2] - first_sample) / (now[1] - first_step)
            self.seconds_per_step = max((now[0] - first_second) / (now[1] - first_step), 1e-9)
            while self._marks and self._marks[0][1] < now[1] / 2:  # the first steps are slower than others
                self._marks.popleft()
            if not self._marks or now[1] - self._marks[-1][1] >= MARK_SHARE * now[1]:
                self._marks.append(now)
        step, samples = self._progress.step, self._progress.samples
        last_step, interval = self.settings.train.last_step() or UNKNOWN_STEPS, self.plan.evaluation_interval
        num_evaluations = 1 + (last_step - step) * samples / max(1, step) / interval if interval else 1
        by_steps = self._present_steps(last_step - step) * self.seconds_per_step
        by_steps += num_evaluations * self.seconds_per_evaluation
        by_time = time_limit(self.settings.train)[0] - self.seconds()
        return max(min(by_steps, by_time), 0.0)

    def _present_steps(self, steps: int) -> float:
        """The next `steps` steps as a number of steps of the timed size, with equally many examples."""
        if self._step_size is None or not self._step_size.ramp:
            return steps
        return self._step_size.examples_in(steps, self._progress.samples) / self._samples_per_step

    def _steps_ahead(self, present_steps: float) -> float:
        """The inverse of `_present_steps`."""
        if self._step_size is None or not self._step_size.ramp:
            return present_steps
        return self._step_size.steps_for(present_steps * self._samples_per_step, self._progress.samples)

    @property
    def seconds_per_evaluation(self) -> float:
        """Time of an evaluation: that of the newest, or an estimate; 0 without evaluations."""
        if math.isnan(self._seconds_per_example):
            samples_per_step = self._progress.samples / max(1, self._progress.step)
            return FORWARD_SHARE * self.seconds_per_step / max(1, samples_per_step) * self.plan.num_examples
        return self._seconds_per_example * self.plan.num_examples

    def is_first_estimate(self) -> bool:
        """Whether the length of the run is known for the first time; a budget is its length."""
        is_first = not self._is_estimated and self._num_timed >= FIRST_FIT and not self.settings.train.budget
        self._is_estimated |= is_first
        return is_first

    def evaluations_are_slow(self) -> bool:
        """Whether evaluations take more than a tenth of the time; asked after each, and true once."""
        interval, samples = self.plan.evaluation_interval, self._progress.samples / max(1, self._progress.step)
        between = self.seconds_per_step * interval / max(1, samples)
        are_slow = interval > 0 and not self._are_slow and self.seconds_per_evaluation > between / 9
        self._are_slow |= are_slow
        return are_slow

    def replan(self, *, can_shrink: bool) -> BudgetPlan:
        """The plan at the present speed, by this rank's clock. At its last step, the run ends there."""
        if self._progress.step >= self.plan.last_step:
            return replace(self.plan, last_step=self._progress.step)
        self._last_fit, self._next_fit = self.seconds(), 2 * self._num_timed
        progress = replace(self._progress, seconds=self._last_fit, evaluation_seconds=self.spent["evaluation"])
        can_shrink &= self._all_examples == self.plan.num_examples or self._seconds_per_example > 0
        speed = self.seconds_per_step, self.seconds_per_evaluation
        self._has_settled = self._has_settled or self._is_settled()
        if not self._has_settled:
            return self.plan
        return plan_budget(
            self.settings, self.plan, progress, *speed, can_shrink=can_shrink, steps_ahead=self._steps_ahead
        )

    def _is_settled(self) -> bool:
        """Whether the speed is that of the run, and not of its start."""
        speed, (num_steps, before) = self.seconds_per_step, self._earlier
        left = parse_duration(self.settings.train.budget, "train.budget") - self._seconds_before
        if self._last_fit - self._seconds_before >= SETTLE_SHARE * left:
            return True
        if self._num_timed < 2 * num_steps:
            return False
        self._earlier = (self._num_timed, speed)
        return before / SETTLED <= speed <= before * SETTLED

    def apply(self, plan: BudgetPlan, due: Due) -> Due:
        """Use a plan that all ranks have agreed on; the run may end with this step."""
        step = self._progress.step
        is_new = plan.last_step != self.plan.last_step or plan.last_step == step
        if is_new and (step, plan.last_step) not in self._fits:
            self._fits.append((step, plan.last_step))
            fits = ",".join(f"{step}:{last}" for step, last in self._fits)
            self.settings = replace(self.settings, train=replace(self.settings.train, fits=fits))
        self.plan = plan
        due = self._ended(due, due.ending or self.end_reason(self._progress))
        return replace(due, evaluates=due.evaluates or bool(due.ending))

    @property
    def evaluation(self) -> dict[str, int]:
        """How the run evaluates, for Run.evaluation."""
        return {name: value for name, value in asdict(self.plan).items() if name != "last_step"}

    def _ended(self, due: Due, ending: str) -> Due:
        return replace(due, ending=ending, saves=due.saves or (bool(ending) and self.settings.checkpoint.enabled))

    def stamp(self, progress: Progress) -> Progress:
        """`progress` with the time and the best evaluation, for a checkpoint; restarts checkpoint.every_minutes."""
        self._last_save = self._now()
        return replace(
            progress,
            seconds=self.seconds(),
            evaluation_seconds=self.spent["evaluation"],
            saving_seconds=self.spent["saving"],
            best_step=self._best_step,
            best_accuracy=self._best_accuracy,
        )

    def end_reason(self, progress: Progress) -> str:
        """Why a run that has reached `progress` is complete, in words; empty if it is not."""
        train, target = self.settings.train, self.settings.evaluate.target_accuracy
        limit, sentence = time_limit(train)
        if progress.step >= self.last_step(progress.step):
            if train.budget and not train.epochs:
                return f"train.budget {train.budget} is over"
            return f"all {self.last_step(progress.step):,} steps are done"
        if train.max_samples and progress.samples >= train.max_samples:
            return f"train.max_samples {train.max_samples:,} is reached"
        if target and progress.best_accuracy >= target:
            return _target_sentence(target)
        return sentence if progress.seconds >= limit else ""


def passes_multiple(before: int, after: int, interval: int) -> bool:
    """Whether counting from `before` to `after` reaches a multiple of `interval` (0: never)."""
    return bool(interval) and after // interval > before // interval


def evaluation_interval(settings: EvaluateSettings, sequences: int) -> int:
    """Examples between evaluations, for steps of `sequences` examples; 0: evaluate only at the end."""
    return mlperf_interval(sequences) if settings.rule == "mlperf" else settings.every_samples


def time_limit(settings: TrainSettings) -> tuple[float, str]:
    """The shorter of train.max_time and train.budget in seconds (infinite without either), and its message."""
    limits = [
        (parse_duration(text, key) or math.inf, f"{key} {text} is over")
        for key, text in (("train.max_time", settings.max_time), ("train.budget", settings.budget))
    ]
    return min(limits)


def _target_sentence(target: float) -> str:
    return f"evaluate.target_accuracy {target:g} is reached"
