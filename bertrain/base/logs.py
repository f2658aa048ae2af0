"""What every rank said, in one place: RUN/logs/rank-N.jsonl, an object per line, and how it is read.

A line holds `time` (seconds since the epoch, by the rank's clock), `level`, `event`, `text`, and fields of the event.
Whatever the console, warnings and the watchdog say goes here too, as well as what ranks that stay silent have to say.
A file that reaches MOST_BYTES takes the place of the one before it, so a rank keeps twice that at the most. Lines that
cannot be written are counted, and the run goes on without them.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bertrain.base.errors import RequeueError, UserError
from bertrain.base.units import parse_duration

Level = Literal["info", "warning", "error"]
LEVELS: dict[str, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

FOLDER = "logs"
MOST_BYTES = 8 << 20  # of a file; there is one older file beside it
POLL_S = 0.5

LOGGER = logging.getLogger("bertrain")
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # the console has said it already
LOGGER.addHandler(logging.NullHandler())


# --- writing ---------------------------------------------------------------------------------------


def note(level: Level, event: str, text: str, **fields: Any) -> None:
    """Put one line into this rank's log, if it keeps one and there is memory for a line."""
    with suppress(MemoryError):  # it is often the reason for the line, and has to reach the user
        LOGGER.log(LEVELS[level], "%s", text, extra={"event": event, "fields": fields})


