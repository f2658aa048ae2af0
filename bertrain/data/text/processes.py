"""Processes to share work with: started afresh, ended with their parent, and missed in one sentence."""

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
    """A pool of `workers` processes. What they have not begun when the body ends is left undone."""
    # Started afresh rather than forked: a fork copies locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, perhaps for want of memory; give the same command again, perhaps with "
                "fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Let this worker die when its parent is killed, rather than wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
