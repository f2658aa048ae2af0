"""Runs a stage of a job on several hosts over ssh: one connection each, which carries output back and signals there.

A node stops when its connection closes, so nothing is left behind if this process dies. When one host fails, the others
have time to save, and are then killed.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from bertrain.base.errors import EXIT_LOST_RANK, EXIT_REQUEUE, EXIT_USER_ERROR
from bertrain.launch.job import Host, Job, read_hostfile
from bertrain.launch.local import SAVE_TIMEOUT_S
from bertrain.launch.node import PREFLIGHT, SIGNALS_FROM_STDIN
from bertrain.launch.scripts import SAVE_MARGIN_S, container_command

SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4")
"""ssh asks no questions, and gives up on a host that does not answer for a minute."""
SENT_VARIABLES = ("BERTRAIN_START", "BERTRAIN_TASK", "BERTRAIN_FAILED")
SSH_FAILED = 255
NO_PYTHON = (126, 127)


class Connection:
    """The ssh process of one host."""

    def __init__(self, job: Job, stage: str, host: Host, node: int, hosts: Sequence[Host]) -> None:
        self.host = host
        is_local = host.name in ("localhost", platform.node(), platform.node().split(".")[0])
        ssh = [*shlex.split(job.spec.ssh), *(f"-o{option}" for option in SSH_OPTIONS), host.name]
        self.process = subprocess.Popen(
            [*(["bash", "-c"] if is_local else ssh), node_command(job, stage, host, node, hosts, is_local=is_local)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._print_output, daemon=True)
        self._reader.start()

    def _print_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stdout.buffer.write(b"[" + self.host.name.encode() + b"] " + line)
            sys.stdout.buffer.flush()

    def send_signal(self, name: str) -> None:
        """Send a signal's name to the node; does nothing if the connection is closed."""
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError, ValueError):
            stdin.write(f"{name}\n".encode())
            stdin.flush()

    def finish(self) -> None:
        """Print the rest of the output, after the process has ended."""
        self._reader.join(timeout=5)

    def report_lost(self) -> None:
        self.finish()
        problem = "could not start Python; does every host have --python, and with --container, apptainer?"
        if self.process.returncode == SSH_FAILED:
            problem = "could not be reached over ssh, or was lost"
        known = f"exit code {self.process.returncode}; see the line above"
        print(f"bertrain: host {self.host.name} {problem} ({known})", file=sys.stderr, flush=True)


def node_command(job: Job, stage: str, host: Host, node: int, hosts: Sequence[Host], *, is_local: bool = False) -> str:
    """The shell command that runs a stage on a host; this process is in the job's container already, if it has one."""
    variables = {name: os.environ[name] for name in SENT_VARIABLES if os.environ.get(name)} | job.environment
    variables |= {
        "BERTRAIN_NODE": str(node),
        "BERTRAIN_NODES": str(len(hosts)),
        "BERTRAIN_SLOTS": str(host.slots),
        "BERTRAIN_FIRST_HOST": hosts[0].name,
        SIGNALS_FROM_STDIN: "1",
    }
    pairs = [shlex.quote(f"{name}={value}") for name, value in variables.items()]
    module = [shlex.quote(job.python), "-u -m bertrain launch worker node", shlex.quote(str(job.folder)), stage]
    return " ".join(["exec env", *pairs, *([] if is_local else container_command(job)), *module])


def run_hosts(job: Job, stage: str) -> int:
    """Run a stage on every host and wait for it; returns one exit code for all."""
    hosts = read_hostfile(Path(os.environ["BERTRAIN_HOSTS"]), job.spec.ranks_per_node, job.spec.nodes)
    connections: list[Connection] = []

    def forward_signal(number: int, frame: FrameType | None) -> None:
        for connection in connections:
            connection.send_signal(signal.Signals(number).name.removeprefix("SIG"))

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward_signal)
    connections += [Connection(job, stage, host, node, hosts) for node, host in enumerate(hosts)]
    codes = _wait(connections)
    for connection in connections:
        connection.finish()
    return combine_exit_codes(codes, stage)


def _wait(connections: list[Connection]) -> list[int]:
    """Wait for all hosts and return their exit codes; after one fails, the others have as long as saving may take."""
    deadline = None
    ended: set[int] = set()
    while len(ended) < len(connections):
        time.sleep(0.1)
        for node, connection in enumerate(connections):
            code = connection.process.poll()
            if code is None or node in ended:
                continue
            ended.add(node)
            if code and deadline is None:
                deadline = time.monotonic() + SAVE_TIMEOUT_S + SAVE_MARGIN_S
            if code in (SSH_FAILED, *NO_PYTHON):
                connection.report_lost()
                for other in connections:
                    other.send_signal("TERM")
        if deadline is not None and time.monotonic() > deadline:
            for connection in connections:
                connection.process.kill()
    return [connection.process.returncode for connection in connections]


def combine_exit_codes(codes: list[int], stage: str) -> int:
    """One exit code for all hosts: a user error first, then a failure, then a requeue.

    A host that cannot be reached for the pre-flight is a user error; one that is lost later is a failure.
    """
    if any(code in (EXIT_USER_ERROR, *NO_PYTHON) for code in codes):
        return EXIT_USER_ERROR
    if SSH_FAILED in codes:
        return EXIT_USER_ERROR if stage == PREFLIGHT else 1
    failed = [code for code in codes if code not in (0, EXIT_REQUEUE, EXIT_LOST_RANK)]
    if failed:
        return max((code if code > 0 else 128 - code) for code in failed)
    return max(codes)
