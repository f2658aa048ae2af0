"""What a run folder says, and the arithmetic that a report does on it: pure functions, no drawing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.data.shards import MANIFEST
from bertrain.errors import UserError
from bertrain.observe.console import PHASES
from bertrain.settings import Settings
from bertrain.train.runs import Run

Floats = npt.NDArray[np.float64]

MOST_POINTS = 1000  # of a curve; more could not be told apart and would weigh megabytes
MOST_BARS = 40  # of the length histogram


@dataclass(frozen=True)
class History:
    """A run as its folder tells it."""

    name: str
    run: Run
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    lengths: dict[int, int] | None  # examples of each length; None if the data is no longer there
    rank_times: list[dict[str, Any]] = field(default_factory=list)  # where each rank's time went, from time to time

    def column(self, field: str) -> Floats:
        """One number of every step; NaN where it was not finite or is not there."""
        return np.array([step.get(field) for step in self.steps], dtype=np.float64)

    def phase(self, phase: str) -> Floats:
        """Seconds of one phase of every step."""
        return np.array([step["seconds"][phase] for step in self.steps], dtype=np.float64)

    @cached_property
    def summary(self) -> Summary:
        return summarise(self)


def read(folder: Path, name: str) -> History:
    """Read a run folder, or say in a sentence why there is nothing to report."""
    run = Run.open(folder)
    records = []
    for line in _text(folder / "metrics.jsonl").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # the last line of a run that is being written, or was killed
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        raise UserError(f"the run {folder} has no metrics yet; report on it after its first steps")
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    try:
        starts = json.loads(_text(folder / "environment.json") or "[]")
    except ValueError:
        raise UserError(f"{folder / 'environment.json'} is damaged; remove it to report without it") from None
    rank_times = [record for record in records if record["kind"] == "ranks"]
    return History(name, run, steps, evaluations, starts, read_lengths(run), rank_times)


def read_lengths(run: Run) -> dict[int, int] | None:
    """The length histogram of the data the run was trained on, if that very data is still where it was."""
    if (run.data / MANIFEST).is_file():
        manifest = _text(run.data / MANIFEST)
        if hashlib.sha256(manifest.encode()).hexdigest() != run.data_fingerprint:
            return None
        return {int(length): count for length, count in json.loads(manifest)["length_histogram"].items()}
    from bertrain.data.index import lengths_if_unchanged

    lengths = lengths_if_unchanged(run.data, run.vocabulary_hash, run.data_fingerprint)
    if lengths is None:
        return None
    found, counts = np.unique(lengths, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def count_parameters(settings: Settings) -> int:
    """Parameters of the model, which is described to PyTorch but never made."""
    import torch

    from bertrain.model.bert import Bert

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Bert(settings.model).parameters())


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
    tail: int  # steps at the end that the next two are means of
    loss: float
    mlm_accuracy: float
    best: dict[str, Any] | None  # the evaluation with the highest masked-word accuracy, the earliest of equals
    skipped: list[int]  # steps that were not finite, or not applied
    left_out: list[int]  # steps passed over on request
    spikes: list[int]  # steps whose loss stood far above those before


def summarise(history: History) -> Summary:
    """The run in a dozen figures."""
    steps, tail = history.steps, max(1, min(10, len(history.steps) // 10))
    seconds = [float(history.phase(phase).sum()) for phase in PHASES]
    total_seconds, tokens = max(sum(seconds), 1e-9), sum(step["tokens"] for step in steps)
    judged = [result for result in history.evaluations if result["mlm_accuracy"] is not None]
    finite = np.isfinite(history.column("loss") + history.column("gradient_norm"))
    left_out = {step["step"] for step in steps if step.get("skipped")}
    return Summary(
        steps=steps[-1]["step"],
        samples=steps[-1]["samples"],
        tokens=tokens,
        seconds=seconds,
        shares=[part / total_seconds for part in seconds],
        tokens_per_s=tokens / total_seconds,
        tail=tail,
        loss=mean(history.column("loss")[-tail:]),
        mlm_accuracy=mean(history.column("mlm_accuracy")[-tail:]),
        best=max(judged, key=lambda result: result["mlm_accuracy"], default=None),
        skipped=[
            step["step"]
            for step, good in zip(steps, finite, strict=True)
            if not (good and step["applied"]) and step["step"] not in left_out
        ],
        left_out=sorted(left_out),
        spikes=[step["step"] for step in steps if step.get("spike")],
    )


def by_rank(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the whole run of what its ranks told: an entry for each rank on each host it was on."""
    told: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for entry in (entry for record in records for entry in record["ranks"]):
        told.setdefault((entry["rank"], entry["host"]), []).append(entry)
    return [
        {
            "rank": rank,
            "host": host,
            "tokens": float(np.mean([entry["tokens"] for entry in entries])),
            "seconds": {phase: float(np.mean([entry["seconds"][phase] for entry in entries])) for phase in PHASES},
        }
        for (rank, host), entries in sorted(told.items())
    ]


def mean(values: Floats) -> float:
    """Mean of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


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


def compact(value: float) -> str:
    """A number in at most four digits: 0.25, 9,870, 45.6 k, 1.59 M, 3.3 B."""
    if float(f"{value:.4g}") < 1e4:
        return f"{value:,.4g}"
    rounded = float(f"{value:.3g}")
    unit, suffix = next(pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if rounded >= pair[0])
    return f"{rounded / unit:.3g} {suffix}"


def duration(seconds: float) -> str:
    """0.8 s, 45 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = round(seconds)
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {part}"
    return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"


def decimal(value: float | None) -> str:
    """A loss in four decimals; a dash where it is not finite or not there."""
    return "–" if value is None or value != value else f"{value:.4f}"


def percent(value: float | None) -> str:
    """A share in hundredths of a percent; a dash where it is not finite or not there."""
    return "–" if value is None or value != value else f"{value:.2%}"
