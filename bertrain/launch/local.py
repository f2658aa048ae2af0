"""Starts several ranks on this machine with torchrun's agent, waits for them, and restarts them if asked to."""

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
from typing import Any

from bertrain.base.errors import EXIT_HUNG, EXIT_INTERRUPTED, EXIT_LOST_RANK, EXIT_REQUEUE, EXIT_USER_ERROR
from bertrain.base.formatting import counted
from bertrain.ranks.binding import USABLE, write_cpu_list
from bertrain.ranks.restart import FAILED
from bertrain.ranks.signals import LAUNCHER, STOP_SIGNALS, handling

SAVE_TIMEOUT_S = 120


def run_ranks(
    nproc: int, arguments: list[str], *, restarts: int | None = None, progress: Callable[[], int] = lambda: 0
) -> int:
    """Run `bertrain ARGUMENTS` as `nproc` local ranks; returns one exit code for all.

    Ranks that exit with a user error (2), a requeue (75) or Ctrl-C (130) have reported it themselves. If a rank crashes
    or hangs, all are stopped; `restarts` limits how often they are restarted in a row without `progress()` growing
    (None: the command has no --restarts). Signals are forwarded to the ranks, which then have SAVE_TIMEOUT_S to save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    failures, reached, advice = 0, progress(), "" if restarts is None else " (--restarts restarts them)"
    restarts = restarts or 0
    try:
        while True:
            code, failed = run_agent(nproc, ["-m", "bertrain", *arguments])
            ended = time.time()
            if code in (0, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE):
                return code
            before, reached = reached, progress()
            failures = 1 if reached > before else failures + 1
            reason = describe_failure(failed)
            consequence = f"starting all ranks again ({failures} of {restarts} without a new checkpoint)"
            if failures > restarts:
                given_up = f"gave up after {counted(restarts, 'restart')} without a new checkpoint (--restarts)"
                consequence = given_up if restarts else f"all ranks were stopped{advice}"
            print(f"bertrain: {reason}; {consequence}", file=sys.stderr, flush=True)
            if failures > restarts:
                return code
            os.environ[FAILED] = f"{ended} {reason}"
    except SignalException as caught:
        return code_after_signal(caught.sigval)
    finally:
        os.environ.pop(FAILED, None)  # the next ranks of this process are others


def code_after_signal(number: int) -> int:
    """The exit code of a launcher that a signal stopped, once its ranks have saved."""
    return EXIT_REQUEUE if number in (signal.SIGTERM, signal.SIGUSR1) else EXIT_INTERRUPTED


def run_in_subprocess(arguments: list[str]) -> int:
    """Run `bertrain ARGUMENTS` in a new process, forwarding signals to it.

    Returns its exit code, negative for the signal that killed it.
    """
    command, environment = [sys.executable, "-u", "-m", "bertrain", *arguments], {LAUNCHER: str(os.getpid())}
    process = subprocess.Popen(command, start_new_session=True, env=os.environ | environment)
    with handling(STOP_SIGNALS, lambda received, _: process.send_signal(received)):
        return process.wait()


def run_agent(
    nproc: int, arguments: list[str], nodes: int = 1, meeting: Mapping[str, Any] | None = None
) -> tuple[int, dict[int, int]]:
    """Run `python ARGUMENTS` as the ranks of this node, and wait for them.

    `meeting`: how the nodes find each other, as arguments of LaunchConfig; None: there are no others. Returns one exit
    code for the node, and those of the ranks that failed, in the order in which they did.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    usable = os.sched_getaffinity(0)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable) // nproc)))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # prints a stack if a library crashes
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides warnings of a store that is slow to answer
    os.environ |= {USABLE: write_cpu_list(usable), LAUNCHER: str(os.getpid())}
    alone = {"run_id": uuid.uuid4().hex, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    where: dict[str, Any] = dict(meeting or alone)
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # PyTorch 2.11 allows 30 s, always
        where["shutdown_timeout"] = SAVE_TIMEOUT_S
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=nproc,
        max_restarts=0,  # the agent would also restart ranks that exited with a user error
        monitor_interval=0.2,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        **where,
    )
    level_before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # the caller reports failures
    try:
        elastic_launch(config, sys.executable)("-u", *arguments)
    except ChildFailedError as error:
        in_order = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        codes = {rank: failure.exitcode for rank, failure in in_order}
        known = (EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE, EXIT_HUNG)
        return next((code for code in known if code in codes.values()), 1), codes
    finally:
        logging.disable(level_before)
        del os.environ[LAUNCHER]  # of ranks alone
    return 0, {}


def describe_failure(codes: Mapping[int, int]) -> str:
    """Which rank failed, and how; `codes` are the exit codes in the order in which ranks ended."""
    if EXIT_HUNG in codes.values():
        return "a rank hung"
    # A rank that lost a peer, or that the agent then terminated, is not the one that failed.
    causes = [rank for rank, code in codes.items() if code not in (EXIT_LOST_RANK, -signal.SIGTERM)]
    rank = (causes or list(codes))[0]
    code = codes[rank]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return f"rank {rank} {how}"
