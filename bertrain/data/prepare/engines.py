"""Runs preparation in this process, in several processes, or on a Dask cluster. The result is the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import as_completed
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.config.choices import Engine
from bertrain.data.prepare.units import make_unit
from bertrain.data.text.processes import process_pool

DASK_TIMEOUT_S = 20


def make_units(
    work_folder: str, numbers: list[int], workers: int, engine: Engine, scheduler: str | None
) -> Iterator[int]:
    """Make the units of these numbers; yields each number when its unit is finished."""
    if engine == "dask":
        yield from _on_dask(work_folder, numbers, scheduler)
    elif workers == 1 or len(numbers) <= 1:  # none: killed after the last one
        for number in numbers:
            yield make_unit(work_folder, number)
    else:
        with process_pool(min(workers, len(numbers))) as pool:
            for future in as_completed([pool.submit(make_unit, work_folder, number) for number in numbers]):
                yield future.result()


def _on_dask(work_folder: str, numbers: list[int], scheduler: str | None) -> Iterator[int]:
    distributed = import_extra("distributed")
    if scheduler is None:
        raise UserError("missing-option", "--engine dask needs a scheduler, such as --scheduler tcp://node1:8786")
    try:
        client: Any = distributed.Client(scheduler, timeout=DASK_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError("no-scheduler", f"no Dask scheduler answers at --scheduler {scheduler}: {error}") from None
    with client:
        futures = [client.submit(make_unit, work_folder, number, pure=False) for number in numbers]
        try:
            for future in distributed.as_completed(futures, loop=client.loop):
                yield future.result()
        except distributed.KilledWorker:
            raise UserError(
                "killed-worker",
                "Dask workers were killed repeatedly at the same unit, perhaps because memory ran out; finished units "
                "are kept: run the same command again",
            ) from None
        finally:
            client.cancel(futures)
