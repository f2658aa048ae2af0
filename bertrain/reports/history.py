"""What a run folder says, and the arithmetic that a report does on it: pure functions, no drawing.

What is missing or damaged there is no error: it is put into words, for the report to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.base import logs
from bertrain.base.console import PHASES
from bertrain.base.errors import UserError
from bertrain.base.formatting import counted, duration, headline_of, is_better_low, is_metric, times
from bertrain.data.formats.shards import MANIFEST
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.run.samples import Telemetry, read_telemetry
from bertrain.run.stream import Floats, Told, read_stream

MOST_POINTS = 1000  # of a curve; more could not be told apart and would weigh megabytes
MOST_BARS = 40  # of the length histogram
MOST_EVENTS = 50  # warnings and errors of the logs, the newest
LONG_GAP_S = 60.0  # without a sample: long enough to be said


@dataclass(frozen=True)
class Kept:
    """A folder among a run's checkpoints."""

    name: str
    step: int | None
    bytes: int
    saved_s: float  # since the epoch
    is_best: bool
    state: str  # whole, damaged, put aside


@dataclass(frozen=True)
class History:
    """A run as its folder tells it."""

    name: str
    run: Run
    told: Told
    starts: list[dict[str, Any]]
    lengths: dict[int, int] | None  # examples of each length; None if the data is no longer there
    telemetry: Telemetry
    checkpoints: list[Kept]
    events: list[dict[str, Any]]  # warnings and errors of all ranks, oldest first
    missing: list[str] = field(default_factory=list)  # what the folder should say and does not, in words

    @property
    def num_steps(self) -> int:
        return len(self.told.columns["step"])

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self.told.records if record["kind"] == "evaluation"]

    @property
    def ending(self) -> str:
        """How it ended, as far as the metrics tell."""
        ends = [record["reason"] for record in self.told.records if record["kind"] == "end"]
        return ends[-1] if ends else "none so far: it goes on, or was stopped or killed"

    @property
    def metrics(self) -> list[str]:
        """Names of the numbers that say how good the model is, of steps and of evaluations."""
        evaluated = (name for result in self.evaluations for name in result)
        return [name for name in dict.fromkeys([*self.told.columns, *evaluated]) if is_metric(name)]

    def column(self, name: str) -> Floats:
        """One number of every step; NaN where it was not finite or is not there."""
        found = self.told.columns.get(name)
        return found if found is not None else np.full(self.num_steps, np.nan)

    def phase(self, phase: str) -> Floats:
        """Seconds of one phase of every step."""
        return np.nan_to_num(self.column(f"seconds.{phase}"))

    @cached_property
    def summary(self) -> Summary:
        return summarize(self)


# --- reading -------------------------------------------------------------------------------------


def read(folder: Path, name: str) -> History:
    """Read a run folder, or say in a sentence why there is nothing to report."""
    run = Run.open(folder)
    told = read_stream(folder / "metrics.jsonl")
    if not len(told.columns.get("step", ())):
        raise UserError(f"the run {folder} has no metrics yet; report on it after its first steps")
    telemetry, (starts, damage) = read_telemetry(folder), _read_starts(folder)
    events = list(logs.logs(folder, level="warning"))[-MOST_EVENTS:] if logs.ranks_with_logs(folder) else []
    missing = [*damage, *_missing_lines(told), *_missing_samples(telemetry)]
    missing += _missing_logs(logs.ranks_with_logs(folder), starts)
    return History(name, run, told, starts, read_lengths(run), telemetry, read_kept(run), events, missing)


def read_kept(run: Run) -> list[Kept]:
    """The checkpoints that lie there, oldest first; what is in them is not looked at."""
    best, kept = checkpoint.read_best(run.checkpoints), []
    for path in sorted(run.checkpoints.glob("*step-*")):
        kind = path.name.partition("step-")[0]
        if not path.is_dir() or kind.startswith("."):
            continue
        try:
            files = [file.stat() for file in path.iterdir()]
        except FileNotFoundError:  # a run that goes on has just removed it
            continue
        is_whole = (path / checkpoint.MANIFEST).is_file()
        states = {"": "whole" if is_whole else "not whole", "damaged-": "damaged, passed over"}
        step = path.name.rpartition("step-")[2]
        kept.append(
            Kept(
                name=path.name,
                step=int(step) if step.isdigit() else None,
                bytes=sum(file.st_size for file in files),
                saved_s=max((file.st_mtime for file in files), default=0.0),
                is_best=not kind and step.isdigit() and int(step) == best,
                state=states.get(kind, "put aside"),
            )
        )
    return sorted(kept, key=lambda one: (one.step or 0, one.name))


