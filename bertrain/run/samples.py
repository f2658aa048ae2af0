"""What telemetry.csv says of each device: least, mean and most of every column, and curves of bounded length.

Each rank samples its device into a file: telemetry.csv, telemetry-1.csv, ...; telemetry-before-1.csv is an earlier
start's, whose columns were others; telemetry.json says what is missing. Files are read as streams. Which columns there
are is the sampler's business: a time and numbers, and maybe texts that tell devices and throttle reasons apart. Time is
what passed between samples; a clock that was set back adds nothing.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from bertrain.base.formatting import few
from bertrain.run.sensors import why_throttled
from bertrain.run.stream import by_halves, whole_lines

Doubles = npt.NDArray[np.float64]

TIMES = ("time", "time_s")  # what the time of a sample is called, in seconds since the epoch
ENERGY, THROTTLES = "energy_j", ("throttle", "throttle_reasons")
DEVICES = ("gpu", "cpu", "device", "uuid")  # the first of these columns that is there tells devices apart
TEXTS = (*DEVICES, *THROTTLES, "host")
NO_NUMBERS = (*TIMES, *TEXTS, ENERGY, "monotonic")  # columns that are no number of the device
NUM_BINS = 512  # of a curve at the most; from half of them on it is never coarser
EARLY_S = 0.5  # by which a start's first sample may be older than the time noted of it
TAIL_BYTES = 64 << 10  # that are read to know how things stand now


@dataclass
class Track:
    """One number of a device over time."""

    least: float = math.inf
    most: float = -math.inf
    total: float = 0.0
    count: int = 0
    sums: Doubles = field(default_factory=lambda: np.zeros(NUM_BINS))
    counts: Doubles = field(default_factory=lambda: np.zeros(NUM_BINS))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def curve(self) -> Doubles:
        """Mean of each stretch of time; NaN where there was no sample."""
        return np.where(self.counts > 0, self.sums / np.maximum(self.counts, 1), np.nan)

    def add(self, bins: npt.NDArray[np.int64], values: Doubles) -> None:
        known = np.isfinite(values)
        if known.any():
            values = values[known]
            self.least, self.most = min(self.least, values.min()), max(self.most, values.max())
            self.total, self.count = self.total + float(values.sum()), self.count + len(values)
            np.add.at(self.sums, bins[known], values)
            np.add.at(self.counts, bins[known], 1)

    def halve(self) -> None:
        """Let two bins become one, and the second half be free."""
        for name in ("sums", "counts"):
            merged = getattr(self, name).reshape(-1, 2).sum(axis=1)
            setattr(self, name, np.concatenate([merged, np.zeros(NUM_BINS - len(merged))]))


@dataclass
class Device:
    """A GPU or CPU as its samples tell it."""

    name: str
    tracks: dict[str, Track] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    """Samples in which it was throttled, by reason."""
    num_samples: int = 0
    seconds: float = 0.0
    """From the first sample to the last."""
    bin_s: float = 1.0
    energy_j: float = 0.0
    num_set_back: int = 0
    """Times that the clock was set back between two samples."""
    longest_gap_s: float = 0.0
    starts: Doubles = field(default_factory=lambda: np.zeros(0))
    """When its sampler was started, each time."""
    _last_time: float = math.nan
    _last_energy: float = math.nan
    _last_start: int = 0

    def add(self, table: pa.Table) -> None:
        """Add samples, in their order in the file."""
        times = _numbers(table, _time_column(table.column_names))
        passed = np.diff(times, prepend=self._last_time if self.num_samples else times[:1])
        passed = np.where(np.isfinite(passed), passed, 0.0)
        self.num_set_back += int((passed < 0).sum())
        passed = np.maximum(passed, 0.0)
        self.longest_gap_s = max(self.longest_gap_s, float(passed.max()))
        elapsed = self.seconds + np.cumsum(passed)
        self.seconds, self._last_time = float(elapsed[-1]), float(times[-1])
        self.num_samples += len(times)
        while self.seconds >= NUM_BINS * self.bin_s:
            self.bin_s *= 2
            for track in self.tracks.values():
                track.halve()
        bins = (elapsed / self.bin_s).astype(np.int64)
        for name in table.column_names:
            if name in THROTTLES:
                for counted in pc.value_counts(table[name].combine_chunks()).to_pylist():
                    for reason in reasons_of(counted["values"]):
                        self.reasons[reason] += counted["counts"]
            elif name == ENERGY:
                self._add_energy(_numbers(table, name), np.searchsorted(self.starts - EARLY_S, times, side="right"))
            elif name not in NO_NUMBERS:
                self.tracks.setdefault(name, Track()).add(bins, _numbers(table, name))

    def _add_energy(self, counter: Doubles, start: npt.NDArray[np.int64]) -> None:
        """Add what a counter of joules rose by, `start` being the start each sample belongs to.

        It may begin anew when a machine does. What it rose by between two starts was spent by others.
        """
        known = np.isfinite(counter)
        counter, start = counter[known], start[known]
        if len(counter):
            is_first = not math.isfinite(self._last_energy)
            steps = np.diff(counter, prepend=counter[:1] if is_first else self._last_energy)
            is_same = np.diff(start, prepend=start[:1] if is_first else self._last_start) == 0
            self.energy_j += float(np.maximum(steps[is_same], 0.0).sum())
            self._last_energy, self._last_start = float(counter[-1]), int(start[-1])

    @property
    def minutes(self) -> Doubles:
        """When each bin of a curve is, up to the last sample."""
        return (np.arange(min(NUM_BINS, int(self.seconds / self.bin_s) + 1)) + 0.5) * self.bin_s / 60


@dataclass(frozen=True)
class Telemetry:
    """All samples of a run."""

    devices: list[Device]
    num_unreadable: int = 0
    missing: list[str] = field(default_factory=list)
    """What the samplers could not read, in words."""
    joules: float = 0.0
    """Of all devices; the counter of one that several ranks share is counted once."""


def reasons_of(cell: str | None) -> list[str]:
    """Why a device was throttled: words as they are, NVML's mask in words."""
    if cell is None or cell in ("", "none"):
        return []
    return why_throttled(int(float(cell))) if math.isfinite(_number(cell)) else [cell]


