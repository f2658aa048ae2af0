"""Progress of long operations, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bertrain.base.formatting import duration

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(label: str, total: int = 0) -> Iterator[Callable[..., None]]:
    """Yields a function to call with the bytes done, and their total once it is known (0: it is not).

    It draws a bar on a terminal, else it prints a line every few seconds.
    """
    if not sys.stderr.isatty():
        yield _lines(label, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total or None)
        yield lambda done, of=total: bar.update(task, completed=done, total=of or None)


def _lines(label: str, total: int) -> Callable[..., None]:
    last = time.monotonic()

    def report(done: int, of: int = total) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            share = f" of {of / 1e6:,.0f} MB, {done / of:.0%}" if of else " MB"
            print(f"{label}: {done / 1e6:,.0f}{share}", file=sys.stderr, flush=True)

    return report


def unit_progress() -> Callable[[int, int], None]:
    """A function to call with the units done and their total: prints a line when resuming, then every few seconds."""
    began = last = time.monotonic()
    first: int | None = None

    def report(done: int, total: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        if first is None:
            first = done
            if done:
                print(f"resuming: {done} of {total} parts are prepared", file=sys.stderr)
        elif done < total and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = (now - began) / (done - first) * (total - done)
            print(f"prepared {done} of {total} parts; {duration(left)} left", file=sys.stderr)

    return report
