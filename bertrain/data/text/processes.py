"""A pool of worker processes that ends with its parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from bertrain.base.errors import UserError


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `workers` processes; tasks not begun when the body ends are cancelled."""
    # Spawned, not forked: a fork copies locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise UserError(
                "killed-worker",
                "a worker process was killed, perhaps because memory ran out; run the same command again, perhaps with "
                "fewer --workers",
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Exit when the parent is killed, instead of waiting for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
