"""Writes telemetry.csv: a thread samples the sensors of the machine while a run trains, one row per sample.

No failure here stops the run (no driver, no permission, a lost GPU, a full disk, a clock set back, an error in the
thread); telemetry.json records which columns are missing and since when.

Both timestamps of a row are taken before its first sensor is read. `time` is `clock.now`, by which rows are joined with
steps and kernel launches.
"""

from __future__ import annotations

import itertools
import json
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from bertrain.base import clock
from bertrain.base.console import warn
from bertrain.base.files import write_atomically
from bertrain.config.settings import LogSettings
from bertrain.run.folder import read_starts
from bertrain.run.sensors import Gauge, Sensors, describe, sensors_for, uuid_of

MAX_FAILURES = 3  # in a row, after which a sensor is no longer read
MAX_CPU_SHARE = 0.01  # of a core; the interval grows rather than use more
FLUSH_EVERY_S = 1.0
CLOCK_STEP_S = 0.5  # smallest jump of the system's clock that is recorded
START_TIMEOUT_S, STOP_TIMEOUT_S = 5.0, 5.0  # for the thread: a driver may hang


class TelemetryWriter:
    """Samples in a thread until `stop`. Nothing here raises, and only `stop` waits."""

    def __init__(self, folder: Path, sensors: Sensors, interval_ms: int, *, name: str = "telemetry") -> None:
        self._csv, self._json = folder / f"{name}.csv", folder / f"{name}.json"
        self._sensors, self._interval_s = sensors, interval_ms / 1e3
        self._failures = dict.fromkeys(sensors.columns, 0)
        self._read_at = dict.fromkeys(sensors.columns, float("-inf"))
        self._counted: tuple[float, float] | None = None  # first and newest reading of the energy
        self._missing = dict(sensors.missing)
        self._clock_steps: list[dict[str, float]] = []
        self._samples, self._busy_s = 0, 0.0
        self._began = time.monotonic()
        self._file: TextIO | None = None
        self._has_begun, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="bertrain-telemetry", daemon=True)
        self._earlier = read_starts(self._json)
        self._thread.start()

    @property
    def joules(self) -> float | None:
        """Energy since the first sample; None if it is not measured."""
        return None if self._counted is None else self._counted[1] - self._counted[0]

    def wait_until_begun(self) -> None:
        """Wait for the first sample, but not long."""
        self._has_begun.wait(START_TIMEOUT_S)

    def stop(self) -> None:
        """Take a last sample and end the thread; further calls do nothing."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._note("sampler", f"did not stop within {STOP_TIMEOUT_S:g} s; a driver may hang")
        self._write_notes()

    # --- the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._open()
            self._write_notes()
            self._sample_until_the_end()
        except BaseException as error:  # ends this thread only, not the run
            self._note("sampler", f"failed: {describe(error)}")
        finally:
            self._close()

    def _sample_until_the_end(self) -> None:
        flushed, offset = time.monotonic(), clock.stepped()
        is_last = False
        while True:
            began, busy = time.monotonic(), time.thread_time()
            flush = began - flushed >= FLUSH_EVERY_S or is_last
            flushed = began if flush else flushed
            self._write_row(self._sample(began, is_last=is_last), flush=flush)
            self._has_begun.set()
            if abs(step := clock.stepped() - offset) >= CLOCK_STEP_S:
                self._clock_steps.append({"monotonic": time.monotonic(), "seconds": step})
                self._write_notes()
                offset += step
            if is_last:
                return
            took = time.thread_time() - busy
            self._busy_s += took
            pause = max(self._interval_s - (time.monotonic() - began), took / MAX_CPU_SHARE - took)
            is_last = self._ending.wait(pause)

    def _sample(self, moment: float, *, is_last: bool) -> list[float | None]:
        """A row: two timestamps, then a value per column, None if it was not read."""
        stamp = clock.now()
        values = [self._read(gauge, moment, is_last=is_last) for gauge in self._sensors.gauges]
        counter = dict(zip(self._sensors.columns, values, strict=True)).get("energy_j")
        if counter is not None:
            self._counted = (self._counted or (counter,))[0], counter
        self._samples += 1
        return [stamp, moment, *values]

    def _read(self, gauge: Gauge, moment: float, *, is_last: bool) -> float | None:
        column = gauge.column
        is_due = is_last or moment - self._read_at[column] >= gauge.every_s
        if not is_due or self._failures[column] >= MAX_FAILURES:
            return None
        self._read_at[column] = moment
        try:
            value = gauge.read()
        except Exception as error:
            self._failures[column] += 1
            if self._failures[column] >= MAX_FAILURES:
                self._note(column, f"{describe(error)}, since {time.monotonic() - self._began:.1f} s after the start")
            return None
        self._failures[column] = 0
        return value

    # --- files ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Append to the file of an earlier start if it has the same columns."""
        header = ",".join(["time", "monotonic", *self._sensors.columns])
        try:
            _set_aside_other_columns(self._csv, header)
            self._file = open(self._csv, "a", encoding="ascii")  # noqa: SIM115 - closed in _close
            self._file.write(header + "\n" if self._file.tell() == 0 else "\n")
            self._file.flush()
        except OSError as error:
            self._give_up_writing(error)

    def _write_row(self, row: list[float | None], *, flush: bool) -> None:
        if self._file is None:
            return
        stamps = [f"{stamp:.6f}" for stamp in row[:2]]
        try:
            self._file.write(",".join(stamps + ["" if v is None else f"{v:.10g}" for v in row[2:]]) + "\n")
            if flush:
                self._file.flush()
        except OSError as error:
            self._give_up_writing(error)

    def _give_up_writing(self, error: OSError) -> None:
        self._close()
        self._note(self._csv.name, f"{describe(error)}; no rows after {time.monotonic() - self._began:.1f} s")

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _note(self, what: str, why: str) -> None:
        self._missing[what] = why
        warn(f"telemetry: {what}: {why}; the run continues")
        self._write_notes()

    def _write_notes(self) -> None:
        """Write telemetry.json: one entry for each start, this one last."""
        seconds = time.monotonic() - self._began
        entry = {
            "started": clock.now() - seconds,
            "host": platform.node(),
            "device": self._sensors.device,
            "columns": self._sensors.columns,
            "missing": self._missing,
            "clock_steps": self._clock_steps,
            "interval_ms": 1e3 * self._interval_s,
            "samples": self._samples,
            "seconds": seconds,
            "share_of_a_core": self._busy_s / max(seconds, 1e-9),
            "joules": self.joules,
        }
        with suppress(OSError):  # a full disk has been reported already
            write_atomically(self._json, json.dumps([*self._earlier, entry], indent=1) + "\n")


def _set_aside_other_columns(path: Path, header: str) -> None:
    """Rename a file with other columns, from a start on another machine, so that its rows are kept."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with open(path, encoding="ascii", errors="replace") as file:
        if file.readline().rstrip("\n") == header:
            return
    names = (path.with_name(f"{path.stem}-before-{number}.csv") for number in itertools.count(1))
    path.rename(next(other for other in names if not other.exists()))


def start_telemetry(folder: Path, device: Any, settings: LogSettings, rank: int) -> TelemetryWriter | None:
    """Sample until it is stopped, if log.telemetry is set. Rank N > 0 writes telemetry-N.csv."""
    if not settings.telemetry:
        return None
    name = f"telemetry-{rank}" if rank else "telemetry"
    return TelemetryWriter(folder, device_sensors(device), settings.telemetry_ms, name=name)


def device_sensors(device: Any) -> Sensors:
    return sensors_for(uuid_of(device.index or 0) if device.type == "cuda" else None)
