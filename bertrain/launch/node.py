"""Started by a job's script: on each node the agent that starts its ranks, or, under mpirun, each rank itself.

A rank copies its output into a log file of its own, then replaces itself with the command of the job (exec).
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

from bertrain.base.errors import EXIT_INTERRUPTED, EXIT_LOST_RANK, EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from bertrain.base.formatting import counted
from bertrain.launch import rendezvous
from bertrain.launch.job import Job
from bertrain.launch.local import code_after_signal, describe_failure, run_agent
from bertrain.ranks.signals import STOP_SIGNALS, handling

PREFLIGHT, TASK = "preflight", "task"
"""The stages of a job."""
SIGNALS_FROM_STDIN = "BERTRAIN_SIGNALS_FROM_STDIN"


def run_node(job: Job, stage: str) -> int:
    """Start the ranks of this node and wait for them; returns the exit code for the node."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if SIGNALS_FROM_STDIN in os.environ:
        threading.Thread(target=_receive_signals, daemon=True).start()
    node, nodes = rendezvous.node_and_count(os.environ)
    slots = int(os.environ.get("BERTRAIN_SLOTS", job.spec.ranks_per_node))
    name = f"node {node} ({platform.node()})"
    try:
        host, port = _endpoint(job, node)
        meeting = {
            "run_id": start_folder().name,  # unique to this start, so that no node joins another one
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{host}:{port}",
            "rdzv_configs": {"rank": node, "timeout": rendezvous.TIMEOUT_S},
        }
        command = ["-m", "bertrain", "launch", "worker", "rank", str(job.folder), stage]
        code, failed = run_agent(slots, command, nodes, meeting)
    except SignalException as caught:
        return code_after_signal(caught.sigval)
    except DistError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            "rendezvous-failed", f"{name} did not connect to the other {counted(nodes - 1, 'node')}: {reason}"
        ) from None
    if code in (0, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE):
        return code
    if set(failed.values()) <= {EXIT_LOST_RANK, -signal.SIGTERM}:
        return EXIT_LOST_RANK  # the node whose rank failed reports the cause
    print(f"bertrain: {name}: {describe_failure(failed)}", file=sys.stderr, flush=True)
    return code


def _endpoint(job: Job, number: int, *, is_listening: bool = True) -> tuple[str, int]:
    """Published by the first node (or rank), awaited by the others."""
    if number:
        return rendezvous.wait_for_endpoint(start_folder(), number, is_listening=is_listening)
    # The first node's name as the others resolve it: --rendezvous-host, else the hostfile's; empty: its own.
    listed = os.environ.get("BERTRAIN_FIRST_HOST", "") or (job.hosts[0].name if job.hosts else "")
    host = job.spec.rendezvous_host or listed.rpartition("@")[2]
    return rendezvous.publish_endpoint(start_folder(), host=host, port=job.spec.port)


def start_folder() -> Path:
    """The folder of this start, made by the job's script."""
    if "BERTRAIN_START" not in os.environ:
        raise UserError("not-in-a-job", "only the script of a job runs this command; use `bertrain launch`")
    return Path(os.environ["BERTRAIN_START"])


def _receive_signals() -> None:
    """Send this process the signals named on stdin, and SIGTERM when the connection closes."""
    for line in sys.stdin:
        if line.strip() in ("USR1", "TERM", "INT"):
            os.kill(os.getpid(), signal.Signals[f"SIG{line.strip()}"])
    os.kill(os.getpid(), signal.SIGTERM)


def exec_rank(job: Job, stage: str) -> None:
    """Replace this process with a rank of the job; does not return."""
    folder = start_folder()
    if job.launcher == "mpi":  # overrides what a batch script around mpirun has set
        slots = [host.slots for host in job.hosts]
        os.environ |= rendezvous.torchrun_variables_from_mpi(os.environ, slots) or {"RANK": ""}
    if not os.environ.get("RANK"):
        raise UserError(
            "not-a-rank", "neither torchrun nor mpirun started this process as a rank; use `bertrain launch`"
        )
    rank = int(os.environ["RANK"])
    if job.launcher == "mpi":
        host, port = _endpoint(job, rank, is_listening=False)
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if not os.environ.get("BERTRAIN_FAILED"):
        os.environ.pop("BERTRAIN_FAILED", None)
    _copy_output_to(folder / f"rank-{rank:05d}.log")
    os.chdir(job.directory)
    arguments = ["launch", "preflight", str(job.folder)]
    if stage == TASK:
        arguments = list(job.tasks[int(os.environ["BERTRAIN_TASK"]) - 1].command)
    os.execv(sys.executable, [sys.executable, "-u", "-m", "bertrain", *arguments])


def _copy_output_to(path: Path) -> None:
    """Copy the output of this process to a file with `tee`, which ignores signals sent to the whole job."""
    with handling((*STOP_SIGNALS, signal.SIGHUP), signal.SIG_IGN):
        tee = subprocess.Popen(["tee", "-a", str(path)], stdin=subprocess.PIPE)
    assert tee.stdin is not None
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)
    tee.stdin.close()
    tee.returncode = 0  # tee outlives this program: no warning about a child that still runs
