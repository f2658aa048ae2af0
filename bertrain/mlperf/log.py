"""MLPerf's logs: ours written through MLPerf's own library, anybody's read.

A log is text in which some lines hold `:::MLLOG ` and a JSON object with time_ms, event_type, key, value and metadata;
launchers put words before it, ranks write side by side, and a program that was killed leaves half a line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError

TOKEN = ":::MLLOG "
CALLERS = 2  # between a line's author and the library, which notes his file and line


@dataclass(frozen=True)
class Entry:
    """One line of a log."""

    time_ms: float
    key: str
    value: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Log:
    """What could be read of a log, in its order, and how many lines could not."""

    path: Path
    entries: list[Entry]
    unreadable: int = 0

    def all(self, key: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.key == key]

    def first(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key), None)

    def value(self, key: str) -> Any:
        """The value that the key was first given; None where it is not there."""
        found = self.first(key)
        return found.value if found else None

    @property
    def status(self) -> str:
        """What the log says of its own end: success, aborted, unknown where it names none, unfinished without one."""
        end = self.first("run_stop")
        return str(end.metadata.get("status", "unknown")) if end else "unfinished"


def read_log(path: str | Path) -> Log:
    """Read anybody's log. What is no line of a log is passed over; half a line is counted. Refuses what has none."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    entries, unreadable = [], 0
    for line in text.splitlines():
        for body in line.split(TOKEN)[1:]:  # ranks may have written onto one line
            entry = _parse(body)
            unreadable += entry is None
            entries += [entry] if entry else []
    if not entries:
        raise UserError(f"{path} is no MLPerf log: no line of it holds {TOKEN.strip()} and a JSON object")
    return Log(path, entries, unreadable)


def _parse(body: str) -> Entry | None:
    """The entry that begins a text; what a second writer left after it on the same line is passed over."""
    try:
        fields, _ = json.JSONDecoder().raw_decode(body.strip())
        return Entry(float(fields["time_ms"]), str(fields["key"]), fields["value"], dict(fields["metadata"] or {}))
    except (ValueError, KeyError, TypeError):
        return None


def result_files(folder: str | Path) -> list[Path]:
    """The result_*.txt of a folder, by their numbers."""
    found = sorted(Path(folder).glob("result_*.txt"), key=lambda path: (len(path.name), path.name))
    if not found:
        raise UserError(f"there is no result_*.txt in {folder}; name the folder that `mlperf run` wrote as --out")
    return found


def require_library() -> None:
    """Refuse, in words, where MLPerf's library is not installed."""
    try:
        import mlperf_logging  # noqa: F401
    except ImportError:
        raise UserError(
            "this needs MLPerf's own library, which is not installed; run: pip install 'bertrain[mlperf]'"
        ) from None


@dataclass
class ResultLog:
    """A log being written, line by line, through MLPerf's library."""

    path: Path
    _logger: Any = field(init=False, repr=False)
    _handler: _Remembering = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from mlperf_logging.mllog.mllog import MLLogger

        try:
            handler = _Remembering(self.path, mode="x", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the log {self.path}: {error.strerror or error}") from None
        lines = _Lines("bertrain.mlperf")
        lines.addHandler(handler)
        self._handler = handler
        self._logger = MLLogger(logger=lines, root_dir=str(Path(__file__).parents[2]))

    def start(self, key: str, value: Any = None, **metadata: Any) -> None:
        """An interval begins."""
        self._logger.start(key, value, metadata=metadata, stack_offset=CALLERS)
        self._refuse_failure()

    def end(self, key: str, value: Any = None, **metadata: Any) -> None:
        """An interval ends."""
        self._logger.end(key, value, metadata=metadata, stack_offset=CALLERS)
        self._refuse_failure()

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Something is so, or happens, at this moment."""
        self._logger.event(key, value, metadata=metadata, stack_offset=CALLERS)
        self._refuse_failure()

    def close(self) -> None:
        """Have all of it on the disk."""
        self._handler.close()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def _refuse_failure(self) -> None:
        if self._handler.failure is not None:
            reason = getattr(self._handler.failure, "strerror", None) or self._handler.failure
            raise UserError(f"could not write the log {self.path}: {reason}; make room and start again")


class _Lines(logging.Logger):
    """Lines of a log are the result, not chatter: `logging.disable` has no say in them."""

    def isEnabledFor(self, level: int) -> bool:
        return True


class _Remembering(logging.FileHandler):
    """A file that remembers a line it could not write; logging itself would only print a traceback."""

    failure: BaseException | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        self.failure = self.failure or sys.exc_info()[1]
