"""Reads a run folder for a report, and computes the summary and the curves of it.

Missing or damaged files are no error: sentences about them are collected in `History.missing`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.base import logs
from bertrain.base.console import PHASES
from bertrain.base.errors import UserError
from bertrain.base.formatting import YARDSTICKS, counted, duration, few, headline_of, is_better_low
from bertrain.base.schema import Count, parse_json
from bertrain.data.formats.shards import CONTENT, MANIFEST
from bertrain.run import checkpoint
from bertrain.run.folder import ENVIRONMENT, TRAIN_PLAN, Run, read_starts
from bertrain.run.records import EvaluationRecord, RankMeans, is_metric
from bertrain.run.stream import Floats, MetricsTable, read_metrics
from bertrain.run.telemetry_reader import RunTelemetry, read_telemetry

MAX_POINTS = 1000  # of a curve; more would be megabytes
MAX_EVENTS = 50  # newest warnings and errors in the logs
LONG_GAP_S = 60.0  # time without a sample that is reported


@dataclass(frozen=True)
class CheckpointEntry:
    """A folder among a run's checkpoints."""

    name: str
    step: int
    bytes: int
    saved_s: float  # since the epoch
    is_best: bool
    state: str  # whole, not whole, damaged or put aside


@dataclass(frozen=True)
class History:
    """A run as read from its folder."""

    name: str
    run: Run
    table: MetricsTable
    starts: list[dict[str, Any]]
    lengths: dict[int, int] | None  # number of examples by length; None if the data is gone
    telemetry: RunTelemetry
    checkpoints: list[CheckpointEntry]
    events: list[dict[str, Any]]  # warnings and errors of all ranks, oldest first
    missing: list[str] = field(default_factory=list)  # sentences on missing or damaged files

    @property
    def num_steps(self) -> int:
        return self.table.num_steps

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        return self.table.evaluations

    @property
    def ending(self) -> str:
        return self.table.end.reason if self.table.end else "none so far: the run continues, or was stopped or killed"

    @property
    def metrics(self) -> list[str]:
        evaluated = (name for evaluation in self.evaluations for name in evaluation.metrics)
        return [name for name in dict.fromkeys([*self.table.columns, *evaluated]) if is_metric(name)]

    def column(self, name: str) -> Floats:
        return self.table.column(name)

    def phase(self, phase: str) -> Floats:
        return np.nan_to_num(self.column(f"seconds.{phase}"))

    @cached_property
    def summary(self) -> Summary:
        return summarize(self)


# --- reading -------------------------------------------------------------------------------------


def read(folder: Path, name: str) -> History:
    """Read a run folder. Raises UserError if it holds no run, or a run without steps."""
    run = Run.open(folder)
    table = read_metrics(folder / "metrics.jsonl")
    if not table.num_steps:
        raise UserError("no-metrics", f"the run {folder} has no metrics yet; report on it after its first steps")
    telemetry = read_telemetry(folder)
    starts = read_starts(folder / ENVIRONMENT, {"ranks?": Count, "predicted_step_ms?": float | None})
    ranks = logs.ranks_with_logs(folder)
    events = list(logs.logs(folder, level="warning"))[-MAX_EVENTS:] if ranks else []
    damage = "damaged" if (folder / ENVIRONMENT).is_file() else "missing"
    missing = [] if starts else [f"{ENVIRONMENT} is {damage}, so the machine is unknown"]
    missing += _missing(table, telemetry, ranks, starts)
    return History(name, run, table, starts, read_lengths(run), telemetry, list_checkpoints(run), events, missing)


def list_checkpoints(run: Run) -> list[CheckpointEntry]:
    """The checkpoint folders of a run, oldest first; their contents are not verified."""
    best = checkpoint.read_best(run.checkpoints)
    entries = []
    for path in run.checkpoints.glob("*step-*"):
        found = re.fullmatch(r"(|damaged-|aside-\d+-)step-(\d+)", path.name)  # not one that is being written
        if not found or not path.is_dir():
            continue
        try:
            files = [file.stat() for file in path.iterdir()]
        except FileNotFoundError:  # removed by the run just now
            continue
        is_whole = (path / checkpoint.MANIFEST).is_file()
        states = {"": "whole" if is_whole else "not whole", "damaged-": "damaged, passed over"}
        kind, step = found[1], int(found[2])
        size, saved_s = sum(file.st_size for file in files), max((file.st_mtime for file in files), default=0.0)
        is_best = not kind and step == best
        entries.append(CheckpointEntry(path.name, step, size, saved_s, is_best, states.get(kind, "put aside")))
    return sorted(entries, key=lambda one: (one.step, one.name))


