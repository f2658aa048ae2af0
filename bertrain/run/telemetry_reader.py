"""Reads the telemetry of a run: minimum, mean and maximum of every column of each device, and downsampled curves.

Each rank writes a file for its device: telemetry.csv, telemetry-1.csv, .... telemetry-before-1.csv is from an earlier
start that had other columns, telemetry.json names the sensors that could not be read. Any column is read, as long as
there is a time. Elapsed time is the sum of the intervals between samples; a clock that was set back adds nothing.
"""

from __future__ import annotations

import csv
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
from bertrain.run.folder import read_starts
from bertrain.run.sensors import throttle_reasons
from bertrain.run.stream import parse_by_halves, whole_lines

Doubles = npt.NDArray[np.float64]

TIMES = ("time", "time_s")  # names of the column with the time of a sample, in Unix seconds
ENERGY, THROTTLES = "energy_j", ("throttle", "throttle_reasons")
DEVICES = ("gpu", "cpu", "device", "uuid")  # the first of these columns that exists identifies the device
TEXTS = (*DEVICES, *THROTTLES, "host")
NOT_TRACKS = (*TIMES, *TEXTS, ENERGY, "monotonic")  # columns without a curve
NUM_BINS = 512  # maximum points of a curve; a full curve is merged to half as many
START_TOLERANCE_S = 0.5  # a start's first sample may be older than its recorded time by this much
TAIL_BYTES = 64 << 10  # read to find the newest samples


@dataclass
class Track:
    """One column of a device over time."""

    minimum: float = math.inf
    maximum: float = -math.inf
    total: float = 0.0
    count: int = 0
    sums: Doubles = field(default_factory=lambda: np.zeros(NUM_BINS))
    counts: Doubles = field(default_factory=lambda: np.zeros(NUM_BINS))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def curve(self) -> Doubles:
        """Mean of each bin of time; NaN where there was no sample."""
        return np.where(self.counts > 0, self.sums / np.maximum(self.counts, 1), np.nan)

    def add(self, bins: npt.NDArray[np.int64], values: Doubles) -> None:
        known = np.isfinite(values)
        if known.any():
            values = values[known]
            self.minimum, self.maximum = min(self.minimum, values.min()), max(self.maximum, values.max())
            self.total, self.count = self.total + float(values.sum()), self.count + len(values)
            np.add.at(self.sums, bins[known], values)
            np.add.at(self.counts, bins[known], 1)

    def halve(self) -> None:
        """Merge neighbouring bins, so that the second half is free."""
        for name in ("sums", "counts"):
            merged = getattr(self, name).reshape(-1, 2).sum(axis=1)
            setattr(self, name, np.concatenate([merged, np.zeros(NUM_BINS - len(merged))]))


@dataclass
class Device:
    """The samples of one GPU or CPU."""

    name: str
    tracks: dict[str, Track] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)  # number of throttled samples, by reason
    num_samples: int = 0
    seconds: float = 0.0  # time from the first sample to the last
    bin_s: float = 1.0
    energy_j: float = 0.0
    num_set_back: int = 0  # how often the clock was set back between two samples
    longest_gap_s: float = 0.0
    starts: Doubles = field(default_factory=lambda: np.zeros(0))  # when each start of the run began to sample
    _last_time: float = math.nan
    _last_energy: float = math.nan
    _last_start: int = 0

    def add(self, table: pa.Table) -> None:
        """Add samples, in the order of the file."""
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
                starts = np.searchsorted(self.starts - START_TOLERANCE_S, times, side="right")
                self._add_energy(_numbers(table, name), starts)
            elif name not in NOT_TRACKS:
                self.tracks.setdefault(name, Track()).add(bins, _numbers(table, name))

    def _add_energy(self, counter: Doubles, start: npt.NDArray[np.int64]) -> None:
        """Add the increase of an energy counter; `start` is the start of the run that each sample belongs to.

        The counter may be reset by a reboot. Its increase between two starts is not the run's.
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
        """The middle of each bin of a curve, up to the last sample."""
        return (np.arange(min(NUM_BINS, int(self.seconds / self.bin_s) + 1)) + 0.5) * self.bin_s / 60


@dataclass(frozen=True)
class RunTelemetry:
    """The telemetry of all devices of a run."""

    devices: list[Device]
    num_unreadable: int = 0
    missing: list[str] = field(default_factory=list)  # sentences on the sensors that could not be read
    joules: float = 0.0  # energy of all devices; a counter that several ranks share counts once


def reasons_of(cell: str | None) -> list[str]:
    """The reasons of a throttled sample: NVML's bit mask in words, other text as it is."""
    if cell is None or cell in ("", "none"):
        return []
    return throttle_reasons(int(float(cell))) if math.isfinite(_number(cell)) else [cell]


