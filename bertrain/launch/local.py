"""Several ranks on this machine, started and watched by torchrun's agent."""

from __future__ import annotations

import logging
import os
import sys
import uuid

from bertrain.errors import EXIT_USER_ERROR


def run_ranks(nproc: int, arguments: list[str]) -> int:
    """Run `bertrain ARGUMENTS` as `nproc` local ranks; returns the exit code for the whole.

    A rank that ends in a sentence for the user (code 2) has printed it, so nothing is added to it here. A signal is
    passed on to the ranks, which then have two minutes to save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are told below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # should a library crash, its signal comes with a stack
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "bertrain", *arguments)
    except SignalException:
        return EXIT_USER_ERROR
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if EXIT_USER_ERROR in codes:
            return EXIT_USER_ERROR
        first_rank, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
        print(f"rank {first_rank} failed first, with exit code {first.exitcode}", file=sys.stderr)
        return 1
    return 0
