"""The records in metrics.jsonl, one JSON object per line: steps, evaluations, times of ranks, and the end of the run.

Each record is a dataclass whose fields are the keys of its line, in this order. On disk a number that is not finite is
null, and a field that is None is absent. A reader ignores keys it does not know and takes the defaults for missing
ones, so older and newer files can be read. `run/stream.py` reads the steps of long runs as columns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, TypeVar

from bertrain.base.files import read_tail, replacing
from bertrain.base.formatting import THRESHOLD, is_speed
from bertrain.base.schema import Count, Finite, JsonError, check_value, parse_json

NAN = math.nan
OWN_PHASES = ("data", "forward_backward")  # of a rank, before it waits for the others
TAIL_BYTES = 256 << 10  # read at first to find the newest records


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, all ranks together."""

    kind: ClassVar[str] = "step"

    step: Count
    """number of the step, from 1"""
    samples: Count = 0
    """examples trained on or skipped since the run began, this step included"""
    tokens: Count = 0
    """real tokens in this step, padding not counted"""
    loss: float = NAN
    """the training loss: `mlm_loss` + `nsp_loss` + `model.rtd` times `rtd_loss`, or the loss of the task"""
    mlm_loss: float | None = None
    """mean cross-entropy of the masked tokens, in nats; absent in fine-tuning"""
    mlm_accuracy: float | None = None
    """share of the masked tokens predicted correctly; absent in fine-tuning"""
    nsp_loss: float | None = None
    """mean cross-entropy of next-sentence prediction; absent with `--model.nsp false` and in fine-tuning"""
    nsp_accuracy: float | None = None
    """share of next-sentence predictions that are correct; absent with `--model.nsp false` and in fine-tuning"""
    rtd_loss: float | None = None
    """cross-entropy of replaced-token detection, per token of the step; with `--model.rtd` only"""
    rtd_accuracy: float | None = None
    """share of tokens other than [MASK] correctly called replaced or original; with `--model.rtd` only"""
    accuracy: float | None = None
    """share of examples classified correctly; in fine-tuning of a classifier only"""
    learning_rate: float = NAN
    """learning rate of this step"""
    gradient_norm: float = NAN
    """global gradient norm, before clipping"""
    applied: bool = True
    """false if the loss or the gradient was not finite; weights and optimizer state then stayed as they were"""
    skipped: bool = False
    """true if `train.skip_steps` named the step: nothing was computed"""
    not_finite: int = 0
    """steps so far whose loss or gradient was not finite"""
    spike: bool = False
    """true if the loss was far above the losses of the steps before"""
    loss_scale: float | None = None
    """factor that the loss was multiplied by; in fp16 only"""
    tokens_per_s: float = NAN
    """real tokens per second"""
    sequences_per_s: float | None = None
    """sequences per second"""
    seconds: dict[str, Finite] = field(default_factory=dict)
    """time in each phase: `data` (waiting for it), `forward_backward`, `reduction` (the rest of the all-reduce that did
    not overlap with backward) and `optimizer`"""
    loop_seconds: float | None = None
    """time since the first step over all starts, evaluation included: the clock of `train.budget`"""
    ended: float = NAN
    """end of the last phase, in Unix seconds by the clock of telemetry.csv"""
    idle_share: float = NAN
    """share of the ranks' time spent waiting for the busiest rank, estimated from lengths; null if skipped"""
    padding_share: float = NAN
    """share of the computed tokens that are padding; null if skipped"""
    rank_tokens: tuple[int, ...] | None = None
    """tokens that each rank computed, padding included; with several ranks only"""
    rank_attention: tuple[int, ...] | None = None
    """sum of the squared sequence lengths of each rank, padding included; with several ranks only"""

    @property
    def duration(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class ClassScores:
    """What was predicted of one class: of the rows with a label, or of the entities of a type."""

    label: str
    """name of the class"""
    precision: Finite
    """share of its predictions that are correct"""
    recall: Finite
    """share of its examples that are predicted"""
    f1: Finite
    """their harmonic mean; a ratio of 0 to 0 is 0"""
    support: Count
    """number of its examples"""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation on held-out examples."""

    kind: ClassVar[str] = "evaluation"

    step: Count
    """number of steps trained before it"""
    samples: Count = 0
    """examples trained on before it"""
    metrics: dict[str, float] = field(default_factory=dict)
    """every other key of the line: a metric by name, of pre-training or of the task"""
    by_class: tuple[ClassScores, ...] | None = None
    """one entry per class, on the main held-out split; of a classifier or a tagger only"""


PRETRAINING_METRICS = {
    "loss": "`mlm_loss` + `nsp_loss`, without dropout, with masks that never change",
    "mlm_loss": "mean cross-entropy of the masked tokens, in nats",
    "mlm_accuracy": "share of the masked tokens predicted correctly",
    "nsp_loss": "mean cross-entropy of next-sentence prediction; absent with `--model.nsp false`",
    "nsp_accuracy": "share of next-sentence predictions that are correct; absent with `--model.nsp false`",
    "hidden_accuracy": "accuracy over the tokens replaced by [MASK]; the others kept a word, their own or a random one",
    "constant_accuracy": "accuracy of always predicting the most frequent masked token: the baseline",
    "examples": "number of held-out examples",
}
"""The metrics of an evaluation of pre-training; a task has its own."""


@dataclass(frozen=True)
class RankMeans:
    """One rank's means over the steps since the last such record."""

    rank: Count
    """number of the rank"""
    host: str = ""
    """host name of its machine"""
    tokens: float = NAN
    """tokens the rank itself computed, per step"""
    seconds: dict[str, Finite] = field(default_factory=dict)
    """time of this rank in each phase, per step"""

    @property
    def own_seconds(self) -> float:
        """Time of the rank's own work in a step, before it waits for the others."""
        return sum(self.seconds.get(phase, 0.0) for phase in OWN_PHASES)


@dataclass(frozen=True)
class RanksRecord:
    """Where each rank's time goes, every `log.every_steps` steps; with several ranks only."""

    kind: ClassVar[str] = "ranks"

    step: Count
    """last of the steps averaged"""
    ranks: tuple[RankMeans, ...] = ()
    """one entry per rank"""


@dataclass(frozen=True)
class EndRecord:
    """The end of the run: its last line."""

    kind: ClassVar[str] = "end"

    step: Count
    """number of steps trained"""
    samples: Count = 0
    """examples trained on"""
    reason: str = ""
    """the limit or target that was reached"""
    loop_seconds: float = NAN
    """time since the first step over all starts, evaluation included: the clock of `train.budget`"""
    evaluation_seconds: float | None = None
    """the part of it that evaluations took"""
    saving_seconds: float | None = None
    """the part of it in which training waited for checkpoints to be written"""
    joules: float | None = None
    """energy of all ranks' devices since the last start, null if one of them cannot be measured; with telemetry only"""
    joules_per_million_tokens: float | None = None
    """the same per million real tokens trained on since then; with telemetry only"""


Record = StepRecord | EvaluationRecord | RanksRecord | EndRecord
KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in (StepRecord, EvaluationRecord, RanksRecord, EndRecord)}
ENTRIES = (RankMeans, ClassScores)  # parts of records
STEP_METRICS = {
    "loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "rtd_loss", "rtd_accuracy", "accuracy"
}  # fmt: skip
NOT_METRICS = {"kind", "examples"} | {entry.name for kind in KINDS.values() for entry in fields(kind)} - STEP_METRICS

