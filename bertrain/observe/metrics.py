"""What a run records of itself: metrics.jsonl (every step, once), TensorBoard, and what the console shows.

Numbers that live on the device are kept there until a line is due; only then is the device waited for.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bertrain.files import write_atomically
from bertrain.observe.console import PHASES, Console, evaluation_text
from bertrain.train.loss_scale import MINIMUM


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


@dataclass
class StepRecord:
    """One step as the loop hands it over. `sums` and `verdict` may still be on their way on the device."""

    step: int
    samples: int
    tokens: int
    num_predictions: int
    num_sequences: int
    nsp: bool
    learning_rate: float
    sums: Tensor  # losses and right answers of MLM and NSP, over all ranks
    verdict: Tensor  # gradient norm, 1 if the step was applied, and in fp16 the loss scale it was computed at
    marks: list[Any] = field(default_factory=list)


class Metrics:
    """Collects step records and writes them out when a line is due."""

    def __init__(
        self,
        folder: Path,
        stopwatch: Stopwatch,
        console: Console,
        *,
        first_step: int,
        last_step: int,
        tensorboard: bool,
        is_writer: bool,
    ) -> None:
        self._stopwatch, self._console = stopwatch, console
        self._last_step, self._is_writer = last_step, is_writer
        self._waiting: list[StepRecord] = []
        self._file: TextIO | None = None
        self._board: Any = None
        self.failure: OSError | None = None
        if is_writer:
            drop_after(folder / "metrics.jsonl", first_step)
            self._file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115 - closed in close()
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def add(self, record: StepRecord) -> None:
        self._waiting.append(record)

    def flush(self) -> list[bool]:
        """Write the waiting steps, say one line about them, and return for each whether it was as it should be.

        That is: applied, or left out because of an overflow that a smaller loss scale mends.
        """
        if not self._waiting:
            return []
        records = [self._finish(record) for record in self._waiting]
        self._waiting.clear()
        if self._is_writer:
            for record in records:
                self._write(record)
            self._console.steps(records, self._last_step)
        return [record["applied"] or record.get("loss_scale", MINIMUM) > MINIMUM for record in records]

    def evaluation(self, step: int, samples: int, result: dict[str, float]) -> None:
        """Write and say the result of an evaluation."""
        if self._is_writer:
            self._write({"kind": "evaluation", "step": step, "samples": samples} | result)
            self._console.say(f"evaluation at step {step} ({samples} samples): {evaluation_text(result)}")

    def close(self) -> None:
        """Close the files; what cannot be written any more has been noted, or is TensorBoard's copy only."""
        for sink in (self._file, self._board):
            if sink is not None:
                with suppress(OSError):
                    sink.close()

    def _finish(self, record: StepRecord) -> dict[str, Any]:
        gradient_norm, applied, *loss_scale = record.verdict.tolist()
        phases = self._stopwatch.seconds(record.marks)
        return {
            "kind": "step",
            "step": record.step,
            "samples": record.samples,
            "tokens": record.tokens,
            **averages(record.sums, record.num_predictions, record.num_sequences, nsp=record.nsp),
            "learning_rate": record.learning_rate,
            "gradient_norm": gradient_norm,
            "applied": bool(applied),
            **({"loss_scale": loss_scale[0]} if loss_scale else {}),
            "tokens_per_s": record.tokens / max(sum(phases), 1e-9),
            "seconds": dict(zip(PHASES, phases, strict=True)),
        }

    def _write(self, record: dict[str, Any]) -> None:
        """Write one record. An error is kept for the loop to see, since the ranks must end together."""
        assert self._file is not None
        if self.failure is not None:
            return
        try:
            self._file.write(json.dumps(_finite(record)) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in record.items():
                    if isinstance(value, float):
                        self._board.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        except OSError as error:
            self.failure = error

    def sync(self) -> None:
        """Make sure of what was written, before a checkpoint relies on it."""
        if self._file is not None and self.failure is None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.failure = error


def averages(sums: Tensor, num_predictions: int, num_sequences: int, *, nsp: bool) -> dict[str, float]:
    """Losses and accuracies from the sums over a step or an evaluation, all ranks together."""
    mlm_loss, nsp_loss, mlm_correct, nsp_correct = sums.tolist()
    result = {
        "loss": mlm_loss / num_predictions + nsp_loss / num_sequences,
        "mlm_loss": mlm_loss / num_predictions,
        "mlm_accuracy": mlm_correct / num_predictions,
    }
    if nsp:
        result |= {"nsp_loss": nsp_loss / num_sequences, "nsp_accuracy": nsp_correct / num_sequences}
    return result


def drop_after(path: Path, step: int) -> None:
    """Take out of a metrics file what lies beyond `step`, so that a resumed run says each step once."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue  # a line torn by a crash belongs to a step that will be done again
    write_atomically(path, "".join(kept))


def _finite(value: Any) -> Any:
    """JSON knows no NaN: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
