"""How far a long work has come, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to tell how many of `total` bytes are done: a bar on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        with _bar(label, total) as tell:
            yield tell
    else:
        yield _lines(label, total)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total or None)
        yield lambda done: bar.update(task, completed=done)


def _lines(label: str, total: int) -> Callable[[int], None]:
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            share = f" of {total / 1e6:,.0f} MB, {done / total:.0%}" if total else " MB"
            print(f"{label}: {done / 1e6:,.0f}{share}", file=sys.stderr, flush=True)

    return tell


def tell_units() -> Callable[[int, int], None]:
    """A function to tell how many units of work are done, of how many: a line where it goes on, and now and then."""
    began = said = time.monotonic()
    first: int | None = None

    def tell(done: int, total: int) -> None:
        nonlocal said, first
        now = time.monotonic()
        if first is None:
            first = done
            if done:
                print(f"continuing: {done} of {total} units are there", file=sys.stderr)
        elif done < total and now - said >= SECONDS_BETWEEN_LINES:
            said = now
            left = (now - began) / (done - first) * (total - done)
            print(f"{done} of {total} units, {left / 60:.0f} min left", file=sys.stderr)

    return tell