R = TypeVar("R", bound=Record)


def is_metric(name: str) -> bool:
    """Whether a key of a step or an evaluation measures the quality of the model."""
    return name not in NOT_METRICS and "." not in name and not is_speed(name) and not name.startswith(THRESHOLD)


# --- to and from JSON ------------------------------------------------------------------------------


def to_dict(record: Record | RankMeans | ClassScores) -> dict[str, Any]:
    result: dict[str, Any] = {} if isinstance(record, ENTRIES) else {"kind": record.kind}
    for name, value in vars(record).items():
        if value is not None:
            result |= _to_json(value) if name == "metrics" else {name: _to_json(value)}
    return result


def _to_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _to_json(number) for name, number in value.items()}
    return [to_dict(one) if isinstance(one, ENTRIES) else one for one in value] if isinstance(value, tuple) else value


def from_dict(line: dict[str, Any]) -> Record | None:
    """The record of a JSON object, or None if its kind is unknown. Raises JsonError."""
    kind = KINDS.get(str(line.get("kind")))
    if kind is EvaluationRecord:
        others = {name: value for name, value in line.items() if name not in ("kind", "step", "samples")}
        line = line | {"metrics": {name: one for name, one in others.items() if type(one) in (int, float, NoneType)}}
    record: Record | None = check_value(line, kind) if kind else None
    return record


