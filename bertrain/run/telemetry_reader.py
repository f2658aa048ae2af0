"""Reads the telemetry of a run: minimum, mean and maximum of each column of each rank, and downsampled curves.

Each rank writes a file for its device: telemetry.csv, telemetry-1.csv, .... telemetry-before-1.csv is from an earlier
start that had other columns, telemetry.json names the sensors that could not be read. Elapsed time is the sum of the
intervals between samples; a clock that was set back adds nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pcsv

from bertrain.base.files import read_tail
from bertrain.base.formatting import few
from bertrain.run.folder import read_starts
from bertrain.run.sensors import throttle_reasons
from bertrain.run.stream import parse_by_halves, refuse_infinite, whole_lines

Doubles = npt.NDArray[np.float64]

TIME, ENERGY, THROTTLES = "time", "energy_j", "throttle_reasons"
NO_SENSORS = (TIME, "monotonic", THROTTLES)  # no quantities
NO_NUMBER = ("", "nan")  # in a cell
LONGEST_GAP_S = 1e10
NUM_BINS = 512  # maximum points of a curve
START_TOLERANCE_S = 0.5  # a start's first sample may be older than its recorded time by this much
TAIL_BYTES = 64 << 10  # read to find the newest samples


@dataclass(frozen=True)
class Track:
    """One column of a device over time."""

    minimum: float
    mean: float
    maximum: float
    curve: Doubles
    """Mean of each bin of time; NaN where there was no sample."""

    @staticmethod
    def of(values: Doubles, bins: npt.NDArray[np.int64]) -> Track:
        known = np.isfinite(values)
        values, bins = values[known], bins[known]
        counts = np.bincount(bins, minlength=NUM_BINS)
        curve = np.bincount(bins, values, NUM_BINS) / np.where(counts, counts, math.nan)
        return Track(float(values.min()), float(values.mean()), float(values.max()), curve)


@dataclass(frozen=True)
class Device:
    """The samples of one rank's GPU or CPU."""

    name: str
    tracks: dict[str, Track]
    reasons: Counter[str]  # number of throttled samples, by reason
    num_samples: int
    seconds: float  # time from the first sample to the last
    bin_s: float
    energy_j: float
    num_set_back: int  # how often the clock was set back between two samples
    longest_gap_s: float

    @staticmethod
    def of(name: str, samples: pa.Table, starts: Doubles) -> Device:
        """The samples in the order of their file; `starts` is when each start of the run began to sample."""

        def numbers(column: str) -> Doubles:  # one at a time: a table may hold weeks
            missing = np.full(len(samples), math.nan)
            return samples[column].to_numpy() if column in samples.column_names else missing

        times = numbers(TIME)
        passed = np.diff(times, prepend=times[:1])
        passed = np.where(np.abs(passed) < LONGEST_GAP_S, passed, 0.0)  # not NaN, nor a damaged number
        elapsed = np.cumsum(np.maximum(passed, 0.0))
        seconds, bin_s = float(elapsed[-1]), 1.0
        while seconds >= NUM_BINS * bin_s:
            bin_s *= 2
        bins = (elapsed / bin_s).astype(np.int64)
        quantities = [key for key in samples.column_names if key not in (*NO_SENSORS, ENERGY)]
        masks, reasons = numbers(THROTTLES), Counter[str]()
        for mask, count in zip(*np.unique(masks[np.isfinite(masks)], return_counts=True), strict=True):
            reasons.update(dict.fromkeys(throttle_reasons(int(mask)), int(count)))
        start = np.searchsorted(starts - START_TOLERANCE_S, times, side="right")
        return Device(
            name=name,
            tracks={key: Track.of(numbers(key), bins) for key in quantities if np.isfinite(numbers(key)).any()},
            reasons=reasons,
            num_samples=len(times),
            seconds=seconds,
            bin_s=bin_s,
            energy_j=_increase(numbers(ENERGY), start),
            num_set_back=int((passed < 0).sum()),
            longest_gap_s=float(passed.max()),
        )

    @property
    def minutes(self) -> Doubles:
        """The middle of each bin of a curve, up to the last sample."""
        return (np.arange(int(self.seconds / self.bin_s) + 1) + 0.5) * self.bin_s / 60


def _increase(counter: Doubles, start: npt.NDArray[np.int64]) -> float:
    """The increase of an energy counter; `start` is the start of the run that each sample belongs to.

    The counter may be reset by a reboot. Its increase between two starts is not the run's.
    """
    known = np.isfinite(counter)
    is_same = np.diff(start[known]) == 0
    return float(np.maximum(np.diff(counter[known])[is_same], 0.0).sum())


@dataclass(frozen=True)
class RunTelemetry:
    """The telemetry of all devices of a run."""

    devices: list[Device]
    num_unreadable: int = 0
    missing: list[str] = field(default_factory=list)  # sentences on the sensors that could not be read
    joules: float = 0.0  # energy of all devices; a counter that several ranks share counts once


