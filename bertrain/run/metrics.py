"""Writes the metrics of a run: metrics.jsonl (`run/records.py`), trackers (`run/trackers.py`), and the console.

Results of steps stay on the device until they are flushed; only a flush waits for the device.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bertrain.base import clock
from bertrain.base.console import PHASES, Console, evaluation_text, warn
from bertrain.base.logs import note
from bertrain.config.settings import ModelSettings
from bertrain.data.feed.loader import Step
from bertrain.model.sums import unpack_sums
from bertrain.optim.verdict import Verdict
from bertrain.run.checkpoint import Progress
from bertrain.run.loss_scale import MINIMUM
from bertrain.run.progress import console_line, report_steps
from bertrain.run.records import (
    ClassScores,
    EndRecord,
    EvaluationRecord,
    Record,
    StepRecord,
    drop_after,
    steps_in,
    to_dict,
)
from bertrain.run.spikes import WINDOW, DivergenceWatch, SpikeWatch
from bertrain.run.stragglers import RankTimes
from bertrain.run.telemetry_reader import newest_samples
from bertrain.run.trackers import Points, TrackerThread


class Stopwatch:
    """Seconds of each phase of a step: the host's clock, and events on a GPU, which runs behind it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self.start()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._marks = [self._now()]

    def mark(self) -> None:
        """End of a phase, beginning of the next."""
        self._marks.append(self._now())

    def lap(self) -> list[Any]:
        """The marks of this step; the last one opens the next step."""
        marks, self._marks = self._marks, [self._marks[-1]]
        return marks

    def seconds(self, marks: list[Any]) -> list[float]:
        """Length of each phase between marks; on a GPU this waits for the last of them."""
        if not self._on_gpu:
            return [later - earlier for earlier, later in pairwise(marks)]
        marks[-1].synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]

    def moments(self, marks: list[Any]) -> list[float]:
        """The time of each of these marks, in order, by `clock.now`.

        On a GPU this waits for the last mark, whose time is then the present.
        """
        if not self._on_gpu:
            return [clock.now() - (time.perf_counter() - mark) for mark in marks]
        marks[-1].synchronize()
        passed = clock.now()
        return [passed - mark.elapsed_time(marks[-1]) / 1e3 for mark in marks]


@dataclass
class PendingStep:
    """A step as the training loop reports it. The device may still be computing `sums` and `verdict`."""

    step: Step  # without its bins, to free their memory
    model: ModelSettings
    learning_rate: float
    sums: Tensor  # packed `Sums` over all ranks
    verdict: Tensor  # packed `Verdict`
    marks: list[Any]
    own_tokens: int = 0  # of this rank alone
    own_bins: int = 0
    skipped: bool = False  # by train.skip_steps
    loop_seconds: float = math.nan


