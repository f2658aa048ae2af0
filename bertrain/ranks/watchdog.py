"""Detects that a run hangs, and reports which rank stopped, on which host and in which part of a step.

The loop records its position (`Heartbeat`: one assignment). A thread of each rank writes it to the launcher's store,
and reads those of the other ranks only when its own rank has not moved for a while. When no rank has moved for
`train.hang_timeout`, every rank that still runs exits, the first of them with a message; the launcher may restart them.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, get_args

from torch.distributed.distributed_c10d import Store

from bertrain.base.errors import EXIT_HUNG, EXIT_LOST_RANK
from bertrain.base.logs import note
from bertrain.base.machine import read_or_empty

STARTING: Final = "starting"
SAVING: Final = "saving"
Place = Literal[
    "starting", "data", "forward and backward", "sum over ranks", "update", "agreeing on what comes next",
    "reading results", "evaluation", "embedding", "saving",
]  # fmt: skip
PLACES: tuple[str, ...] = get_args(Place)
"""The parts of a step, in order: of ranks that do not move, the others wait for the one in the earliest part."""

LEAST_PATIENCE_S = 600.0
"""The least timeout of what may take long without moving: compiling, a save to a slow disk."""
BUSY_SHARE = 0.1
"""Of a core: while starting or saving, a process that computes this much (reading, hashing) counts as moving."""

ORPHAN_PATIENCE_S = 120.0
"""The time in which a rank whose launcher is gone must have saved."""

BEAT, REPORTED = "bertrain/heartbeat", "bertrain/hang-reported"


class Heartbeat:
    """The position of this rank. The loop writes it, the watchdog's thread reads it; no lock, no system call."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self.now: tuple[int, str, float] = (0, STARTING, time.monotonic())

    def enter(self, place: Place, step: int | None = None) -> None:
        """Record that this rank enters `place` of the current step, or of `step`."""
        if step is None:
            step = self.now[0]
        elif self.first_step is None:
            self.first_step = step
        self.now = (step, place, time.monotonic())

    def move(self) -> None:
        """Record progress within the same place: one more bin, one more batch."""
        step, place, _ = self.now
        self.now = (step, place, time.monotonic())

    @property
    def may_take_long(self) -> bool:
        """Whether it does something long: starting, the first step of a start, which may compile, or saving."""
        step, place, _ = self.now
        return place in (STARTING, SAVING) or step == self.first_step


@dataclass(frozen=True)
class Beat:
    """The position of a rank, as it writes it to the store."""

    rank: int
    host: str
    process: int
    step: int
    place: str
    is_still: bool
    """Whether it has not moved for longer than it may."""
    beat: int
    """Counts up while the process runs."""
    is_silent: bool = False
    """Whether a reader has seen that it no longer counts up."""

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, PLACES.index(self.place)


def have_stopped(beats: Sequence[Beat]) -> bool:
    """Whether no rank moves: each has stood still for too long, or is silent."""
    return all(beat.is_still or beat.is_silent for beat in beats)


def waited_for(beats: Sequence[Beat]) -> list[Beat]:
    """The ranks that the others wait for: those that are silent, or else those that are furthest behind; maybe all."""
    least = min(beat.progress for beat in beats)
    return [beat for beat in beats if beat.is_silent] or [beat for beat in beats if beat.progress == least]


def describe_hang(beats: Sequence[Beat], timeout: str) -> str:
    """Which ranks stopped, on which hosts, and where in a step."""
    stopped = waited_for(beats)
    named = "; ".join(map(_describe, stopped))
    if len(stopped) < len(beats):
        named += "; the others wait for it" if len(stopped) == 1 else "; the others wait for them"
    elif len(beats) > 1:
        named += "; no rank is behind the others"
    return f"{named} (nothing moved for {timeout}, train.hang_timeout)"


def _describe(beat: Beat) -> str:
    if not beat.process:
        return f"rank {beat.rank} is unknown"
    moved = "has not moved, nor answered," if beat.is_silent else "has not moved"
    since = "since it was started" if beat.place == STARTING else f"since step {beat.step}, in {beat.place}"
    return f"rank {beat.rank} on host {beat.host} {moved} {since}"