def files_of(folder: Path) -> list[tuple[int, Path]]:
    """The rank and path of each telemetry file of a run, by rank, oldest first."""
    found = []
    for path in folder.glob("telemetry*.csv"):
        if name := re.fullmatch(r"telemetry(?:-(\d+))?(?:-before-(\d+))?", path.stem):
            found.append((int(name[1] or 0), int(name[2] or 1 << 30), path))
    return [(rank, path) for rank, _, path in sorted(found)]


def read_telemetry(folder: Path) -> RunTelemetry:
    devices: list[Device] = []
    num_unreadable, joules = 0, 0.0
    missing: dict[str, tuple[list[str], list[str]]] = {}  # by reason: columns, ranks
    counted: set[str] = set()
    for rank, files in groupby(files_of(folder), key=lambda entry: entry[0]):
        tables = []
        for _, path in files:
            table, unreadable = read_numbers(path)
            if TIME in table.column_names:
                tables.append(table)
                num_unreadable += unreadable
            else:
                num_unreadable += bool(table.column_names)
        starts, notes = all_notes_of(folder, rank), notes_of(folder, rank)
        for column, why in notes.get("missing", {}).items():
            columns, ranks = missing.setdefault(why, ([], []))
            columns.append(column)
            ranks.append(str(rank))
        if not sum(map(len, tables)):
            continue
        samples = pa.concat_tables(tables, promote_options="default")  # a file may lack columns of another
        began = np.sort([_number(str(start.get("started"))) for start in starts])
        devices.append(Device.of(f"rank {rank}", samples, began))
        # A GPU has a counter of its own; the counter of a CPU is the machine's.
        counter = notes["device"].get("uuid", "") if notes.get("device") else notes.get("host", "")
        if not counter or counter not in counted:
            joules += devices[-1].energy_j
        counted.add(counter)
    why_missing = ((few(ranks), few(columns), why) for why, (columns, ranks) in missing.items())
    sentences = [f"telemetry of rank {ranks} has no {columns}: {why}" for ranks, columns, why in why_missing]
    return RunTelemetry(devices, num_unreadable, sentences, joules)


def newest_samples(folder: Path) -> dict[str, dict[str, float]]:
    """The newest value of each column at the end of the telemetry files, by device."""
    found: dict[str, dict[str, float]] = {}
    for rank, path in files_of(folder):
        names = list[str]()
        with suppress(OSError), open(path, "rb") as file:
            names = _names(file.readline())
        for line in read_tail(path, TAIL_BYTES).decode(errors="replace").splitlines():
            cells = line.split(",")
            if len(cells) == len(names):  # otherwise it is cut off
                values = zip(names, map(_number, cells), strict=True)
                known = {name: value for name, value in values if name not in NO_SENSORS and math.isfinite(value)}
                # Some sensors are read less often: an empty cell keeps the value of an earlier row.
                found.setdefault(f"rank {rank}", {}).update(known)
    return found


def read_numbers(path: Path) -> tuple[pa.Table, int]:
    """A CSV file of numbers, and how many of its lines cannot be read, apart from an unfinished last one."""
    names, tables, num_unreadable = list[str](), list[pa.Table](), 0
    for block in whole_lines(path):
        if not names:
            header, _, block = block.partition(b"\n")
            names = _names(header)
        parsed, unreadable = parse_by_halves(
            block, partial(_parse, names=names), partial(_is_row, num_cells=len(names))
        )
        tables += parsed
        num_unreadable += unreadable if block.endswith(b"\n") else 0
    empty = pa.schema([(name, pa.float64()) for name in names]).empty_table()
    return pa.concat_tables([empty, *tables]), num_unreadable


def _is_row(line: bytes, num_cells: int) -> bool:
    cells = line.decode(errors="replace").strip().split(",")
    return len(cells) == num_cells and all(cell in NO_NUMBER or math.isfinite(_number(cell)) for cell in cells)


def _parse(block: bytes, names: Sequence[str]) -> pa.Table:
    reading = pcsv.ReadOptions(column_names=names)
    converting = pcsv.ConvertOptions(column_types=dict.fromkeys(names, pa.float64()), null_values=list(NO_NUMBER))
    table = pcsv.read_csv(pa.BufferReader(block), read_options=reading, convert_options=converting)
    refuse_infinite(table.columns)
    return table


def _names(header: bytes) -> list[str]:
    return header.decode(errors="replace").strip().split(",")


def notes_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The notes of a rank's last start in telemetry.json; empty if the file is missing or damaged."""
    return next(reversed(all_notes_of(folder, rank)), {})


def all_notes_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The notes of each start of a rank in telemetry.json, as far as they are readable."""
    schema = {"missing": dict[str, str], "device?": {"uuid?": str}, "host?": str}
    return read_starts(folder / (f"telemetry-{rank}.json" if rank else "telemetry.json"), schema)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
