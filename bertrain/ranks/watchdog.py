"""Notices when a run has stopped moving, and says which rank stopped, where and in what.

The loop notes where it is (`Heartbeat`: one assignment). A thread of each rank leaves word of it in the store that
the launcher keeps, and reads the others' words only when its own rank has stood still for a while. When nobody has
moved for `train.hang_timeout`, every rank that can still speak ends, the first of them with a sentence, and a launcher
with restarts starts them anew.
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from bertrain.base.errors import EXIT_HUNG
from bertrain.base.logs import note

STARTING, SAVING = "starting", "saving"
PLACES = (
    STARTING, "data", "forward and backward", "sum over ranks", "update", "agreeing on what comes next",
    "reading results", "evaluation", SAVING,
)  # fmt: skip
"""Where a rank can be, in the order of a step: of ranks that stand still, the one that came least far is waited for."""

LEAST_PATIENCE_S = 600.0
"""Given to whatever may rightly take long without a word: compiling, a save to a slow disk."""
BUSY_SHARE = 0.1
"""Of a core: while starting or saving, a process that computes this much (reading, hashing) moves."""

WORD, SAID = "bertrain/heartbeat", "bertrain/hang-said"


class Heartbeat:
    """Where this rank is. The loop writes it, the watchdog's thread reads it; no lock, no system call."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self.now: tuple[int, str, float] = (0, STARTING, time.monotonic())

    def enter(self, place: str, step: int | None = None) -> None:
        """Be at `place`, one of PLACES, of the step in hand, or of `step`."""
        if step is None:
            step = self.now[0]
        elif self.first_step is None:
            self.first_step = step
        self.now = (step, place, time.monotonic())

    def move(self) -> None:
        """Be where it was, and alive: one more bin, one more batch."""
        step, place, _ = self.now
        self.now = (step, place, time.monotonic())

    @property
    def may_take_long(self) -> bool:
        """Whether it is at something long: starting, the first step of a start, which may compile, or saving."""
        step, place, _ = self.now
        return place in (STARTING, SAVING) or step == self.first_step


@dataclass(frozen=True)
class Beat:
    """What a rank leaves word of."""

    rank: int
    host: str
    process: int
    step: int
    place: str
    is_still: bool
    """Whether it has not moved for as long as it may."""
    beat: int
    """Counts up for as long as the process lives and is not stopped."""


def have_stopped(words: Sequence[Beat], mute: Sequence[bool]) -> bool:
    """Whether nobody moves: each rank has stood still for too long, or is not heard of any more."""
    return all(word.is_still or is_mute for word, is_mute in zip(words, mute, strict=True))


def waited_for(words: Sequence[Beat], mute: Sequence[bool]) -> list[Beat]:
    """The ranks that the others wait for: those not heard of, or else those that came least far; maybe all."""
    silent = [word for word, is_mute in zip(words, mute, strict=True) if is_mute]
    if silent:
        return silent
    least = min(_progress(word) for word in words)
    return [word for word in words if _progress(word) == least]


def _progress(word: Beat) -> tuple[int, int]:
    return word.step, PLACES.index(word.place)


def sentence(words: Sequence[Beat], mute: Sequence[bool], timeout: str) -> str:
    """Who stopped, where, and in what."""
    culprits = waited_for(words, mute)
    named = "; ".join(_describe(word, mute[words.index(word)]) for word in culprits)
    if len(culprits) < len(words):
        named += "; the others wait for it" if len(culprits) == 1 else "; the others wait for them"
    elif len(words) > 1:
        named += "; no rank came less far than the others"
    return f"{named} (nothing moved for {timeout}, train.hang_timeout)"


def _describe(word: Beat, is_mute: bool) -> str:
    if not word.process:
        return f"rank {word.rank} cannot be asked"
    moved = "has not moved, nor answered," if is_mute else "has not moved"
    since = "since it was started" if word.place == STARTING else f"since step {word.step}, in {word.place}"
    return f"rank {word.rank} on host {word.host} {moved} {since}"