class Metrics:
    """Collects steps as they are computed, and writes their records when flushed."""

    def __init__(
        self,
        folder: Path,
        stopwatch: Stopwatch,
        console: Console,
        *,
        first_step: int,
        last_step: int | None,
        is_writer: bool,
        trackers: Sequence[TrackerThread] = (),
        rank_times: RankTimes | None = None,
        seconds_left: Callable[[], float] = lambda: math.nan,
    ) -> None:
        """`seconds_left` is called when the device has finished a step."""
        self._folder, self._stopwatch, self._console = folder, stopwatch, console
        self.last_step, self._is_writer, self._rank_times = last_step, is_writer, rank_times
        self._seconds_left = seconds_left
        self._pending: list[PendingStep] = []
        self._not_finite, self._spikes, self._was_spike = 0, SpikeWatch(), False
        self._divergence = DivergenceWatch()
        self._file: TextIO | None = None
        self._trackers = trackers
        self.failure: OSError | None = None
        if is_writer:
            before = drop_after(folder / "metrics.jsonl", first_step, num_kept=WINDOW)
            self._not_finite = before[-1].not_finite if before else 0
            self._spikes = SpikeWatch(step.loss for step in before)
            if before:
                self._divergence = DivergenceWatch(step.loss for step in steps_in(folder / "metrics.jsonl"))
            self._file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115 - closed in close()

    def add(self, step: PendingStep) -> None:
        self._pending.append(step)

    def flush(self) -> list[bool]:
        """Write and report the pending steps. Returns for each whether it counts as good.

        A step is good if it was applied, skipped on request, or overflowed at a loss scale that can still shrink.
        """
        if not self._pending:
            return []
        ends = self._stopwatch.moments([pending.marks[-1] for pending in self._pending])
        steps = [self._finish(pending, ended) for pending, ended in zip(self._pending, ends, strict=True)]
        if self._rank_times is not None:
            of_steps = zip(steps, self._pending, strict=True)
            times = [self._rank_times.add(step.step, step.seconds, pending.own_tokens) for step, pending in of_steps]
            self._write(*filter(None, times))
        self._pending.clear()
        left = self._seconds_left()
        if self._is_writer:
            self._write(*steps)
            for device, sample in newest_samples(self._folder).items() if self._trackers else ():
                numbers = {f"telemetry/{device}/{name}": value for name, value in sample.items()}
                self._track([(steps[-1].step, numbers)])
            report_steps(self._console, steps, self.last_step, left)
        else:
            note("info", "steps", console_line(steps, self.last_step, left), step=steps[-1].step)
        return [step.applied or step.skipped or (step.loss_scale or MINIMUM) > MINIMUM for step in steps]

    def evaluation(
        self, step: int, samples: int, result: dict[str, float], by_class: tuple[ClassScores, ...] = ()
    ) -> None:
        if self._is_writer:
            self._write(EvaluationRecord(step, samples, result, by_class or None))
            self._console.say(f"evaluation at step {step}: {evaluation_text(result)}")

    def end(self, progress: Progress, reason: str, energy: dict[str, float]) -> None:
        """Write and report why the run ended, its time in the loop over all starts, and its energy, if it is known."""
        if self._is_writer:
            step, samples, seconds = progress.step, progress.samples, progress.seconds
            parts = {"evaluation_seconds": progress.evaluation_seconds, "saving_seconds": progress.saving_seconds}
            for tracker in self._trackers:
                tracker.is_complete = True
            self._write(EndRecord(step, samples, reason, seconds, **parts, **energy))
            self._console.say(f"the end, after step {step:,} ({samples:,} samples): {reason}{energy_text(energy)}")

    def close(self) -> None:
        """Close the file, whose failures have been recorded already, and the trackers."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _finish(self, record: PendingStep, ended: float) -> StepRecord:
        verdict = Verdict.unpack(record.verdict)
        phases = self._stopwatch.seconds(record.marks)
        step, balance, skipped = record.step, record.step.balance, record.skipped
        means = averages(record.sums, step.num_predictions, step.num_sequences, record.model, step.num_tokens)
        self._not_finite += not (verdict.applied or skipped)
        tokens, has_ranks = 0 if skipped else step.num_tokens, not skipped and len(balance.work) > 1
        return StepRecord(
            step=step.number + 1,
            samples=step.next_position,
            tokens=tokens,
            learning_rate=record.learning_rate,
            gradient_norm=verdict.gradient_norm,
            applied=verdict.applied,
            skipped=skipped,
            not_finite=self._not_finite,
            spike=self._is_spike(record, means["loss"]),
            loss_scale=verdict.loss_scale,
            tokens_per_s=tokens / max(sum(phases), 1e-9),
            sequences_per_s=0.0 if skipped else step.num_sequences / max(sum(phases), 1e-9),
            seconds=dict(zip(PHASES, phases, strict=True)),
            loop_seconds=record.loop_seconds,
            ended=ended,
            idle_share=math.nan if skipped else balance.idle_share,
            padding_share=math.nan if skipped else 1 - tokens / sum(balance.tokens),
            rank_tokens=tuple(balance.tokens) if has_ranks else None,
            rank_attention=tuple(balance.attention) if has_ranks else None,
            **means,
        )

    def _is_spike(self, record: PendingStep, loss: float) -> bool:
        """Whether this loss is a spike. Warns of the first of several in a row.

        Only pre-training has spikes: in fine-tuning the loss of examples learned by heart is near zero, so that every
        other example would be one.
        """
        step = record.step.number + 1
        is_spike = record.model.head == "pretrain" and self._spikes.is_spike(loss)
        if is_spike and not self._was_spike and self._is_writer:
            back = f"go back with `bertrain resume {self._folder} --from-step STEP --skip-steps {step}`"
            warn(f"loss spike at step {step}: {loss:.4f}, far above the steps before; if the loss stays there, {back}")
        self._was_spike = is_spike
        if self._divergence.has_diverged(loss) and self._is_writer:
            warn(f"the loss is {loss:.3f}, far above its start for {WINDOW} steps: lower optimizer.learning_rate")
        return is_spike

    def _write(self, *records: Record) -> None:
        """Write records. The loop checks `failure` after each step, since all ranks must stop together."""
        for record in records:
            assert self._file is not None
            if self.failure is not None:
                return
            try:
                self._file.write(json.dumps(to_dict(record)) + "\n")
                self._file.flush()
            except OSError as error:
                self.failure = error
        self._track([(record.step, dict(scalars(record))) for record in records])

    def _track(self, points: Points) -> None:
        for tracker in self._trackers:
            tracker.log(points)

    def sync(self) -> None:
        """Sync the file to disk, before a checkpoint that relies on it."""
        if self._file is not None and self.failure is None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.failure = error


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record that trackers show, by tag."""
    for name, value in vars(record).items():
        if isinstance(value, float):
            yield f"{record.kind}/{name}", value
        elif isinstance(value, dict):
            group = f"{record.kind}/" if name == "metrics" else f"{record.kind}/{name}/"
            yield from ((f"{group}{inner}", number) for inner, number in value.items() if isinstance(number, float))