def files_of(folder: Path) -> list[tuple[int, Path]]:
    """The telemetry files of a run with the rank of each, a rank's older ones first."""
    found = []
    for path in folder.glob("telemetry*.csv"):
        if name := re.fullmatch(r"telemetry(?:-(\d+))?(?:-before-(\d+))?", path.stem):
            found.append((int(name[1] or 0), int(name[2] or 1 << 30), path))
    return [(rank, path) for rank, _, path in sorted(found)]


def read_telemetry(folder: Path) -> Telemetry:
    """Every sample in a run folder, device by device; no device, if there is none."""
    devices: dict[tuple[int, str], Device] = {}
    num_unreadable, joules = 0, 0.0
    missing: dict[str, tuple[list[str], list[str]]] = {}  # by reason: columns, ranks
    for rank, path in files_of(folder):
        names: list[str] = []
        starts = np.sort([_number(str(notes.get("started"))) for notes in all_notes_of(folder, rank)])
        for block in whole_lines(path):
            if not names:
                header, _, block = block.partition(b"\n")
                names = _names(header)
                if _time_column(names) == "":
                    num_unreadable += 1
                    break
            tables, unreadable = by_halves(block, partial(_parse, names=names))
            num_unreadable += unreadable if block.endswith(b"\n") else 0
            for table in tables:
                _add(devices, rank, table, starts)
    shared: set[str] = set()
    for rank in dict.fromkeys(rank for rank, _ in files_of(folder)):
        notes = notes_of(folder, rank)
        for column, why in notes.get("missing", {}).items():
            columns, ranks = missing.setdefault(why, ([], []))
            columns.append(column)
            ranks.append(str(rank))
        own = [device for (of, _), device in devices.items() if of == rank]
        # Without a GPU, the counter is the machine's.
        meter = notes["device"].get("uuid", "") if notes.get("device") else notes.get("host", "")
        if not meter or meter not in shared:
            joules += sum(device.energy_j for device in own)
        shared.add(meter)
    sentences = [
        f"telemetry of rank {few(ranks)} has no {few(columns)}: {why}" for why, (columns, ranks) in missing.items()
    ]
    return Telemetry([devices[key] for key in sorted(devices)], num_unreadable, sentences, joules)