def files_of(folder: Path) -> list[tuple[int, Path]]:
    """The rank and path of each telemetry file of a run, by rank, oldest first."""
    found = []
    for path in folder.glob("telemetry*.csv"):
        if name := re.fullmatch(r"telemetry(?:-(\d+))?(?:-before-(\d+))?", path.stem):
            found.append((int(name[1] or 0), int(name[2] or 1 << 30), path))
    return [(rank, path) for rank, _, path in sorted(found)]


def read_telemetry(folder: Path) -> RunTelemetry:
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
                if not _time_column(names):
                    num_unreadable += 1
                    break
            tables, unreadable = parse_by_halves(block, partial(_parse, names=names))
            num_unreadable += unreadable if block.endswith(b"\n") else 0
            for table in tables:
                _add(devices, rank, table, starts)
    counted: set[str] = set()
    for rank in dict.fromkeys(rank for rank, _ in files_of(folder)):
        notes = notes_of(folder, rank)
        for column, why in notes.get("missing", {}).items():
            columns, ranks = missing.setdefault(why, ([], []))
            columns.append(column)
            ranks.append(str(rank))
        # A GPU has a counter of its own; the counter of a CPU is the machine's.
        counter = notes["device"].get("uuid", "") if notes.get("device") else notes.get("host", "")
        if not counter or counter not in counted:
            joules += sum(device.energy_j for (owner, _), device in devices.items() if owner == rank)
        counted.add(counter)
    why_missing = ((few(ranks), few(columns), why) for why, (columns, ranks) in missing.items())
    sentences = [f"telemetry of rank {ranks} has no {columns}: {why}" for ranks, columns, why in why_missing]
    return RunTelemetry([devices[key] for key in sorted(devices)], num_unreadable, sentences, joules)


def newest_samples(folder: Path) -> dict[str, dict[str, float]]:
    """The newest value of each column at the end of the telemetry files, by device."""
    found: dict[str, dict[str, float]] = {}
    for rank, path in files_of(folder):
        try:
            with open(path, "rb") as file:
                names = _names(file.readline())
                begin, end = file.tell(), file.seek(0, 2)
                file.seek(max(begin, end - TAIL_BYTES))
                tail = file.read()
                if end - TAIL_BYTES > begin:
                    tail = tail.partition(b"\n")[2]  # cut off the first, partial row
        except OSError:
            continue
        for row in csv.reader(tail.decode(errors="replace").splitlines()):
            if len(row) == len(names):
                sample = dict(zip(names, row, strict=True))
                numbers = {name: _number(sample[name]) for name in names if name not in (*TEXTS, *TIMES, "monotonic")}
                known = {name: value for name, value in numbers.items() if math.isfinite(value)}
                # Some sensors are read less often: an empty cell keeps the value of an earlier row.
                found.setdefault(_device_name(sample, rank), {}).update(known)
    return found


def _names(header: bytes) -> list[str]:
    return next(csv.reader([header.decode(errors="replace").strip()]), [])


def _time_column(names: Sequence[str]) -> str:
    return next((name for name in TIMES if name in names), "")


def notes_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The notes of a rank's last start in telemetry.json; empty if the file is missing or damaged."""
    return next(reversed(all_notes_of(folder, rank)), {})


def all_notes_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The notes of each start of a rank in telemetry.json, as far as they are readable."""
    starts = read_starts(folder / (f"telemetry-{rank}.json" if rank else "telemetry.json"))
    return [notes for notes in starts if isinstance(notes.get("missing"), dict)]


def _parse(block: bytes, names: Sequence[str]) -> pa.Table:
    types = {name: pa.string() if name in TEXTS else pa.float64() for name in names}
    reading = pcsv.ReadOptions(column_names=list(names))
    converting = pcsv.ConvertOptions(column_types=types, null_values=["", "nan", "N/A", "None"])
    return pcsv.read_csv(pa.BufferReader(block), read_options=reading, convert_options=converting)


def _add(devices: dict[tuple[int, str], Device], rank: int, table: pa.Table, starts: Doubles) -> None:
    key = next((name for name in DEVICES if name in table.column_names), None)
    for value in pc.unique(table[key]).to_pylist() if key else [None]:
        part = table.filter(pc.equal(table[key], value)) if value is not None else table
        if len(part):
            name = _device_name({key or "": value or ""}, rank)
            devices.setdefault((rank, name), Device(name, starts=starts)).add(part)


def _device_name(sample: dict[str, str], rank: int) -> str:
    """`rank 3`, or with a device column `gpu 0` or `rank 3 gpu 0`."""
    key = next((name for name in DEVICES if name in sample), "")
    if not sample.get(key):
        return f"rank {rank}"
    return f"{key} {sample[key]}" if rank == 0 else f"rank {rank} {key} {sample[key]}"


def _numbers(table: pa.Table, name: str) -> Doubles:
    return table[name].to_numpy().astype(np.float64)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
