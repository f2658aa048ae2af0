"""How much devices, nodes and repeats differ, from sets of `bertrain profile` or from runs with telemetry.

As the study of variability among GPUs does it: a device's time is the median of its steps; the devices' medians make
a box whose whiskers reach to the last of them within 1.5 interquartile ranges of the quartiles; the spread is the
distance of the whiskers over the median, and whoever lies beyond them, or takes 1.5 times the median, is named.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.errors import UserError
from bertrain.observe.sensors import why_throttled

Floats = npt.NDArray[np.float64]

WHISKER = 1.5  # interquartile ranges
SLOW = 1.5  # times the median
FEWEST = 3  # pairs of numbers that a correlation wants
QUANTITIES = {"clock_mhz": "clock", "power_w": "power", "temperature_c": "temperature"}
"""What durations are correlated with."""


@dataclass(frozen=True)
class ProfileSet:
    """What one device did in one repeat."""

    folder: Path
    host: str
    device: str
    uuid: str
    repeat: int
    started: Floats
    seconds: Floats
    tokens: Floats
    telemetry: dict[str, Floats]
    """Columns by name, `time` among them; NaN where nothing was read. `clock_mhz` is the GPU's, or the cores' mean."""
    facts: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Which device this is: its UUID, or where it has none its host and name."""
        return self.uuid or f"{self.host} {self.device}"

    @property
    def ended(self) -> float:
        return float(self.started[-1] + self.seconds[-1])


# --- reading ------------------------------------------------------------------------------------------


def find_sets(folders: Sequence[str | Path]) -> list[ProfileSet]:
    """Every set in or under these folders, in the order of their names; runs with telemetry count as sets."""
    found: list[ProfileSet] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
        if (folder / "config.json").is_file():
            found.append(read_run(folder))
            continue
        places = sorted(path.parent for path in folder.rglob("device.json") if not _is_partial(path, folder))
        if not places:
            raise UserError(f"{folder} holds no profile (a folder with a device.json) and is no run either")
        found += [read_set(place) for place in places]
    return found


