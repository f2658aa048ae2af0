"""A Dask cluster made of the ranks of a job: the first one schedules, the others work until it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.base.files import write_atomically
from bertrain.base.machine import is_first_rank, under_launcher
from bertrain.config.choices import Engine
from bertrain.launch.node import start_folder


@contextmanager
def dask_scheduler(engine: Engine, scheduler: str | None) -> Iterator[str | None]:
    """The address of the scheduler to prepare data with: the given one, or that of the ranks.

    None for the engine `local`, and on ranks that have been workers meanwhile.
    """
    if not under_launcher() or engine != "dask" or scheduler:
        if under_launcher() and not is_first_rank():
            raise UserError("one-process-command", "several ranks prepare data only with --engine dask")
        yield scheduler
        return
    distributed = import_extra("distributed")
    path = start_folder() / "dask-scheduler"
    if is_first_rank():
        host = os.environ["MASTER_ADDR"]
        options: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
        with distributed.LocalCluster(host=host, **options) as cluster:
            write_atomically(path, cluster.scheduler_address)
            yield cluster.scheduler_address
        return
    while not path.exists():
        time.sleep(0.2)
    asyncio.run(_work(distributed, path.read_text()))
    yield None


async def _work(distributed: Any, address: str) -> None:
    async with distributed.Worker(address, nthreads=1) as worker:
        await worker.finished()
