"""Several ranks on this machine, started and watched by torchrun's agent, and started again if they are to be."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bertrain.base.errors import EXIT_HUNG, EXIT_LOST_RANK, EXIT_REQUEUE, EXIT_USER_ERROR
from bertrain.ranks.binding import USABLE, write_cpu_list
from bertrain.ranks.restart import FAILED

if TYPE_CHECKING:
    from bertrain.launch.meeting import Meeting

SAVING_S = 120
MEETING_S = 300


def run_ranks(nproc: int, arguments: list[str], *, restarts: int = 0, progress: Callable[[], int] = lambda: 0) -> int:
    """Run `bertrain ARGUMENTS` as `nproc` local ranks; returns the exit code for the whole.

    A rank that ends in a sentence for the user (code 2), or saved and wants to be started another day (75), has said
    so, and nothing is added to it here. If one dies, fails or hangs, all are ended; with `restarts` they are started
    again, so often in a row without `progress()` growing. A signal is passed on to the ranks, which then have two
    minutes to save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    in_vain, reached = 0, progress()
    try:
        while True:
            codes = run_once(nproc, ["-m", "bertrain", *arguments])
            ended = time.time()
            for code in (EXIT_USER_ERROR, EXIT_REQUEUE):
                if code in codes.values():
                    return code
            if not codes:
                return 0
            before, reached = reached, progress()
            in_vain = 1 if reached > before else in_vain + 1
            what = describe_failure(codes)
            if in_vain > restarts:
                print(f"bertrain: {what}{_given_up(restarts)}", file=sys.stderr, flush=True)
                return EXIT_HUNG if EXIT_HUNG in codes.values() else 1
            again = f"starting all ranks again ({in_vain} of {restarts} without a new checkpoint)"
            print(f"bertrain: {what}; {again}", file=sys.stderr, flush=True)
            os.environ[FAILED] = f"{ended} {what}"
    except SignalException as caught:
        return EXIT_REQUEUE if caught.sigval in (signal.SIGTERM, signal.SIGUSR1) else EXIT_USER_ERROR


def run_alone(arguments: list[str]) -> int:
    """Run `bertrain ARGUMENTS` in a process of its own; returns its exit code, negative for the signal that ended it.

    Signals are passed on to it, once each.
    """
    process = subprocess.Popen([sys.executable, "-u", "-m", "bertrain", *arguments], start_new_session=True)
    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_once(nproc: int, arguments: list[str], meeting: Meeting | None = None) -> dict[int, int]:
    """Run `python ARGUMENTS` as ranks here and wait for them; the exit codes of those that failed, in that order.

    With a `meeting` they are those of one node among several, all of which do the same.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # what the agent has to say is told by whoever called this
    usable = os.sched_getaffinity(0)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable) // nproc)))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # should a library crash, its signal comes with a stack
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that does not answer for a moment is no news
    os.environ[USABLE] = write_cpu_list(usable)
    nodes = 1 if meeting is None else meeting.nodes
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex if meeting is None else meeting.name,
        rdzv_backend="c10d" if meeting is None else "static",
        rdzv_endpoint="localhost:0" if meeting is None else f"{meeting.host}:{meeting.port}",
        rdzv_configs={} if meeting is None else {"rank": meeting.node, "timeout": MEETING_S},
        max_restarts=0,  # torchrun's agent would also start ranks again that ended in a sentence
        monitor_interval=0.2,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        **_time_to_save(LaunchConfig),
    )
    try:
        elastic_launch(config, sys.executable)("-u", *arguments)
    except ChildFailedError as error:
        in_order = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return {rank: failure.exitcode for rank, failure in in_order}
    return {}


def _time_to_save(config: type[Any]) -> dict[str, Any]:
    """How long ranks may save after a signal; PyTorch 2.11 gives them 30 seconds, and cannot be told otherwise."""
    return {"shutdown_timeout": SAVING_S} if "shutdown_timeout" in {field.name for field in fields(config)} else {}


def describe_failure(codes: Mapping[int, int]) -> str:
    """Which rank failed, and how, from the exit codes of all that ended, in that order."""
    if EXIT_HUNG in codes.values():
        return "a rank hung"
    # A rank that lost another, or that the agent then ended, is not the one that failed.
    by_itself = [rank for rank, code in codes.items() if code not in (EXIT_LOST_RANK, -signal.SIGTERM)]
    rank = (by_itself or list(codes))[0]
    code = codes[rank]
    return f"rank {rank} " + (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    )


def _given_up(restarts: int) -> str:
    if not restarts:
        return "; all ranks were ended (--restarts starts them again)"
    return f"; given up after {restarts} restart(s) without a new checkpoint (--restarts)"
