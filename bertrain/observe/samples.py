"""What telemetry.csv says of each device: least, mean and most of every column, and curves of bounded length.

The file is read as a stream. Which columns there are is the sampler's business: `time_s` and numbers, and texts that
tell devices and throttle reasons apart. Time is what passed between samples; a clock that was set back adds nothing.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from bertrain.observe.stream import by_halves, whole_lines

Doubles = npt.NDArray[np.float64]

TIME, ENERGY, THROTTLE = "time_s", "energy_j", "throttle"
DEVICES = ("gpu", "cpu", "device", "uuid")  # the first of these columns that is there tells devices apart
TEXTS = (*DEVICES, THROTTLE, "host")
NUM_BINS = 512  # of a curve at the most; from half of them on it is never coarser
TAIL_BYTES = 64 << 10  # that are read to know how things stand now
NO_REASON = ("", "0", "none", "None", "0x0")


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
    _last_time: float = math.nan
    _last_energy: float = math.nan

    def add(self, table: pa.Table) -> None:
        """Add samples, in their order in the file."""
        times = _numbers(table, TIME)
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
            if name == THROTTLE:
                self.reasons.update(reason for reason in table[name].to_pylist() if reason not in (*NO_REASON, None))
            elif name == ENERGY:
                self._add_energy(_numbers(table, name))
            elif name != TIME and name not in TEXTS:
                self.tracks.setdefault(name, Track()).add(bins, _numbers(table, name))

    def _add_energy(self, counter: Doubles) -> None:
        """A counter of joules, which begins anew when a machine or a run does."""
        counter = counter[np.isfinite(counter)]
        if len(counter):
            steps = np.diff(counter, prepend=self._last_energy if math.isfinite(self._last_energy) else counter[:1])
            self.energy_j += float(np.maximum(steps, 0.0).sum())
            self._last_energy = float(counter[-1])

    @property
    def minutes(self) -> Doubles:
        """When each bin of a curve is, up to the last sample."""
        return (np.arange(min(NUM_BINS, int(self.seconds / self.bin_s) + 1)) + 0.5) * self.bin_s / 60


@dataclass(frozen=True)
class Telemetry:
    """All samples of a run."""

    devices: list[Device]
    num_unreadable: int = 0


def files_of(folder: Path) -> list[Path]:
    """The telemetry files of a run."""
    return sorted([*folder.glob("telemetry*.csv"), *folder.glob("telemetry/*.csv")])


def read_telemetry(folder: Path) -> Telemetry:
    """Every sample in a run folder, device by device; no device, if there is none."""
    devices: dict[str, Device] = {}
    num_unreadable = 0
    for path in files_of(folder):
        names: list[str] = []
        for block in whole_lines(path):
            if not names:
                header, _, block = block.partition(b"\n")
                names = next(csv.reader([header.decode(errors="replace").strip()]), [])
                if TIME not in names:
                    num_unreadable += 1
                    break
            tables, unreadable = by_halves(block, partial(_parse, names=names))
            num_unreadable += unreadable if block.endswith(b"\n") else 0
            for table in tables:
                _add(devices, path.stem, table)
    return Telemetry([devices[name] for name in sorted(devices)], num_unreadable)


def newest(folder: Path) -> dict[str, dict[str, float]]:
    """The last sample of each device that stands at the end of the telemetry files, by device and column."""
    found: dict[str, dict[str, float]] = {}
    for path in files_of(folder):
        try:
            with open(path, "rb") as file:
                names = next(csv.reader([file.readline().decode(errors="replace").strip()]), [])
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
                found[_device_name(sample, names, path.stem)] = {
                    name: value for name in names if name not in TEXTS and math.isfinite(value := _number(sample[name]))
                }
    return found


def _parse(block: bytes, names: Sequence[str]) -> pa.Table:
    types = {name: pa.string() if name in TEXTS else pa.float64() for name in names}
    return pcsv.read_csv(
        pa.BufferReader(block),
        read_options=pcsv.ReadOptions(column_names=list(names)),
        convert_options=pcsv.ConvertOptions(column_types=types, null_values=["", "nan", "N/A", "None"]),
    )


def _add(devices: dict[str, Device], stem: str, table: pa.Table) -> None:
    key = _device_column(table.column_names)
    for value in pc.unique(table[key]).to_pylist() if key else [None]:
        part = table.filter(pc.equal(table[key], value)) if key and value is not None else table
        if len(part):
            name = _device_name({key: value} if key and value else {}, table.column_names, stem)
            devices.setdefault(name, Device(name)).add(part)


def _device_column(names: Sequence[str]) -> str | None:
    return next((name for name in DEVICES if name in names), None)


def _device_name(sample: dict[str, str], names: Sequence[str], stem: str) -> str:
    """Such as `gpu 0`; with the file's own name where a run has several files."""
    key = _device_column(names)
    own = f"{key} {sample[key]}" if key and sample.get(key) else ""
    where = stem.removeprefix("telemetry").strip("-_.")
    return " ".join(part for part in (where, own) if part) or "machine"


def _numbers(table: pa.Table, name: str) -> Doubles:
    numbers: Doubles = table[name].to_numpy().astype(np.float64)
    return numbers


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
