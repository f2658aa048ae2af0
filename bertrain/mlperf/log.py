"""MLPerf logs: reads any, and writes ours with MLPerf's own library.

Some lines of a log contain `:::MLLOG ` and a JSON object with time_ms, event_type, key, value and metadata. Launchers
prefix lines, several ranks may write into one line, and a killed program leaves a truncated line.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.files import reading, writing
from bertrain.base.schema import parse_json

TOKEN = ":::MLLOG "
LINE = {"time_ms": float, "key": str, "value": Any, "metadata": dict[str, Any] | None}
STACK_OFFSET = 2  # calls between the author of a line and the library, which logs the author's file and line


@dataclass(frozen=True)
class Entry:
    """One line of a log."""

    time_ms: float
    key: str
    value: Any
    metadata: dict[str, Any]
    fields: dict[str, Any]  # all that the line has


@dataclass(frozen=True)
class Log:
    """The readable entries of a log, in order, and the number of unreadable ones."""

    path: Path
    entries: list[Entry]
    unreadable: int = 0

    def all(self, key: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.key == key]

    def first(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key), None)

    def value(self, key: str) -> Any:
        """The first value of a key; None if the log does not have it."""
        found = self.first(key)
        return found.value if found else None

    def text(self, key: str) -> str | None:
        value = self.value(key)
        return None if value is None else str(value)

    @property
    def status(self) -> str:
        """The status of run_stop: success, aborted, or unknown if it has none; unfinished if there is no run_stop."""
        end = self.first("run_stop")
        return str(end.metadata.get("status", "unknown")) if end else "unfinished"


def read_log(path: str | Path) -> Log:
    """Read any MLPerf log; skips other lines, counts truncated entries, and refuses a file without entries."""
    path = Path(path)
    with reading(path):
        text = path.read_text(encoding="utf-8", errors="replace")
    entries, unreadable = [], 0
    for line in text.splitlines():
        for body in line.split(TOKEN)[1:]:  # ranks may have written onto one line
            entry = _parse(body)
            unreadable += entry is None
            entries += [entry] if entry else []
    if not entries:
        raise UserError("not-an-mlperf-log", f"{path} is not an MLPerf log: no line has {TOKEN.strip()} and JSON")
    return Log(path, entries, unreadable)


def _parse(body: str) -> Entry | None:
    """The entry at the start of a text; ignores what a second writer left behind it."""
    body = body.strip()
    try:
        _, end = json.JSONDecoder().raw_decode(body)
        fields = parse_json(body[:end], LINE)
        entry = Entry(fields["time_ms"], fields["key"], fields["value"], fields["metadata"] or {}, fields)
        return entry if entry.time_ms >= 0 else None
    except (ValueError, RecursionError):
        return None


def result_files(folder: str | Path) -> list[Path]:
    found = sorted(Path(folder).glob("result_*.txt"), key=lambda path: (len(path.name), path.name))
    if not found:
        raise UserError("missing-results", f"no result_*.txt is in {folder}; give the --out folder of `mlperf run`")
    return found


class ResultLog:
    """Writes a log, line by line, with MLPerf's library."""

    def __init__(self, path: Path) -> None:
        from mlperf_logging.mllog.mllog import MLLogger

        self.path, self._lines = path, _Lines("bertrain.mlperf")
        self._logger = MLLogger(logger=self._lines, root_dir=str(Path(__file__).parents[2]))
        with writing(path):
            # Unbuffered, so that what a full disk refuses is not tried again at the end.
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - open until `close`

    def _write(self, kind: str, key: str, value: Any = None, **metadata: Any) -> None:
        getattr(self._logger, kind)(key, value, metadata=metadata, stack_offset=STACK_OFFSET)
        rest = self._lines.take().encode()
        with writing(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]

    start = partialmethod(_write, "start")  # of an interval
    end = partialmethod(_write, "end")
    event = partialmethod(_write, "event")  # a value or a point in time

    def close(self) -> None:
        """Sync the file to disk."""
        with writing(self.path), self._file:
            os.fsync(self._file)


class _Lines(logging.Logger):
    """Keeps what the library logs, which would hide an error of writing it; `logging.disable` does not silence it."""

    _text = ""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        self._text += f"{msg}\n"

    def take(self) -> str:
        text, self._text = self._text, ""
        return text