def averages(
    sums: Tensor, num_predictions: int, num_sequences: int, model: ModelSettings, num_tokens: int = 0
) -> dict[str, float]:
    """Losses and accuracies from the sums over a step or an evaluation, all ranks together.

    An evaluation replaces no words, and so needs no `num_tokens`.
    """
    totals = unpack_sums(sums)
    num_predictions = max(1, num_predictions)  # data masked by other programs may have no masks in a step
    sequence_loss = totals["sequence_loss"] / num_sequences
    sequence_accuracy = totals["sequence_correct"] / num_sequences
    if model.head == "tag":
        return {"loss": totals["mlm_loss"] / num_predictions, "accuracy": totals["mlm_correct"] / num_predictions}
    if model.head != "pretrain":
        return {"loss": sequence_loss} | ({} if model.head in ("regress", "embed") else {"accuracy": sequence_accuracy})
    mlm_loss = totals["mlm_loss"] / num_predictions
    mlm_accuracy = totals["mlm_correct"] / num_predictions
    result = {"loss": mlm_loss + sequence_loss, "mlm_loss": mlm_loss, "mlm_accuracy": mlm_accuracy}
    if model.nsp:
        result |= {"nsp_loss": sequence_loss, "nsp_accuracy": sequence_accuracy}
    if model.rtd and num_tokens:
        result["rtd_loss"] = totals["rtd_loss"] / num_tokens
        result["rtd_accuracy"] = totals["rtd_correct"] / totals["rtd_tokens"]
        result["loss"] += model.rtd * result["rtd_loss"]
    return result


def energy_text(energy: dict[str, float]) -> str:
    if not energy:
        return ""
    if math.isnan(energy["joules"]):
        return "; energy unknown (see telemetry.json)"
    per_million = f"{energy['joules_per_million_tokens']:,.0f} J per million tokens"
    return f"; {energy['joules']:,.0f} J since the last start, {per_million}"