@contextmanager
def keep_log(run: Path, rank: int, world: int) -> Iterator[None]:
    """Keep this rank's log in the run folder while the body runs; how it began and ended is noted."""
    with suppress(OSError):
        (run / FOLDER).mkdir(exist_ok=True)
    handler = _Lines(run / FOLDER / f"rank-{rank}.jsonl")
    LOGGER.addHandler(handler)
    try:
        where = {"host": platform.node(), "process": os.getpid(), "world": world}
        note("info", "start", f"rank {rank} of {world} begins on host {where['host']}", **where)
        yield
        note("info", "end", f"rank {rank} is done")
    except UserError as error:
        note("warning" if isinstance(error, RequeueError) else "error", "stop", str(error))
        raise
    except BaseException as error:
        note("error", "failure", f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        raise
    finally:
        LOGGER.removeHandler(handler)
        handler.close()


class _Lines(RotatingFileHandler):
    """A rank's file. What cannot be written is counted, and said once on the console."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=1, encoding="ascii", delay=True)
        self._num_lost, self._has_said = 0, False

    def format(self, record: logging.LogRecord) -> str:
        lost = {"lost_before": self._num_lost} if self._num_lost else {}
        told = {"level": record.levelname.lower(), "event": record.__dict__.get("event", record.name)}
        fields = record.__dict__.get("fields", {})
        return json.dumps({"time": record.created} | told | {"text": record.getMessage()} | fields | lost, default=str)

    def emit(self, record: logging.LogRecord) -> None:
        lost_before = self._num_lost
        super().emit(record)
        if self._num_lost == lost_before:
            self._num_lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self._num_lost += 1
        if self.stream is not None:
            with suppress(OSError, ValueError):
                self.stream.close()  # which would keep what it could not write, and try again
            self.stream = None  # opened anew for the next line
        if not self._has_said:
            self._has_said = True
            print(f"warning: cannot write {self.baseFilename}: {sys.exc_info()[1]}; the run goes on", file=sys.stderr)


# --- reading ---------------------------------------------------------------------------------------


def logs(
    run: str | Path, *, rank: int | None = None, since: str = "", level: Level = "info", follow: bool = False
) -> Iterator[dict[str, Any]]:
    """The lines that the ranks of a run have logged, or one of them, by time; each is a dictionary with its `rank`.

    `since` is how far to look back from now, such as 10m; `level` the least that is wanted. With `follow` it waits
    for more, without end. It only reads; a line that is torn is left out.
    """
    earliest = time.time() - parse_duration(since, "--since") if since else float("-inf")
    files = _files(Path(run))
    if rank is not None and rank not in files:
        there = ", ".join(map(str, sorted(files)))
        raise UserError(f"{run} holds no log of rank {rank}; there are logs of: {there}")
    wanted = {rank} if rank is not None else None
    return (
        entry
        for entry in _entries(Path(run), wanted, follow=follow)
        if LEVELS.get(entry["level"], 0) >= LEVELS[level] and entry["time"] >= earliest
    )


def describe(entry: dict[str, Any]) -> str:
    """A line of a log for people."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
    lost = f" (and {entry['lost_before']} lines before it were lost)" if entry.get("lost_before") else ""
    return f"{when}  rank {entry['rank']}  {entry['level']:<7}  {entry['text']}{lost}"


def newest_entries(run: Path, rank: int, num_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """The last lines of a rank's log, oldest first; none, if it keeps no log."""
    try:
        with open(run / FOLDER / f"rank-{rank}.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - num_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return [entry for line in lines if (entry := _entry(line, rank))]


def ranks_with_logs(run: Path) -> list[int]:
    return sorted(
        int(found[1])
        for path in (run / FOLDER).glob("rank-*.jsonl")
        if (found := re.fullmatch(r"rank-(\d+)\.jsonl", path.name))
    )


def _files(run: Path) -> dict[int, Path]:
    files = {rank: run / FOLDER / f"rank-{rank}.jsonl" for rank in ranks_with_logs(run)}
    if not files:
        there = "has no logs yet" if (run / "config.json").is_file() else "holds no run"
        raise UserError(f"{run} {there}: there is no {FOLDER}/rank-0.jsonl in it")
    return files


def _entries(run: Path, wanted: set[int] | None, *, follow: bool) -> Iterator[dict[str, Any]]:
    """All lines by time, as far as clocks agree; then, if asked to, what comes."""
    open_files: dict[int, _Growing] = {}

    def new_files() -> list[_Growing]:
        ranks = [rank for rank in ranks_with_logs(run) if wanted is None or rank in wanted]
        added = {rank: _Growing(run / FOLDER / f"rank-{rank}.jsonl", rank) for rank in ranks if rank not in open_files}
        open_files.update(added)
        return list(added.values())

    each_rank = [chain(file.older(), file.entries()) for file in new_files()]
    yield from heapq.merge(*each_rank, key=lambda entry: entry["time"])
    while follow:
        time.sleep(POLL_S)
        new_files()
        arrived = [file.entries() for _, file in sorted(open_files.items())]
        yield from heapq.merge(*arrived, key=lambda entry: entry["time"])


class _Growing:
    """A rank's log that may grow, and be replaced by a new one, while it is read."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._file: BinaryIO | None = None
        self._rest = b""

    def older(self) -> Iterator[dict[str, Any]]:
        """What the file before this one holds."""
        with suppress(OSError), open(f"{self._path}.1", "rb") as file:
            yield from filter(None, (_entry(line, self._rank) for line in file))

    def entries(self) -> Iterator[dict[str, Any]]:
        """The whole lines that were written since the last call."""
        while True:
            if self._file is None:
                try:
                    self._file = open(self._path, "rb")  # noqa: SIM115 - it is read on from, call after call
                except OSError:
                    return
            for line in self._file:
                self._rest += line
                if self._rest.endswith(b"\n"):
                    whole, self._rest = self._rest, b""
                    if entry := _entry(whole, self._rank):
                        yield entry
            if self._is_newest():
                return
            self._file.close()
            self._file, self._rest = None, b""

    def _is_newest(self) -> bool:
        """Whether the open file is still the one of that name; only then may more come."""
        assert self._file is not None
        try:
            return os.fstat(self._file.fileno()).st_ino == os.stat(self._path).st_ino
        except OSError:
            return True  # between its renaming and the first line of the next one


def _entry(line: bytes, rank: int) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        return entry | {"rank": rank, "time": float(entry["time"]), "level": entry["level"], "text": entry["text"]}
    except (ValueError, KeyError, TypeError):
        return None