def newest(folder: Path) -> dict[str, dict[str, float]]:
    """The last sample of each device that stands at the end of the telemetry files, by device and column."""
    found: dict[str, dict[str, float]] = {}
    for rank, path in files_of(folder):
        try:
            with open(path, "rb") as file:
                names = _names(file.readline())
                begin, end = file.tell(), file.seek(0, 2)
                file.seek(max(begin, end - TAIL_BYTES))
                tail = file.read()
                if end - TAIL_BYTES > begin:
                    tail = tail.partition(b"\n")[2]  # the first row is there in part
        except OSError:
            continue
        for row in csv.reader(tail.decode(errors="replace").splitlines()):
            if len(row) == len(names):
                sample = dict(zip(names, row, strict=True))
                numbers = {name: _number(sample[name]) for name in names if name not in (*TEXTS, *TIMES, "monotonic")}
                known = {name: value for name, value in numbers.items() if math.isfinite(value)}
                # Some columns are read less often than others: what is not in a row is as it was before.
                found.setdefault(_device_name(sample, names, rank), {}).update(known)
    return found


def _names(header: bytes) -> list[str]:
    return next(csv.reader([header.decode(errors="replace").strip()]), [])


def _time_column(names: Sequence[str]) -> str:
    return next((name for name in TIMES if name in names), "")


def notes_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What the last start of a rank's sampler noted of itself; nothing, where the file is damaged or not there."""
    return next(reversed(all_notes_of(folder, rank)), {})


def all_notes_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What each start of a rank's sampler noted of itself, as far as it can be read."""
    try:
        starts = json.loads((folder / (f"telemetry-{rank}.json" if rank else "telemetry.json")).read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(starts, list):
        return []
    return [notes for notes in starts if isinstance(notes, dict) and isinstance(notes.get("missing"), dict)]


def _parse(block: bytes, names: Sequence[str]) -> pa.Table:
    types = {name: pa.string() if name in TEXTS else pa.float64() for name in names}
    return pcsv.read_csv(
        pa.BufferReader(block),
        read_options=pcsv.ReadOptions(column_names=list(names)),
        convert_options=pcsv.ConvertOptions(column_types=types, null_values=["", "nan", "N/A", "None"]),
    )


def _add(devices: dict[tuple[int, str], Device], rank: int, table: pa.Table, starts: Doubles) -> None:
    key = _device_column(table.column_names)
    for value in pc.unique(table[key]).to_pylist() if key else [None]:
        part = table.filter(pc.equal(table[key], value)) if key and value is not None else table
        if len(part):
            name = _device_name({key: value} if key and value else {}, table.column_names, rank)
            devices.setdefault((rank, name), Device(name, starts=starts)).add(part)


def _device_column(names: Sequence[str]) -> str | None:
    return next((name for name in DEVICES if name in names), None)


def _device_name(sample: dict[str, str], names: Sequence[str], rank: int) -> str:
    """Such as `rank 3`, `gpu 0` where a column tells, or both where ranks have several."""
    key = _device_column(names)
    if key and sample.get(key):
        return f"{key} {sample[key]}" if rank == 0 else f"rank {rank} {key} {sample[key]}"
    return f"rank {rank}"


def _numbers(table: pa.Table, name: str) -> Doubles:
    numbers: Doubles = table[name].to_numpy().astype(np.float64)
    return numbers


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
