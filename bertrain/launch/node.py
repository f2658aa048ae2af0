"""What a job's script starts: on each node the agent that starts its ranks, or, under mpirun, each rank itself.

A rank writes what it says into a file of its own and, as before, to whoever started it; then it becomes the command of
the job, so that nothing of the launcher is left in it.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

from bertrain.base.errors import EXIT_HUNG, EXIT_LOST_RANK, EXIT_REQUEUE, EXIT_USER_ERROR, UserError
from bertrain.launch.job import Job
from bertrain.launch.local import describe_failure, run_once
from bertrain.launch.meeting import call_together, come_to, find_place, meet, ranks_of_mpi

PREFLIGHT, TRAINING = "preflight", "training"
OUTLASTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def run_node(job: Job, what: str) -> int:
    """Start the ranks of this node and wait for them; returns the exit code for the node."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if "BERTRAIN_WORDS" in os.environ:
        threading.Thread(target=_listen, daemon=True).start()
    node, nodes = find_place(os.environ)
    slots = int(os.environ.get("BERTRAIN_SLOTS", job.spec.ranks_per_node))
    spec = job.spec
    here = f"node {node} ({platform.node()})"
    try:
        meeting = meet(start_folder(), (node, nodes), host=rendezvous_host(job), port=spec.port)
        codes = run_once(slots, ["-m", "bertrain.launch", "rank", str(job.folder), what], meeting)
    except SignalException as caught:
        return EXIT_REQUEUE if caught.sigval in (signal.SIGTERM, signal.SIGUSR1) else EXIT_USER_ERROR
    except DistError as error:
        raise UserError(f"{here} did not meet the other {nodes - 1} node(s): {str(error).splitlines()[0]}") from None
    for code in (EXIT_USER_ERROR, EXIT_REQUEUE):
        if code in codes.values():
            return code
    if not codes:
        return 0
    if set(codes.values()) <= {EXIT_LOST_RANK, -signal.SIGTERM}:
        return EXIT_LOST_RANK  # the node whose rank was lost says more
    print(f"bertrain: {here}: {describe_failure(codes)}", file=sys.stderr, flush=True)
    return EXIT_HUNG if EXIT_HUNG in codes.values() else 1


def rendezvous_host(job: Job) -> str:
    """The name by which the others know the first node: as asked for, as the list of hosts has it, or else its own."""
    listed = os.environ.get("BERTRAIN_FIRST_HOST", "") or (job.hosts[0].name if job.hosts else "")
    return job.spec.rendezvous_host or listed.rpartition("@")[2]


def start_folder() -> Path:
    """The folder of this start, made by the job's script."""
    if "BERTRAIN_START" not in os.environ:
        raise UserError("this is started by the script of a job: use bertrain launch")
    return Path(os.environ["BERTRAIN_START"])


def _listen() -> None:
    """Take signals as words from whoever is at the other end of a connection; its end is one too."""
    for line in sys.stdin:
        if line.strip() in ("USR1", "TERM", "INT"):
            os.kill(os.getpid(), signal.Signals[f"SIG{line.strip()}"])
    os.kill(os.getpid(), signal.SIGTERM)


def become_rank(job: Job, what: str) -> None:
    """Turn this process into a rank of the job; it does not return."""
    folder = start_folder()
    if job.launcher == "mpi":  # whatever a batch script around it has set
        os.environ |= ranks_of_mpi(os.environ) or {"RANK": ""}
    if not os.environ.get("RANK"):
        raise UserError("this process is no rank: neither torchrun nor mpirun started it")
    rank = int(os.environ["RANK"])
    if job.launcher == "mpi":
        spec = job.spec
        host, port = (
            call_together(folder, host=rendezvous_host(job), port=spec.port)
            if rank == 0
            else come_to(folder, rank, is_listening=False)
        )
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    for name in ("BERTRAIN_FAILED", "BERTRAIN_REPEAT"):
        if not os.environ.get(name):
            os.environ.pop(name, None)
    _write_also_to(folder / f"rank-{rank:05d}.log")
    words = ["launch", "preflight", str(job.folder)]
    if what == TRAINING:
        words = job.command(int(os.environ.get("BERTRAIN_REPEAT", "0")))
    os.execv(sys.executable, [sys.executable, "-u", "-m", "bertrain", *words])


def _write_also_to(path: Path) -> None:
    """Have all that this process says also written to a file, by a process that no signal to all of a job ends."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in OUTLASTED}
    try:
        tee = subprocess.Popen(["tee", "-a", str(path)], stdin=subprocess.PIPE)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert tee.stdin is not None
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)
    tee.stdin.close()
    tee.returncode = 0  # it outlives this program, which is about to become another