class Watchdog:
    """The watchdog thread of one rank. `timeout` is as in the settings, `seconds` the same in seconds."""

    def __init__(
        self, heartbeat: Heartbeat, timeout: str, seconds: float, rank: int, world: int, store: Store | None
    ) -> None:
        self._heartbeat, self._timeout, self._seconds = heartbeat, timeout, seconds
        self._rank, self._world = rank, world
        # A connection of its own, since the other may be busy; torch's annotations lack it.
        self._store: Store | None = store.clone() if store is not None else None  # type: ignore[attr-defined]
        self._interval = min(5.0, max(0.05, seconds / 20))
        if self._store is not None:
            self._store.set_timeout(timedelta(seconds=self._interval))  # the rank that keeps the store may hang itself
        self._host, self._beat = platform.node(), 0
        self._worked = time.process_time()
        self._looked_at = self._moved_at = time.monotonic()
        self._last_beats: dict[int, tuple[Beat, float]] = {}
        self._parent, self._orphaned_at = os.getppid(), 0.0
        self._ended = threading.Event()
        self._write_beat()
        self._thread = threading.Thread(target=self._watch, name="bertrain-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: the run has ended."""
        self._ended.set()
        self._thread.join(timeout=1)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            self._end_without_launcher()
            beat = self._write_beat()
            if time.monotonic() - self._heartbeat.now[2] < self._seconds / 2:
                self._last_beats.clear()
                continue
            beats = self._read_all(beat)
            if beat.is_still and have_stopped(beats):
                self._end(beats)

    def _end_without_launcher(self) -> None:
        """Stop this rank if its launcher is gone, as the system does for launchers of ours (`end_with_launcher`).

        A process that nobody launched as a rank may outlive its parent: `nohup bertrain pretrain ... &`, then log out.
        """
        if self._store is None or os.getppid() == self._parent:
            return
        if not self._orphaned_at:
            self._orphaned_at = time.monotonic()
            note("error", "stop", "the launcher is gone; this rank saves and exits")
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() - self._orphaned_at > ORPHAN_PATIENCE_S:
            os._exit(EXIT_LOST_RANK)

    def _write_beat(self) -> Beat:
        step, place, _ = self._heartbeat.now
        patience = max(self._seconds, LEAST_PATIENCE_S) if self._heartbeat.may_take_long else self._seconds
        self._beat += 1
        beat = Beat(self._rank, self._host, os.getpid(), step, place, self._still_for() >= patience, self._beat)
        if self._store is not None:
            with suppress(Exception):  # without the store, this rank still watches itself
                self._store.set(f"{BEAT}/{self._rank}", json.dumps(asdict(beat)))
        return beat

    def _still_for(self) -> float:
        """Seconds since this rank moved, or since the whole process was stopped."""
        now, worked = time.monotonic(), time.process_time()
        was_stopped = now - self._looked_at > 5 * self._interval  # and this thread with it: Ctrl-Z, or a machine asleep
        is_busy = worked - self._worked > BUSY_SHARE * self._interval and self._heartbeat.may_take_long
        if was_stopped or is_busy:
            self._moved_at = now
        self._looked_at, self._worked = now, worked
        return now - max(self._moved_at, self._heartbeat.now[2])

    def _read_all(self, own: Beat) -> list[Beat]:
        """The beats of all ranks, with `is_silent`."""
        beats, now = [], time.monotonic()
        for rank in range(self._world):
            beat = own if rank == self._rank else self._read(rank)
            before, since = self._last_beats.get(rank, (None, now))
            if before is None or before.beat != beat.beat:
                self._last_beats[rank] = beat, now
                since = now
            beats.append(replace(beat, is_silent=now - since > max(self._seconds / 4, 3 * self._interval)))
        return beats

    def _read(self, rank: int) -> Beat:
        """The newest beat of another rank; with process 0 if there is none or the store cannot be reached."""
        key = f"{BEAT}/{rank}"
        with suppress(Exception):
            if self._store is not None and self._store.check([key]):
                return Beat(**json.loads(self._store.get(key)))
        return Beat(rank, "unknown", 0, 0, STARTING, is_still=False, beat=0)

    def _end(self, beats: list[Beat]) -> None:
        """Exit at once, as the main thread hangs. A half-written checkpoint is not taken for a whole one."""
        is_first = True
        with suppress(Exception):
            is_first = self._store is None or self._store.add(REPORTED, 1) == 1
        why = describe_hang(beats, self._timeout)
        note("error", "hang", why)
        if is_first:
            print(f"bertrain: {why}", file=sys.stderr, flush=True)
        for beat in beats:
            if beat.is_silent and beat.host == self._host and _is_sibling(beat.process):
                with suppress(ProcessLookupError):
                    os.kill(beat.process, signal.SIGKILL)  # the launcher would wait for a stopped process
        os._exit(EXIT_HUNG)


def _is_sibling(process: int) -> bool:
    """Whether the launcher of this process started that one too; its number alone may have been reused."""
    after_name = read_or_empty(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()  # its state, its parent, ...
    return after_name[1:2] == [str(os.getppid())]
