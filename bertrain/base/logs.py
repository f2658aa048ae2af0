"""Logs of the ranks: RUN/logs/rank-N.jsonl, a JSON object per line. Writes them and reads them.

A line holds `time` (seconds since the epoch, by the rank's clock), `level`, `event`, `text`, and fields of the event.
Console lines, warnings and reports of the watchdog are logged too, also on ranks that print nothing. A file that
reaches MAX_BYTES replaces the older one, so a rank keeps at most twice that. Lines that cannot be written are counted,
and the run continues.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from bertrain.base.errors import RequeueError, StoppedError, UserError
from bertrain.base.files import read_tail
from bertrain.base.schema import JsonError, parse_json
from bertrain.base.units import parse_duration

Level = Literal["info", "warning", "error"]
LEVELS: dict[str, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

FOLDER = "logs"
MAX_BYTES = 8 << 20  # per file; one older file is kept
POLL_S = 0.5

LOGGER = logging.getLogger("bertrain")
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # the console has printed it already
LOGGER.addHandler(logging.NullHandler())


def note(level: Level, event: str, text: str, **fields: Any) -> None:
    """Write one line into this rank's log, if it keeps one and memory is left."""
    with suppress(MemoryError):  # running out of memory is often the reason for the line, and must still reach the user
        LOGGER.log(LEVELS[level], "%s", text, extra={"event": event, "fields": fields})


@contextmanager
def keep_log(run: Path, rank: int, world: int) -> Iterator[None]:
    """Keep this rank's log in the run folder while the body runs; its start and end are logged."""
    with suppress(OSError):
        (run / FOLDER).mkdir(exist_ok=True)
    handler = _Lines(run / FOLDER / f"rank-{rank}.jsonl")
    LOGGER.addHandler(handler)
    try:
        where = {"host": platform.node(), "process": os.getpid(), "world": world}
        note("info", "start", f"rank {rank} of {world} starts on host {where['host']}", **where)
        yield
        note("info", "end", f"rank {rank} is done")
    except UserError as error:
        note("warning" if isinstance(error, RequeueError | StoppedError) else "error", "stop", str(error))
        raise
    except KeyboardInterrupt:
        note("warning", "stop", "interrupted")
        raise
    except BaseException as error:
        note("error", "failure", f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        raise
    finally:
        LOGGER.removeHandler(handler)
        handler.close()


class _Lines(RotatingFileHandler):
    """A rank's file. Lines that cannot be written are counted, and reported once on the console."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="ascii", delay=True)
        self._num_lost, self._has_warned = 0, False

    def format(self, record: logging.LogRecord) -> str:
        lost = {"lost_before": self._num_lost} if self._num_lost else {}
        head = {"level": record.levelname.lower(), "event": record.__dict__.get("event", record.name)}
        fields = record.__dict__.get("fields", {})
        return json.dumps({"time": record.created} | head | {"text": record.getMessage()} | fields | lost, default=str)

    def emit(self, record: logging.LogRecord) -> None:
        lost_before = self._num_lost
        super().emit(record)
        if self._num_lost == lost_before:
            self._num_lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self._num_lost += 1
        if self.stream is not None:
            with suppress(OSError, ValueError):
                self.stream.close()  # an open stream would keep the line and try again
            self.stream = None  # reopened for the next line
        if not self._has_warned:
            self._has_warned = True
            print(f"warning: cannot write {self.baseFilename}: {sys.exc_info()[1]}; the run continues", file=sys.stderr)


def logs(
    run: str | Path, *, rank: int | None = None, since: str = "", level: Level = "info", follow: bool = False
) -> Iterator[dict[str, Any]]:
    """The log lines of a run's ranks, or of one rank, by time; each is a dictionary with its `rank`.

    `since` is how far to look back, such as 10m; `level` is the lowest level. With `follow` it waits for new lines
    forever. Incomplete lines are left out.
    """
    earliest = time.time() - parse_duration(since, "--since") if since else float("-inf")
    ranks = ranks_with_logs(Path(run))
    if not ranks:
        reason = "has no logs yet" if (Path(run) / "config.json").is_file() else "is not a run"
        raise UserError("missing-log", f"{run} {reason}: there is no {FOLDER}/rank-0.jsonl in it")
    if rank is not None and rank not in ranks:
        raise UserError(
            "missing-log", f"{run} has no log of rank {rank}; it has those of: {', '.join(map(str, ranks))}"
        )
    return (
        entry
        for entry in _entries(Path(run), rank, follow=follow)
        if LEVELS.get(entry["level"], 0) >= LEVELS[level] and entry["time"] >= earliest
    )


def describe(entry: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
    lost = f" (and {entry['lost_before']} lines before it were lost)" if entry.get("lost_before") else ""
    return f"{when}  rank {entry['rank']}  {entry['level']:<7}  {entry['text']}{lost}"


def newest_entries(run: Path, rank: int, num_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """The last lines of a rank's log, oldest first; none, if it keeps no log."""
    lines = read_tail(run / FOLDER / f"rank-{rank}.jsonl", num_bytes).split(b"\n")
    return [entry for line in lines if (entry := _entry(line, rank))]


def ranks_with_logs(run: Path) -> list[int]:
    names = (path.name.removeprefix("rank-").removesuffix(".jsonl") for path in (run / FOLDER).glob("rank-*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def _entries(run: Path, wanted: int | None, *, follow: bool) -> Iterator[dict[str, Any]]:
    """All lines by time, as far as clocks agree; then, with `follow`, new lines."""
    num_read: dict[int, int] = {}
    while True:
        ranks = [rank for rank in ranks_with_logs(run) if wanted in (None, rank)]
        arrived = [_new_entries(run / FOLDER / f"rank-{rank}.jsonl", rank, num_read) for rank in ranks]
        yield from heapq.merge(*arrived, key=lambda entry: entry["time"])
        if not follow:
            return
        time.sleep(POLL_S)


def _new_entries(path: Path, rank: int, num_read: dict[int, int]) -> Iterator[dict[str, Any]]:
    """The complete lines of a rank's log, older file first, that were written since the last call.

    `num_read` counts the bytes of each file by its inode, since a full file is renamed.
    """
    for place in (f"{path}.1", path):
        with suppress(OSError), open(place, "rb") as file:
            inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, 2)
            begin = num_read.get(inode, 0)
            num_read[inode] = file.seek(begin if begin <= size else 0)  # a new file may have the inode of a deleted one
            for line in file:
                if line.endswith(b"\n"):
                    num_read[inode] += len(line)
                    if entry := _entry(line, rank):
                        yield entry


def _entry(line: bytes, rank: int) -> dict[str, Any] | None:
    try:
        entry: dict[str, Any] = parse_json(line, {"time": float, "level": str, "event?": str, "text": str})
    except JsonError:
        return None
    return entry | {"rank": rank} if 0 <= entry["time"] < 1e11 else None  # NaN, and what no calendar has
