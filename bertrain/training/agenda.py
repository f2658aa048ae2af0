"""Decides what is due after each step of a run: a log line, an evaluation, a save, the end.

Every rank counts steps and examples alike. Only the first rank keeps time: its requests reach the others through the
number on which ranks agree after each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bertrain.base.units import parse_duration, parse_steps
from bertrain.config.settings import EvaluateSettings, Settings, TrainSettings
from bertrain.planning.time_budget import TIMED_STEPS, UNKNOWN_STEPS, WARM_UP_STEPS, Measured, measure, without_an_end
from bertrain.ranks.signals import END, GO_ON, REQUEUE, SAVE, STOP
from bertrain.run.checkpoint import Progress


@dataclass(frozen=True)
class Due:
    """Events that are due after a step."""

    logs: bool = False
    evaluates: bool = False
    measures: bool = False
    """Whether enough steps are timed to fix the length of a run with a budget."""
    saves: bool = False
    stops: bool = False
    """Whether a signal stops the run here."""
    ending: str = ""
    """Why this is the last step of the run; empty if it is not."""

    @property
    def flushes(self) -> bool:
        """Whether the metrics of the steps so far are needed now."""
        return self.logs or self.evaluates or self.measures or self.saves or self.stops


class Agenda:
    """The events of a run that has reached `progress`, by its settings and the clock."""

    def __init__(
        self,
        settings: Settings,
        progress: Progress,
        measured: Mapping[str, Any] | None = None,
        *,
        keeps_time: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measured` is set if the budget of the run has fixed its length; `keeps_time` is true on the first rank."""
        self.settings = settings
        self._measured_until: int | None = (measured or {}).get("measured_until")
        self._keeps_time, self._now = keeps_time, now
        self._seconds_before = progress.seconds
        self.start_clock()
        self._num_timed = 0
        self._best_step, self._best_accuracy = progress.best_step, progress.best_accuracy
        self._left_out = parse_steps(settings.train.skip_steps, "train.skip_steps")
        self.evaluation_interval = evaluation_interval(settings.evaluate, settings.nominal_sequences)

    # --- before and during a step ------------------------------------------------------------------

    def start_clock(self) -> None:
        """Count time from now on: building and warming up do not count."""
        self._started = self._last_save = self._now()

    @property
    def is_open_ended(self) -> bool:
        """Whether the budget has not fixed the length of the run yet."""
        return bool(self.settings.train.budget) and self._measured_until is None

    @property
    def last_step(self) -> int:
        """The last step that the settings allow."""
        return UNKNOWN_STEPS if self.is_open_ended else self.settings.train.max_steps

    def leaves_out(self, step: int) -> bool:
        """Whether train.skip_steps names this step."""
        return any(step in stretch for stretch in self._left_out)

    def settings_of(self, step: int) -> Settings:
        """The settings of a step: until a budget has fixed the end of the run, its rate does not decay."""
        if self.settings.train.budget and (self._measured_until is None or step <= self._measured_until):
            return without_an_end(self.settings)
        return self.settings

    # --- after it ----------------------------------------------------------------------------------

    def seconds(self) -> float:
        """Time in the loop, over all starts of the run."""
        return self._seconds_before + self._now() - self._started

    def clock_request(self) -> int:
        """The request of this rank's clock."""
        if not self._keeps_time:
            return GO_ON
        if self.seconds() >= time_limit(self.settings.train)[0]:
            return END
        every = 60 * self.settings.checkpoint.every_minutes
        return SAVE if every and self._now() - self._last_save >= every else GO_ON

    def after(self, before: Progress, progress: Progress, agreed: int) -> Due:
        """The events due after the step from `before` to `progress`, once ranks have agreed on `agreed`."""
        saving, step = self.settings.checkpoint, progress.step
        self._num_timed += not self.leaves_out(step)
        is_measured = self.is_open_ended and self._num_timed >= WARM_UP_STEPS + TIMED_STEPS
        ending = self.why_over(progress) or (time_limit(self.settings.train)[1] if agreed == END else "")
        asks_to_save = (
            (saving.every_steps and step % saving.every_steps == 0)
            or passes_multiple(before.samples, progress.samples, saving.every_samples)
            or agreed == SAVE
        )
        asks_to_evaluate = passes_multiple(before.samples, progress.samples, self.evaluation_interval)
        is_early = progress.samples < saving.first_after_samples
        return Due(
            logs=step % self.settings.log.every_steps == 0,
            evaluates=bool(ending) or is_measured or asks_to_evaluate,
            measures=is_measured and not ending,
            saves=saving.enabled and (bool(ending) or agreed in (STOP, REQUEUE) or bool(asks_to_save and not is_early)),
            stops=agreed in (STOP, REQUEUE),
            ending=ending,
        )

    def judge(self, due: Due, progress: Progress, accuracy: float) -> Due:
        """`due` after an evaluation: the best so far is saved, and reaching the target ends the run."""
        saving, target = self.settings.checkpoint, self.settings.evaluate.target_accuracy
        if target and accuracy >= target:
            due = self._ended(due, due.ending or _target_sentence(target))
        is_early = progress.samples < saving.first_after_samples
        if (not self._best_step or accuracy > self._best_accuracy) and (due.ending or not is_early):
            self._best_step, self._best_accuracy = progress.step, accuracy
            due = replace(due, saves=due.saves or saving.keep_best)
        return due

    def measure(self, progress: Progress, durations: Iterable[float], evaluation: float) -> Measured:
        """The length of the run under its budget, from the times of its newest steps and of an evaluation."""
        return measure(
            self.settings,
            list(durations)[-TIMED_STEPS:],
            progress,
            seconds=self.seconds(),
            seconds_per_evaluation=evaluation if self.settings.evaluates else 0.0,
            evaluation_interval=self.evaluation_interval,
        )

    def fix(self, due: Due, settings: Settings, progress: Progress) -> Due:
        """Continue with the measured length in `settings`; the run may end with this step."""
        self.settings, self._measured_until = settings, progress.step
        return self._ended(due, due.ending or self.why_over(progress))

    def _ended(self, due: Due, ending: str) -> Due:
        return replace(due, ending=ending, saves=due.saves or (bool(ending) and self.settings.checkpoint.enabled))

    def stamp(self, progress: Progress) -> Progress:
        """`progress` with the time and the best evaluation, for a checkpoint; restarts checkpoint.every_minutes."""
        self._last_save = self._now()
        return replace(progress, seconds=self.seconds(), best_step=self._best_step, best_accuracy=self._best_accuracy)

    def why_over(self, progress: Progress) -> str:
        """Why a run that has reached `progress` is complete, in words; empty if it is not."""
        train, target = self.settings.train, self.settings.evaluate.target_accuracy
        limit, sentence = time_limit(train)
        if progress.step >= self.last_step:
            return f"all {train.max_steps:,} steps are done"
        if train.max_samples and progress.samples >= train.max_samples:
            return f"train.max_samples {train.max_samples:,} is reached"
        if target and progress.best_accuracy >= target:
            return _target_sentence(target)
        return sentence if progress.seconds >= limit else ""


def passes_multiple(before: int, after: int, interval: int) -> bool:
    """Whether counting from `before` to `after` reaches a multiple of `interval` (0: never)."""
    return bool(interval) and after // interval > before // interval


def evaluation_interval(settings: EvaluateSettings, sequences: int) -> int:
    """Examples between evaluations, for steps of so many sequences; 0: evaluate only at the end."""
    return mlperf_interval(sequences) if settings.rule == "mlperf" else settings.every_samples


def mlperf_interval(sequences: int) -> int:
    """0.05 (230.23 sequences + 3,000,000), rounded down to a multiple of 25,000: MLPerf's rule for BERT."""
    return (23023 * sequences + 300_000_000) // 2000 // 25_000 * 25_000  # in integers, so that no digit is lost


def time_limit(settings: TrainSettings) -> tuple[float, str]:
    """The shorter of train.max_time and train.budget in seconds (infinite without either), and its message."""
    limits = [
        (parse_duration(text, key) or math.inf, f"{key} {text} is over")
        for key, text in (("train.max_time", settings.max_time), ("train.budget", settings.budget))
    ]
    return min(limits)


def _target_sentence(target: float) -> str:
    return f"evaluate.target_accuracy {target:g} is reached"
