"""A pool of worker processes that ends with its parent."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from multiprocessing.reduction import ForkingPickler
from typing import Any

from bertrain.base.errors import UserError

CURE = "run again, perhaps with fewer --workers"


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `workers` processes; tasks not begun when the body ends are canceled."""
    # Spawned, not forked: a fork copies locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    with _Pool(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            for process in list(pool._processes.values()):
                process.terminate()
            # One may have been writing a result: now that nobody else can complete it, the pool stops waiting for it.
            pool._result_queue._writer.close()  # type: ignore[attr-defined]
            raise
        except BrokenProcessPool:
            what = "a worker process was killed, perhaps because memory ran out"
            raise UserError("killed-worker", f"{what}; {CURE}") from None
        finally:
            pool.shutdown(cancel_futures=True)


class _Pool(ProcessPoolExecutor):
    """Its workers do not hear Ctrl-C, which a terminal sends to them too: this process ends them."""

    def submit(self, *given: Any, **named: Any) -> Future[Any]:
        function, *values = given
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers start here, and inherit it
        try:
            return super().submit(_call, bytes(ForkingPickler.dumps((function, values, named))))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(task: bytes) -> Any:
    """Import the task's modules here, not where the pool reads its queue: a failure there prints the traceback of every
    worker, and this one reaches the parent, which says it once."""
    try:
        with redirect_stderr(io.StringIO()):  # hashlib also prints what it could not import
            function, values, named = ForkingPickler.loads(task)
    except Exception as error:  # the parent has imported the same: something is short here
        what = f"a worker process could not start ({type(error).__name__}), perhaps because memory ran out"
        raise UserError("killed-worker", f"{what}; {CURE}") from None
    try:
        return function(*values, **named)
    except MemoryError:  # it takes memory to send it: Python could fail at that, and print the traceback
        os._exit(1)  # the parent says that a worker was killed, perhaps because memory ran out


def _end_with_parent() -> None:
    """Exit when the parent is killed, instead of waiting for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