# --- files -----------------------------------------------------------------------------------------


def parse_lines(text: bytes) -> list[Record]:
    """The records of a piece of a metrics file; lines cut by its edges or torn by a crash are left out."""
    records = []
    for line in text.split(b"\n"):
        try:
            record = from_dict(parse_json(line, {}))
        except JsonError:
            continue
        if record is not None:
            records.append(record)
    return records


def read_records(path: str | Path) -> list[Record]:
    """Every record of a metrics file; none if there is no file."""
    path = Path(path)
    return parse_lines(path.read_bytes()) if path.is_file() else []


def steps_in(path: Path) -> Iterator[StepRecord]:
    """The steps of a metrics file, one by one: there may be millions."""
    with open(path, "rb") as lines:
        for line in lines:
            yield from (record for record in parse_lines(line) if isinstance(record, StepRecord))


def tails(path: str | Path, num_bytes: int = TAIL_BYTES, max_bytes: float = math.inf) -> Iterator[list[Record]]:
    """The records in the last `num_bytes` of a metrics file, then those in ever longer tails, up to `max_bytes`."""
    while num_bytes <= max_bytes:
        tail = read_tail(Path(path), num_bytes)
        yield parse_lines(tail)
        if len(tail) < num_bytes:
            return
        num_bytes *= 4


def newest(records: Sequence[Record], kind: type[R]) -> R | None:
    """The newest of these records of one kind, or None."""
    return next((record for record in reversed(records) if isinstance(record, kind)), None)


def last_record(path: str | Path, kind: type[R]) -> R | None:
    return next(filter(None, (newest(records, kind) for records in tails(path))), None)


def thresholds_at(path: str | Path, step: int) -> dict[str, float]:
    """The thresholds by label that the evaluation after `step` steps fitted; empty if there was none."""
    evaluations = [one for one in read_records(path) if isinstance(one, EvaluationRecord) and one.step == step]
    metrics = evaluations[-1].metrics if evaluations else {}
    return {name.removeprefix(THRESHOLD): value for name, value in metrics.items() if name.startswith(THRESHOLD)}


def drop_after(path: Path, step: int, num_kept: int = 0) -> list[StepRecord]:
    """Remove the records after `step`, the end of the run and a torn last line from a metrics file.

    A resumed run then records each step once. Returns the last `num_kept` steps that remain. Lines are copied one by
    one, unchanged: there may be millions, and a newer version may have written keys that this one does not know.
    Damaged lines stay, because a report counts them.
    """
    if not path.is_file():
        return []
    steps: deque[str] = deque(maxlen=num_kept)
    with open(path, encoding="utf-8", errors="replace") as lines, replacing(path) as kept:
        for line in lines:
            if not line.endswith("\n"):
                continue
            try:
                content = parse_json(line, {"kind": str, "step": Count})
            except JsonError:
                kept.write(line)
                continue
            if content["step"] > step or content["kind"] == EndRecord.kind:
                continue
            kept.write(line)
            if content["kind"] == StepRecord.kind:
                steps.append(line)
    return [record for record in parse_lines("".join(steps).encode()) if isinstance(record, StepRecord)]
