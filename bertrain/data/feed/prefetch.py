"""Makes items ahead of time in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_background(items: Iterator[Item], ahead: int) -> Iterator[Item]:
    """The items in order, up to `ahead` of them made in advance by a thread; its exceptions are raised here."""
    ready: queue.Queue[Item | _End] = queue.Queue(ahead)
    stopped = threading.Event()

    def offer(item: Item | _End) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        end = _End()
        try:
            for item in items:
                offer(item)
                if stopped.is_set():
                    return
        except BaseException as error:
            end.error = error
        offer(end)

    worker = threading.Thread(target=produce, name="bertrain-loader", daemon=True)
    worker.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        worker.join()


class _End:
    """The end of a background iteration, and the exception that caused it, if any."""

    error: BaseException | None = None
