"""What a run records of itself: metrics.jsonl (every step once, evaluations, where each rank's time went), TensorBoard,
and what the console shows.

Numbers that live on the device are kept there until a line is due; only then is the device waited for.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bertrain.base import clock
from bertrain.base.console import PHASES, Console, console_line, evaluation_text, warn
from bertrain.base.files import replacing
from bertrain.base.logs import note
from bertrain.config.settings import ModelSettings
from bertrain.data.feed.balance import Balance
from bertrain.model.sums import Totals
from bertrain.optim.verdict import Verdict
from bertrain.run.loss_scale import MINIMUM
from bertrain.run.samples import newest
from bertrain.run.spikes import WINDOW, SpikeWatch
from bertrain.run.stragglers import RankTimes

MOST_DURATIONS = 20  # that are remembered, for whoever asks how fast it goes


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
        """When each of these marks, in their order, was passed, by `clock.now`.

        On a GPU the last one is waited for, and taken to be passed just then.
        """
        if not self._on_gpu:
            return [clock.now() - (time.perf_counter() - mark) for mark in marks]
        marks[-1].synchronize()
        passed = clock.now()
        return [passed - mark.elapsed_time(marks[-1]) / 1e3 for mark in marks]


@dataclass
class StepRecord:
    """One step as the loop hands it over. `sums` and `verdict` may still be on their way on the device."""

    step: int
    samples: int
    tokens: int
    num_predictions: int
    num_sequences: int
    model: ModelSettings
    learning_rate: float
    sums: Tensor  # packed `Sums` over all ranks
    verdict: Tensor  # packed `Verdict`
    marks: list[Any] = field(default_factory=list)
    balance: Balance | None = None  # where nothing was computed, there is none
    own_tokens: int = 0  # of this rank alone
    skipped: bool = False  # left out on request


class Metrics:
    """Collects step records and writes them out when a line is due."""

    def __init__(
        self,
        folder: Path,
        stopwatch: Stopwatch,
        console: Console,
        *,
        first_step: int,
        last_step: int | None,
        tensorboard: bool,
        is_writer: bool,
        rank_times: RankTimes | None = None,
    ) -> None:
        self._folder, self._stopwatch, self._console = folder, stopwatch, console
        self.last_step, self._is_writer, self._rank_times = last_step, is_writer, rank_times
        self._waiting: list[StepRecord] = []
        self.durations: deque[float] = deque(maxlen=MOST_DURATIONS)
        """Seconds of the newest steps that were computed."""
        self._not_finite, self._spikes, self._was_spike = 0, SpikeWatch(), False
        self._file: TextIO | None = None
        self._board: Any = None
        self.failure: OSError | None = None
        if is_writer:
            kept = drop_after(folder / "metrics.jsonl", first_step)
            self._not_finite = kept[-1].get("not_finite", 0) if kept else 0
            self._spikes = SpikeWatch(record["loss"] for record in kept if record["loss"] is not None)
            self._file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115 - closed in close()
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def add(self, record: StepRecord) -> None:
        self._waiting.append(record)

    def flush(self) -> list[bool]:
        """Write the waiting steps, say one line about them, and return for each whether it was as it should be.

        That is: applied, left out on request, or because of an overflow that a smaller loss scale mends.
        """
        if not self._waiting:
            return []
        ends = self._stopwatch.moments([record.marks[-1] for record in self._waiting])
        records = [self._finish(record, ended) for record, ended in zip(self._waiting, ends, strict=True)]
        if self._rank_times is not None:
            for record, waiting in zip(records, self._waiting, strict=True):
                self._rank_times.note(record["step"], record["seconds"], waiting.own_tokens)
            for arrived in self._rank_times.arrived():
                self._write(arrived)
        self._waiting.clear()
        if self._is_writer:
            for record in records:
                self._write(record)
            self._show_telemetry(records[-1]["step"])
            self._console.steps(records, self.last_step)
        else:
            note("info", "steps", console_line(records, self.last_step), step=records[-1]["step"])
        return [_is_as_it_should_be(record) for record in records]

    def evaluation(self, step: int, samples: int, result: dict[str, float]) -> None:
        """Write and say the result of an evaluation."""
        if self._is_writer:
            self._write({"kind": "evaluation", "step": step, "samples": samples} | result)
            self._console.say(f"evaluation at step {step} ({samples} samples): {evaluation_text(result)}")

    def end(
        self, step: int, samples: int, reason: str, seconds: float, energy: dict[str, float | None] | None = None
    ) -> None:
        """Write and say why the run is over, and what it took: time in the loop over all its starts, and energy."""
        if self._is_writer:
            self._collect_last_times()
            took = {"loop_seconds": seconds} | (energy or {})
            self._write({"kind": "end", "step": step, "samples": samples, "reason": reason} | took)
            self._console.say(f"the end, after step {step} ({samples} samples): {reason}{energy_text(energy)}")

    def close(self) -> None:
        """Close the files; what cannot be written any more has been noted, or is TensorBoard's copy only."""
        self._collect_last_times()
        for sink in (self._file, self._board):
            if sink is not None:
                with suppress(OSError):
                    sink.close()

    def _collect_last_times(self) -> None:
        if self._rank_times is not None:
            for arrived in self._rank_times.close():
                self._write(arrived)

    def _finish(self, record: StepRecord, ended: float) -> dict[str, Any]:
        verdict = Verdict.unpack(record.verdict)
        phases = self._stopwatch.seconds(record.marks)
        figures = averages(record.sums, record.num_predictions, record.num_sequences, record.model)
        if not record.skipped:
            self.durations.append(sum(phases))
            self._not_finite += not verdict.applied
        return {
            "kind": "step",
            "step": record.step,
            "samples": record.samples,
            "tokens": record.tokens,
            **figures,
            "learning_rate": record.learning_rate,
            "gradient_norm": verdict.gradient_norm,
            "applied": verdict.applied,
            "skipped": record.skipped,
            "not_finite": self._not_finite,
            "spike": self._watch(record, figures["loss"]),
            **({} if verdict.loss_scale is None else {"loss_scale": verdict.loss_scale}),
            "tokens_per_s": record.tokens / max(sum(phases), 1e-9),
            "seconds": dict(zip(PHASES, phases, strict=True)),
            "ended": ended,
            **_balance_fields(record.balance, record.tokens),
        }

    def _watch(self, record: StepRecord, loss: float) -> bool:
        """Whether this loss is a spike, with a warning at the first of several in a row.

        Fine-tuning has none: once it knows its few examples by heart, every one that it does not would be.
        """
        step = record.step
        is_spike = record.model.head == "pretrain" and self._spikes.is_spike(loss)
        if is_spike and not self._was_spike and self._is_writer:
            warn(
                f"the loss of step {step} is {loss:.4f}, far above those before it; should it stay there, go back with "
                f"`bertrain resume {self._folder} --from-step STEP --skip-steps {step}`"
            )
        self._was_spike = is_spike
        return is_spike

    def _show_telemetry(self, step: int) -> None:
        """Show TensorBoard the newest sample of each device, where a run has telemetry."""
        for device, sample in newest(self._folder).items() if self._board is not None else ():
            for name, value in sample.items():
                self._board.add_scalar(f"telemetry/{device}/{name}", value, step)

    def _write(self, record: dict[str, Any]) -> None:
        """Write one record. An error is kept for the loop to see, since the ranks must end together."""
        assert self._file is not None
        if self.failure is not None:
            return
        try:
            self._file.write(json.dumps(_finite(record)) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in scalars(record):
                    self._board.add_scalar(name, value, record["step"])
        except OSError as error:
            self.failure = error

    def sync(self) -> None:
        """Make sure of what was written, before a checkpoint relies on it."""
        if self._file is not None and self.failure is None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.failure = error


def scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What TensorBoard shows of a record, the seconds of each phase included."""
    for name, value in record.items():
        for inner, number in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(number, float):
                yield "/".join(part for part in (record["kind"], name, inner) if part), number


def averages(sums: Tensor, num_predictions: int, num_sequences: int, model: ModelSettings) -> dict[str, float]:
    """Losses and accuracies from the sums over a step or an evaluation, all ranks together."""
    totals = Totals.unpack(sums)
    sequence_loss, sequence_accuracy = totals.sequence_loss / num_sequences, totals.sequence_correct / num_sequences
    if model.head != "pretrain":
        return {"loss": sequence_loss} | ({} if model.head == "regress" else {"accuracy": sequence_accuracy})
    mlm_loss = totals.mlm_loss / num_predictions
    result = {
        "loss": mlm_loss + sequence_loss,
        "mlm_loss": mlm_loss,
        "mlm_accuracy": totals.mlm_correct / num_predictions,
    }
    if model.nsp:
        result |= {"nsp_loss": sequence_loss, "nsp_accuracy": sequence_accuracy}
    return result


def energy_text(energy: dict[str, float | None] | None) -> str:
    """What telemetry measured, to stand behind the reason of the end."""
    if energy is None:
        return ""
    if energy["joules"] is None:
        return "; its energy is not known (telemetry.json says why)"
    per_million = f"{energy['joules_per_million_tokens']:,.0f} J a million tokens"
    return f"; {energy['joules']:,.0f} J since it was started, {per_million}"


def _balance_fields(balance: Balance | None, tokens: int) -> dict[str, Any]:
    """The shares of idle ranks and of padding, and what each rank computed, where there are several."""
    fields: dict[str, Any] = {
        "idle_share": balance.idle_share if balance else None,
        "padding_share": 1 - tokens / sum(balance.tokens) if balance else None,
    }
    if balance is not None and len(balance.work) > 1:
        fields |= {"rank_tokens": balance.tokens, "rank_attention": balance.attention}
    return fields


def drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Take out of a metrics file what lies beyond `step`, and an end that was none; returns the last steps left.

    So a resumed run says each step once. Lines are copied one by one: there may be millions.
    """
    steps: deque[dict[str, Any]] = deque(maxlen=WINDOW)
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", errors="replace") as lines, replacing(path) as kept:
        for line in lines:
            try:
                record = json.loads(line)
                if not line.endswith("\n") or record["step"] > step or record.get("kind") == "end":
                    continue
            except (ValueError, KeyError, TypeError):
                continue  # a line torn by a crash belongs to a step that will be done again
            kept.write(line)
            if record.get("kind") == "step":
                steps.append(record)
    return list(steps)


def _finite(value: Any) -> Any:
    """JSON knows no NaN: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_as_it_should_be(record: dict[str, Any]) -> bool:
    return record["applied"] or record["skipped"] or record.get("loss_scale", MINIMUM) > MINIMUM