def _is_partial(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def read_set(folder: Path) -> ProfileSet:
    """A set, or a sentence about what is wrong with it."""
    facts = _read_json(folder / "device.json")
    columns = read_columns(folder / "iterations.csv")
    telemetry = read_telemetry(folder / "telemetry.csv")
    try:
        device, environment = facts["device"], facts["environment"]
        return ProfileSet(
            folder=folder,
            host=environment["host"],
            device=f"{device['kind']}{device['index']} {device['name']}" if "index" in device else device["name"],
            uuid=device.get("uuid") or "",
            repeat=facts["repeat"],
            started=columns["started"],
            seconds=columns["seconds"],
            tokens=columns["tokens"],
            telemetry=telemetry,
            facts=facts,
            missing=facts["missing"] | telemetry_missing(folder / "telemetry.json"),
        )
    except (KeyError, TypeError):
        raise UserError(
            f"{folder} is no whole set of a profile: its device.json or iterations.csv is damaged"
        ) from None


def read_run(folder: Path) -> ProfileSet:
    """The steps of a run, of its first rank's device."""
    steps = []
    with open(_existing(folder / "metrics.jsonl"), encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the last line of a run that is being written
            if record.get("kind") == "step" and "ended" in record and not record["skipped"]:
                steps.append(record)
    if not steps:
        raise UserError(f"the run {folder} has no step with its time in metrics.jsonl yet")
    seconds = np.array([sum(step["seconds"].values()) for step in steps])
    notes = _read_json(folder / "telemetry.json")[-1] if (folder / "telemetry.json").is_file() else {}
    device = notes.get("device", {})
    return ProfileSet(
        folder=folder,
        host=notes.get("host", "unknown host"),
        device=device.get("name", "cpu"),
        uuid=device.get("uuid", ""),
        repeat=1,
        started=np.array([step["ended"] for step in steps]) - seconds,
        seconds=seconds,
        tokens=np.array([step["tokens"] for step in steps], dtype=np.float64),
        telemetry=read_telemetry(folder / "telemetry.csv"),
        missing=notes.get("missing", {"telemetry": "this run was made without --telemetry"}),
    )


def read_telemetry(path: Path) -> dict[str, Floats]:
    """The columns of telemetry.csv, `clock_mhz` added; nothing where there is no such file."""
    if not path.is_file():
        return {}
    columns = read_columns(path)
    clocks = [columns[name] for name in columns if name == "sm_clock_mhz"]
    clocks = clocks or [values for name, values in columns.items() if name.startswith("core") and name.endswith("_mhz")]
    if clocks:
        columns["clock_mhz"] = np.mean(clocks, axis=0)
    return columns


def read_columns(path: Path) -> dict[str, Floats]:
    """The numbers of a CSV file by column; empty cells are NaN, torn lines are left out."""
    with open(_existing(path), newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        rows = []
        for cells in reader:
            try:
                row = [float(cell) if cell else np.nan for cell in cells]
            except ValueError:
                continue
            if len(row) == len(header):
                rows.append(row)
    if not header:  # an empty file: the disk was full from the start
        return {}
    values = np.array(rows, dtype=np.float64).reshape(-1, len(header))
    return dict(zip(header, values.T, strict=True))


def telemetry_missing(path: Path) -> dict[str, str]:
    return _read_json(path)[-1]["missing"] if path.is_file() else {"telemetry": "there is no telemetry.json"}


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"there is no {path.name} in {path.parent}")
    return path


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_existing(path).read_text())
    except ValueError:
        raise UserError(f"{path} is damaged: it is not JSON") from None


# --- arithmetic ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A box plot in numbers."""

    median: float
    lower_quartile: float
    upper_quartile: float
    lower_whisker: float
    upper_whisker: float

    @property
    def spread(self) -> float:
        """Between the whiskers, over the median."""
        return (self.upper_whisker - self.lower_whisker) / self.median

    def is_outlier(self, value: float) -> bool:
        """Beyond the whiskers, or so slow that no box is needed to say so."""
        return not self.lower_whisker <= value <= self.upper_whisker or value >= SLOW * self.median


def box_of(values: Iterable[float]) -> Box:
    """Quartiles, interpolated, and the last values within `WHISKER` interquartile ranges of them."""
    array = np.fromiter(values, dtype=np.float64)
    low, middle, high = np.percentile(array, (25, 50, 75))
    reach = WHISKER * (high - low)
    inside = array[(array >= low - reach) & (array <= high + reach)]
    return Box(float(middle), float(low), float(high), float(inside.min()), float(inside.max()))


def correlation(one: Floats, other: Floats) -> float | None:
    """Pearson's, over the pairs that are there; None where there are too few, or one of them never changes."""
    both = np.isfinite(one) & np.isfinite(other)
    one, other = one[both], other[both]
    if len(one) < FEWEST:
        return None
    deviations = one.std() * other.std()
    if deviations <= 1e-12 * max(1e-300, abs(one.mean() * other.mean())):
        return None
    return float(np.mean((one - one.mean()) * (other - other.mean())) / deviations)


def during(found: ProfileSet, column: str) -> Floats:
    """A column of the telemetry in the middle of each step, interpolated between samples; NaN without any."""
    if column not in found.telemetry:
        return np.full(len(found.seconds), np.nan)
    times, values = found.telemetry["time"], found.telemetry[column]
    there = np.isfinite(values)
    if not there.any():
        return np.full(len(found.seconds), np.nan)
    return np.interp(found.started + found.seconds / 2, times[there], values[there])


def joules(found: ProfileSet) -> float | None:
    """Spent from the first step's beginning to the last one's end: by the counter, or else power over time."""
    span = np.array([found.started[0], found.ended])
    times = found.telemetry.get("time", np.array([]))
    counter = found.telemetry.get("energy_j", np.array([]))
    there = np.isfinite(counter)
    if there.sum() >= 2:
        first, last = np.interp(span, times[there], counter[there])
        return float(last - first)
    power = found.telemetry.get("power_w", np.array([]))
    there = np.isfinite(power)
    if there.sum() < 2:
        return None
    inside = times[there & (times > span[0]) & (times < span[1])]
    moments = np.concatenate([span[:1], inside, span[1:]])
    watts = np.interp(moments, times[there], power[there])
    return float(np.sum(np.diff(moments) * (watts[1:] + watts[:-1]) / 2))


@dataclass(frozen=True)
class SetSummary:
    """A set in one line."""

    host: str
    device: str
    uuid: str
    repeat: int
    steps: int
    median_s: float
    lower_quartile_s: float
    upper_quartile_s: float
    spread: float
    outliers: int
    tokens_per_s: float
    joules_per_million_tokens: float | None
    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttled_by: str
    with_clock: float | None
    """Correlation of a step's duration with the clock during it; so with the other two."""
    with_power: float | None
    with_temperature: float | None
    folder: str


def summarise(found: ProfileSet) -> SetSummary:
    """Medians over the timed steps, and what their durations go with."""
    box, spent, tokens = box_of(found.seconds), joules(found), float(found.tokens.sum())
    samples = {column: during(found, column) for column in QUANTITIES}
    return SetSummary(
        host=found.host,
        device=found.device,
        uuid=found.uuid,
        repeat=found.repeat,
        steps=len(found.seconds),
        median_s=box.median,
        lower_quartile_s=box.lower_quartile,
        upper_quartile_s=box.upper_quartile,
        spread=box.spread,
        outliers=sum(map(box.is_outlier, found.seconds.tolist())),
        tokens_per_s=tokens / float(found.seconds.sum()),
        joules_per_million_tokens=None if spent is None else 1e6 * spent / tokens,
        **{column: _median(values) for column, values in samples.items()},
        throttled_by=throttled_by(found),
        **{f"with_{name}": correlation(found.seconds, samples[column]) for column, name in QUANTITIES.items()},
        folder=str(found.folder),
    )


def throttled_by(found: ProfileSet) -> str:
    """Why the clock was held back, and in which share of the samples during the steps; empty: never, or not known."""
    masks = found.telemetry.get("throttle_reasons")
    if masks is None:
        return ""
    times = found.telemetry["time"]
    masks = masks[np.isfinite(masks) & (times >= found.started[0]) & (times <= found.ended)].astype(np.int64)
    counts: dict[str, int] = defaultdict(int)
    for mask in masks.tolist():
        for reason in why_throttled(mask & ~0x3):  # idle, and a clock that somebody set, hold nothing back
            counts[reason] += 1
    return ", ".join(f"{reason} {count / len(masks):.0%}" for reason, count in counts.items())


def _median(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


@dataclass(frozen=True)
class DeviceSummary:
    """All repeats of one device."""

    host: str
    device: str
    uuid: str
    repeats: int
    median_s: float
    over_median: float
    """Its median over the median of all devices."""
    between_repeats: float
    """Slowest less fastest repeat, over the median."""
    is_outlier: bool


@dataclass(frozen=True)
class Variability:
    """What several sets say together."""

    sets: list[SetSummary]
    devices: list[DeviceSummary]
    """The slowest first."""
    median_s: float
    spread: float
    correlations: dict[str, float | None]
    """Of the sets' median durations with their median clock, power and temperature."""
    joules_per_million_tokens: float | None
    verdict: str


def compare(sets: Sequence[ProfileSet]) -> Variability:
    """The variability across devices, nodes and repeats."""
    summaries = [summarise(found) for found in sets]
    by_device: dict[str, list[int]] = defaultdict(list)
    for number, found in enumerate(sets):
        by_device[found.identity].append(number)
    medians = {
        identity: float(np.median(np.concatenate([sets[number].seconds for number in numbers])))
        for identity, numbers in by_device.items()
    }
    box = box_of(medians.values())
    devices = []
    for identity, numbers in by_device.items():
        of_repeats = [summaries[number].median_s for number in numbers]
        first = sets[numbers[0]]
        devices.append(
            DeviceSummary(
                host=first.host,
                device=first.device,
                uuid=first.uuid,
                repeats=len(numbers),
                median_s=medians[identity],
                over_median=medians[identity] / box.median,
                between_repeats=(max(of_repeats) - min(of_repeats)) / medians[identity],
                is_outlier=len(medians) > 1 and box.is_outlier(medians[identity]),
            )
        )
    devices.sort(key=lambda device: -device.median_s)
    durations = np.array([summary.median_s for summary in summaries])
    energies = [summary.joules_per_million_tokens for summary in summaries]
    known = [energy for energy in energies if energy is not None]
    return Variability(
        sets=summaries,
        devices=devices,
        median_s=box.median,
        spread=box.spread,
        correlations={
            name: correlation(
                durations, np.array([getattr(summary, column) for summary in summaries], dtype=np.float64)
            )
            for column, name in QUANTITIES.items()
        },
        joules_per_million_tokens=float(np.median(known)) if known else None,
        verdict=verdict(devices, box),
    )


def verdict(devices: Sequence[DeviceSummary], box: Box) -> str:
    """Who is slow, in a sentence; devices come slowest first."""
    slowest = devices[0]
    if len(devices) == 1:
        return f"one device, so nothing to compare it with; {slowest.between_repeats:.1%} between its repeats"
    named = "; ".join(
        f"{device.uuid or device.device} on host {device.host} takes {device.over_median:.3f} times the median"
        for device in devices
        if device.is_outlier
    )
    if named:
        return f"outliers: {named}"
    who = f"{slowest.uuid or slowest.device} on host {slowest.host}"
    return f"no outlier among {len(devices)} devices; the slowest is {who}, {slowest.over_median:.3f} times the median"