class Watchdog:
    """The thread of one rank. `timeout` as it is written in the settings, `seconds` the same in seconds."""

    def __init__(
        self, heartbeat: Heartbeat, timeout: str, seconds: float, *, rank: int, world: int, store: Store | None
    ) -> None:
        self._whereabouts, self._timeout, self._seconds = heartbeat, timeout, seconds
        self._rank, self._world = rank, world
        # A connection of its own, since another's may be busy; torch's annotations do not know of it.
        self._store: Store | None = store.clone() if store is not None else None  # type: ignore[attr-defined]
        self._interval = min(10.0, max(0.05, seconds / 20))
        if self._store is not None:
            self._store.set_timeout(timedelta(seconds=self._interval))  # a rank may keep it that has stopped itself
        self._host, self._beat = platform.node(), 0
        self._worked = time.process_time()
        self._looked_at = self._moved_at = time.monotonic()
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._ended = threading.Event()
        self._leave_word()
        self._thread = threading.Thread(target=self._watch, name="bertrain-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The run has ended by itself."""
        self._ended.set()
        self._thread.join(timeout=1)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            word = self._leave_word()
            if time.monotonic() - self._whereabouts.now[2] < self._seconds / 2:
                self._heard.clear()
                continue
            words, mute = self._listen(word)
            if word.is_still and have_stopped(words, mute):
                self._end(words, mute)

    def _leave_word(self) -> Beat:
        step, place, _ = self._whereabouts.now
        patience = max(self._seconds, LEAST_PATIENCE_S) if self._whereabouts.may_take_long else self._seconds
        self._beat += 1
        word = Beat(self._rank, self._host, os.getpid(), step, place, self._still_for() >= patience, self._beat)
        if self._store is not None:
            with suppress(Exception):  # whoever keeps the store may be gone; this rank can still watch itself
                self._store.set(f"{WORD}/{self._rank}", json.dumps(asdict(word)))
        return word

    def _still_for(self) -> float:
        """Seconds since this rank moved, or began to be watched anew."""
        now, worked = time.monotonic(), time.process_time()
        was_stopped = now - self._looked_at > 5 * self._interval  # and this thread with it: Ctrl-Z, or a machine asleep
        is_busy = worked - self._worked > BUSY_SHARE * self._interval and self._whereabouts.may_take_long
        if was_stopped or is_busy:
            self._moved_at = now
        self._looked_at, self._worked = now, worked
        return now - max(self._moved_at, self._whereabouts.now[2])

    def _listen(self, own: Beat) -> tuple[list[Beat], list[bool]]:
        """The words of all ranks, and of each whether it is no longer heard of."""
        words, mute, now = [], [], time.monotonic()
        for rank in range(self._world):
            word = own if rank == self._rank else self._read(rank)
            before, since = self._heard.get(rank, (None, now))
            if before is None or before.beat != word.beat:
                self._heard[rank] = word, now
                since = now
            words.append(word)
            mute.append(now - since > max(self._seconds / 4, 3 * self._interval))
        return words, mute

    def _read(self, rank: int) -> Beat:
        """The newest word of another rank; without a process, where it left none or the store cannot be reached."""
        key = f"{WORD}/{rank}"
        with suppress(Exception):
            if self._store is not None and self._store.check([key]):
                return Beat(**json.loads(self._store.get(key)))
        return Beat(rank, "unknown", 0, 0, STARTING, is_still=False, beat=0)

    def _end(self, words: list[Beat], mute: list[bool]) -> None:
        """End this process at once; its main thread cannot be reached. What is half-written is not taken for whole."""
        is_first = True
        with suppress(Exception):
            is_first = self._store is None or self._store.add(SAID, 1) == 1
        why = sentence(words, mute, self._timeout)
        note("error", "hang", why)
        if is_first:
            print(f"bertrain: {why}", file=sys.stderr, flush=True)
        for word, is_mute in zip(words, mute, strict=True):
            if is_mute and word.host == self._host and _is_sibling(word.process):
                with suppress(ProcessLookupError):
                    os.kill(word.process, signal.SIGKILL)  # the launcher would wait for a stopped process first
        os._exit(EXIT_HUNG)


def _is_sibling(process: int) -> bool:
    """Whether the launcher that started this process started that one too; a number alone could be anyone's."""
    try:
        parent = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return False
    return parent == os.getppid()