def read_lengths(run: Run) -> dict[int, int] | None:
    """The length histogram of the data the run was trained on, if that very data is still where it was."""
    if (run.data / MANIFEST).is_file():
        manifest = _text(run.data / MANIFEST)
        if hashlib.sha256(manifest.encode()).hexdigest() != run.data_fingerprint:
            return None
        return {int(length): count for length, count in json.loads(manifest)["length_histogram"].items()}
    from bertrain.data.formats.index import lengths_if_unchanged

    lengths = lengths_if_unchanged(run.data, run.vocabulary_hash, run.data_fingerprint)
    if lengths is None:
        return None
    found, counts = np.unique(lengths, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def display_names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where two are called the same."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.resolve()) for folder in folders]
    return [name.encode("utf-8", "replace").decode() for name in names]  # a folder's name need not be Unicode


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_starts(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Each start of the run, and what is wrong with the file."""
    text = _text(folder / "environment.json")
    try:
        starts = json.loads(text or "[]")
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            raise ValueError
    except ValueError:
        return [], ["environment.json is damaged, so nothing is known of where it ran"]
    return starts, [] if starts else ["environment.json is not there, so nothing is known of where it ran"]


def _missing_lines(told: Told) -> list[str]:
    steps, notes = told.columns["step"], []
    if told.num_unreadable:
        notes.append(f"{counted(told.num_unreadable, 'line')} of metrics.jsonl could not be read, and left out")
    gaps = np.diff(steps, prepend=0)
    lost = int(gaps[gaps > 1].sum() - (gaps > 1).sum())
    if lost:
        places = [f"{int(steps[index] - gaps[index] + 1):,}" for index in np.flatnonzero(gaps > 1)[:5]]
        more = ", …" if int((gaps > 1).sum()) > len(places) else ""
        notes.append(f"not in metrics.jsonl: {counted(lost, 'step')}, from step {', '.join(places)}{more} on")
    repeated = int((gaps < 1).sum())
    if repeated:
        notes.append(f"out of order in metrics.jsonl: {counted(repeated, 'step')}; all are shown")
    return notes


def _missing_samples(telemetry: Telemetry) -> list[str]:
    notes = list(telemetry.missing)
    if telemetry.num_unreadable:
        notes.append(f"{counted(telemetry.num_unreadable, 'line')} of telemetry could not be read, and left out")
    set_back = [device for device in telemetry.devices if device.num_set_back]
    if set_back:
        how_often = times(max(device.num_set_back for device in set_back))
        notes.append(f"the clock was set back {how_often} between samples; time lines count what passed between them")
    gaps = [device for device in telemetry.devices if device.longest_gap_s > LONG_GAP_S]
    if gaps:
        longest = max(gaps, key=lambda device: device.longest_gap_s)
        notes.append(f"{longest.name} has no telemetry for {duration(longest.longest_gap_s)} at the longest")
    return notes


def _missing_logs(ranks: list[int], starts: list[dict[str, Any]]) -> list[str]:
    if not ranks:
        return ["there are no logs, so warnings of the run are not known"]
    world = max((int(start.get("ranks", 1)) for start in starts), default=1)
    absent = [str(rank) for rank in range(world) if rank not in ranks]
    named = ", ".join(absent[:8]) + ", …" * (len(absent) > 8)
    return [f"there is no log of rank {named}"] if absent else []


# --- the arithmetic ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The figures at the head of the page."""

    steps: int
    samples: int
    tokens: int
    seconds: list[float]  # of each phase, over all steps; evaluation and saving are not in them
    shares: list[float]  # the same, of their sum
    tokens_per_s: float
    samples_per_s: float
    median_step_s: float  # of the steps that were computed
    tail: int  # steps at the end that the next are means of
    last: dict[str, float]  # each metric of steps
    headline: str | None  # the metric of evaluations that the run is judged by
    best: dict[str, Any] | None  # the evaluation that is best by it, the earliest of equals
    padding: float  # share of what was computed; NaN if not known
    idle: float  # share of the ranks' time; NaN if not known
    energy_j: float  # of all devices; 0 if not known
    skipped: list[int]  # steps that were not finite, or not applied
    left_out: list[int]  # steps passed over on request
    spikes: list[int]  # steps whose loss stood far above those before


def summarize(history: History) -> Summary:
    """The run in a dozen figures."""
    numbers, count = history.column("step"), history.num_steps
    tail = max(1, min(10, count // 10))
    seconds = [float(history.phase(phase).sum(dtype=np.float64)) for phase in PHASES]
    total_seconds, tokens = max(sum(seconds), 1e-9), int(np.nansum(history.column("tokens")))
    samples = history.column("samples")
    is_left_out = history.column("skipped") == 1
    finite = np.isfinite(history.column("loss") + history.column("gradient_norm"))
    is_bad = ~(finite & (history.column("applied") == 1)) & ~is_left_out
    computed = np.sum([history.phase(phase) for phase in PHASES], axis=0)[~is_left_out]
    headline = headline_of([name for name in history.metrics if any(name in one for one in history.evaluations)])
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
        last={name: mean(history.column(name)[-tail:]) for name in history.told.columns if is_metric(name)},
        headline=headline,
        best=best_evaluation(history.evaluations, headline),
        padding=weighted_mean(history.column("padding_share"), history.column("tokens")),
        idle=mean(history.column("idle_share")),
        energy_j=history.telemetry.joules,
        skipped=numbers[is_bad].astype(int).tolist(),
        left_out=numbers[is_left_out].astype(int).tolist(),
        spikes=numbers[history.column("spike") == 1].astype(int).tolist(),
    )


def best_evaluation(evaluations: Sequence[dict[str, Any]], metric: str | None) -> dict[str, Any] | None:
    """The evaluation that is best by a metric, the earliest of equals."""
    if metric is None:
        return None
    sign = -1 if is_better_low(metric) else 1
    return max(
        (result for result in evaluations if metric in result), key=lambda result: sign * result[metric], default=None
    )


def by_rank(told: Told) -> list[dict[str, Any]]:
    """Means over the whole run of what its ranks told: an entry for each rank on each host it was on."""
    return [
        {
            "rank": rank,
            "host": host,
            "tokens": sums.tokens / sums.lines,
            "seconds": {phase: sums.seconds.get(phase, 0.0) / sums.lines for phase in PHASES},
        }
        for (rank, host), sums in sorted(told.ranks.items())
    ]


def mean(values: Floats) -> float:
    """Mean of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else float("nan")


def weighted_mean(values: Floats, weights: Floats) -> float:
    """Mean of the finite values, each counting as much as its weight; NaN if there is none."""
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known].astype(np.float64), weights=weights[known])) if known.any() else float("nan")


def group_size(count: int, most: int = MOST_POINTS) -> int:
    """How many consecutive values become one, so that at most `most` are left."""
    return max(1, -(-count // most))


def thin(values: Floats, most: int = MOST_POINTS) -> Floats:
    """Means of consecutive groups of equal size, the last one perhaps smaller."""
    group = group_size(len(values), most)
    return np.array([mean(values[first : first + group]) for first in range(0, len(values), group)])


def smoothing_window(count: int) -> int:
    """Points that a smoothed curve averages: an odd number near a thirtieth of them; 1 is no smoothing."""
    return 2 * (count // 60) + 1


def smooth(values: Floats, window: int) -> Floats:
    """Centred mean over `window` points, over fewer at the ends so that it stays centred."""
    reach = [min(index, len(values) - 1 - index, window // 2) for index in range(len(values))]
    return np.array([mean(values[index - half : index + half + 1]) for index, half in enumerate(reach)])


def bin_lengths(lengths: dict[int, int], most: int = MOST_BARS) -> tuple[list[int], list[float]]:
    """Edges of at most `most` equal ranges of length, an edge belonging to the range below; shares of examples."""
    width, total = group_size(max(lengths), most), sum(lengths.values())
    shares = [0.0] * -(-max(lengths) // width)
    for length, count in lengths.items():
        shares[(length - 1) // width] += count / total
    return [number * width for number in range(len(shares) + 1)], shares


def describe_lengths(lengths: dict[int, int]) -> str:
    """The length histogram in a sentence."""
    total, longest = sum(lengths.values()), max(lengths)
    average = sum(length * count for length, count in lengths.items()) / total
    at_most = f"{lengths[longest] / total:.1%} have {longest}, the most"
    return f"{total:,} examples of {average:.1f} tokens on average; {at_most}."