def read_lengths(run: Run) -> dict[int, int] | None:
    """The length histogram of the training data, if the same data is still in its place."""
    with suppress(OSError):
        manifest = (run.data / MANIFEST).read_bytes()
        if hashlib.sha256(manifest).hexdigest() != run.data_fingerprint:
            return None
        return {int(length): count for length, count in parse_json(manifest, CONTENT)["length_histogram"].items()}
    from bertrain.data.formats.index import lengths_if_unchanged

    lengths = lengths_if_unchanged(run.data, run.vocabulary_hash, run.data_fingerprint)
    if lengths is None:
        return None
    found, counts = np.unique(lengths, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def display_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths if two have the same name; those of `bertrain train` with its folder."""
    paths = [folder.resolve() for folder in folders]
    names = [f"{path.parent.name}/{path.name}" if (path.parent / TRAIN_PLAN).is_file() else path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [name.encode("utf-8", "replace").decode() for name in names]  # a folder's name need not be Unicode


def _missing(
    table: MetricsTable, telemetry: RunTelemetry, ranks: Sequence[int], starts: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Sentences on what is missing in metrics, telemetry and the logs of `ranks`."""
    if table.num_unreadable:
        yield f"{counted(table.num_unreadable, 'line')} of metrics.jsonl could not be read"
    steps = table.columns["step"]
    gaps = np.diff(steps, prepend=0)
    if lost := int(gaps[gaps > 1].sum() - (gaps > 1).sum()):
        places = few((f"{int(first):,}" for first in (steps - gaps + 1)[gaps > 1]), 5)
        yield f"not in metrics.jsonl: {counted(lost, 'step')}, from step {places} on"
    if repeated := int((gaps < 1).sum()):
        yield f"out of order in metrics.jsonl: {counted(repeated, 'step')}; all are shown"
    yield from telemetry.missing
    if telemetry.num_unreadable:
        yield f"{counted(telemetry.num_unreadable, 'line')} of telemetry could not be read"
    if set_back := max((device.num_set_back for device in telemetry.devices), default=0):
        times = "once" if set_back == 1 else f"{set_back:,} times"
        yield f"the clock was set back {times} between samples; plots count the time between samples"
    longest = max(telemetry.devices, key=lambda device: device.longest_gap_s, default=None)
    if longest is not None and longest.longest_gap_s > LONG_GAP_S:
        yield f"{longest.name} has no telemetry for {duration(longest.longest_gap_s)} at the longest"
    world = max((int(start.get("ranks", 1)) for start in starts), default=1)
    if not ranks:
        yield "there are no logs, so warnings are unknown"
    elif absent := list(islice((str(rank) for rank in range(world) if rank not in ranks), 9)):  # of any number
        yield f"there is no log of rank {few(absent, 8)}"


# --- computing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The metrics at the head of the page."""

    steps: int
    samples: int
    tokens: int
    seconds: list[float]  # of each phase, over all steps, without evaluation and saving
    shares: list[float]  # of each phase in their sum
    tokens_per_s: float
    samples_per_s: float
    median_step_s: float  # of the steps that were computed
    tail: int  # number of last steps that `last` is the mean of
    last: dict[str, float]  # every metric of steps
    headline: str | None  # the main metric of the evaluations
    best: EvaluationRecord | None  # the evaluation with its best value, the earliest of equals
    padding: float  # share of the computed tokens; NaN if unknown
    idle: float  # share of the ranks' time; NaN if unknown
    not_applied: list[int]  # steps that were not finite
    skipped: list[int]  # steps named by train.skip_steps
    spikes: list[int]  # steps whose loss was far above those before


def summarize(history: History) -> Summary:
    numbers = history.column("step")
    tail = max(1, min(10, history.num_steps // 10))
    seconds = [float(history.phase(phase).sum(dtype=np.float64)) for phase in PHASES]
    total_seconds, tokens = max(sum(seconds), 1e-9), int(np.nansum(history.column("tokens")))
    samples = history.column("samples")
    is_skipped = history.column("skipped") == 1
    finite = np.isfinite(history.column("loss") + history.column("gradient_norm"))
    is_bad = ~(finite & (history.column("applied") == 1)) & ~is_skipped
    computed = np.sum([history.phase(phase) for phase in PHASES], axis=0)[~is_skipped]
    padding, weights = history.column("padding_share").astype(np.float64), history.column("tokens")
    known = np.isfinite(padding) & (weights > 0)
    evaluated = {name for one in history.evaluations for name in one.metrics}
    headline = headline_of([name for name in history.metrics if name in evaluated])
    return Summary(
        steps=int(numbers[-1]),
        samples=int(np.nan_to_num(samples[-1])),
        tokens=tokens,
        seconds=seconds,
        shares=[part / total_seconds for part in seconds],
        tokens_per_s=tokens / total_seconds,
        samples_per_s=float(np.nan_to_num(samples[-1])) / total_seconds,
        median_step_s=float(np.median(computed)) if len(computed) else float("nan"),
        tail=tail,
        last={name: mean(history.column(name)[-tail:]) for name in history.table.columns if is_metric(name)},
        headline=headline,
        best=best_evaluation(history.evaluations, headline),
        padding=float((padding * weights)[known].sum() / weights[known].sum()) if known.any() else float("nan"),
        idle=mean(history.column("idle_share")),
        not_applied=numbers[is_bad].astype(int).tolist(),
        skipped=numbers[is_skipped].astype(int).tolist(),
        spikes=numbers[history.column("spike") == 1].astype(int).tolist(),
    )


def best_evaluation(evaluations: Sequence[EvaluationRecord], metric: str | None) -> EvaluationRecord | None:
    """The evaluation with the best value of a metric, the earliest of equals."""
    if metric is None:
        return None
    sign = -1 if is_better_low(metric) else 1
    with_metric = (one for one in evaluations if metric in one.metrics)
    return max(with_metric, key=lambda one: sign * one.metrics[metric], default=None)


def best_by_metric(history: History) -> dict[str, float]:
    """The best value of every evaluated metric, baselines left out."""
    kept = {metric: best_evaluation(history.evaluations, metric) for metric in history.metrics}
    return {metric: best.metrics[metric] for metric, best in kept.items() if best and not metric.startswith(YARDSTICKS)}


def rank_means(table: MetricsTable) -> list[RankMeans]:
    """Means over the whole run: an entry for each rank on each host it was on."""
    means = []
    for (rank, host), sums in sorted(table.ranks.items()):
        seconds = {phase: sums.seconds.get(phase, 0.0) / sums.records for phase in PHASES}
        means.append(RankMeans(rank, host, sums.tokens / sums.records, seconds))
    return means


def mean(values: Floats) -> float:
    """Mean of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else float("nan")


def group_size(count: int, most: int = MAX_POINTS) -> int:
    """How many consecutive values to average, so that at most `most` remain."""
    return max(1, -(-count // most))


def thin(values: Floats, most: int = MAX_POINTS) -> Floats:
    """Downsample: means of consecutive groups of equal size, the last one may be smaller."""
    group = group_size(len(values), most)
    return np.array([mean(values[first : first + group]) for first in range(0, len(values), group)])


def smoothing_window(count: int) -> int:
    """Points that a smoothed curve averages: an odd number, about a thirtieth of all; 1 is no smoothing."""
    return 2 * (count // 60) + 1


def smooth(values: Floats, window: int) -> Floats:
    """Centered mean over `window` points, over fewer at the ends so that it stays centered."""
    reach = [min(index, len(values) - 1 - index, window // 2) for index in range(len(values))]
    return np.array([mean(values[index - half : index + half + 1]) for index, half in enumerate(reach)])
