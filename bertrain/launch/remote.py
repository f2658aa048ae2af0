"""A step on several hosts over ssh: one connection for each, through which output comes and signals go as words.

When this process ends, however it does, the connections end, and with them the nodes. When one host ends, the others
have time to save, and are then ended.
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
from pathlib import Path
from types import FrameType
from typing import IO

from bertrain.base.errors import EXIT_LOST_RANK, EXIT_REQUEUE, EXIT_USER_ERROR
from bertrain.launch.job import Host, Job, read_hostfile
from bertrain.launch.local import SAVING_S
from bertrain.launch.node import PREFLIGHT
from bertrain.launch.scripts import AFTER_SAVING_S, in_container

SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4")
"""No question is asked that nobody could answer; a host that does not answer for a minute is lost."""
HANDED_OVER = ("BERTRAIN_START", "BERTRAIN_REPEAT", "BERTRAIN_FAILED")
NO_CONNECTION = 255
NO_PYTHON = (126, 127)


class Connection:
    """One host at work."""

    def __init__(self, job: Job, what: str, host: Host, number: int, hosts: Sequence[Host]) -> None:
        self.host = host
        words = node_command(job, what, host, number, hosts)
        is_here = host.name in ("localhost", platform.node(), platform.node().split(".")[0])
        over = ["bash", "-c"] if is_here else [*ssh_words(job.spec.ssh), host.name]
        self.process = subprocess.Popen(
            [*over, words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stdout.buffer.write(b"[" + self.host.name.encode() + b"] " + line)
            sys.stdout.buffer.flush()

    def tell(self, word: str) -> None:
        """Send a signal's name; a host that is gone hears nothing."""
        stdin: IO[bytes] | None = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{word}\n".encode())
            stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def finish(self) -> None:
        """Have all that it said, once it has ended."""
        self._reader.join(timeout=5)


def ssh_words(ssh: str) -> list[str]:
    """How ssh is called, up to the name of a host."""
    return shlex.split(ssh) + [word for option in SSH_OPTIONS for word in ("-o", option)]


def node_command(job: Job, what: str, host: Host, number: int, hosts: Sequence[Host]) -> str:
    """What is typed on a host."""
    variables = {name: os.environ[name] for name in HANDED_OVER if os.environ.get(name)} | job.environment
    variables |= {
        "BERTRAIN_NODE": str(number),
        "BERTRAIN_NODES": str(len(hosts)),
        "BERTRAIN_SLOTS": str(host.slots),
        "BERTRAIN_FIRST_HOST": hosts[0].name,
        "BERTRAIN_WORDS": "stdin",
    }
    pairs = [shlex.quote(f"{name}={value}") for name, value in variables.items()]
    module = [shlex.quote(job.python), "-u -m bertrain.launch node", shlex.quote(str(job.folder)), what]
    return " ".join(["exec env", *pairs, *in_container(job), *module])


def run_hosts(job: Job, what: str) -> int:
    """Run a step on every host of the list and wait for it; the exit code of the whole."""
    hosts = read_hostfile(Path(os.environ["BERTRAIN_HOSTS"]), job.spec.ranks_per_node, job.spec.nodes)
    connections: list[Connection] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for connection in connections:
            connection.tell(signal.Signals(number).name.removeprefix("SIG"))

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    for place, host in enumerate(hosts):
        connections.append(Connection(job, what, host, place, hosts))
    codes = _wait(connections)
    for connection in connections:
        connection.finish()
    return worst(codes, what)


def _wait(connections: list[Connection]) -> list[int]:
    """The exit codes of all; once one has ended badly, the others have the time that saving takes."""
    deadline = None
    noticed: set[int] = set()
    while len(noticed) < len(connections):
        time.sleep(0.1)
        for number, connection in enumerate(connections):
            code = connection.process.poll()
            if code is None or number in noticed:
                continue
            noticed.add(number)
            if code and deadline is None:
                deadline = time.monotonic() + SAVING_S + AFTER_SAVING_S
            if code in (NO_CONNECTION, *NO_PYTHON):
                _say_lost(connection)
                for other in connections:
                    other.tell("TERM")
        if deadline is not None and time.monotonic() > deadline:
            for connection in connections:
                connection.process.kill()
    return [connection.process.returncode for connection in connections]


def _say_lost(connection: Connection) -> None:
    connection.finish()
    name, code = connection.host.name, connection.process.returncode
    what = (
        "could not be reached over ssh, or was lost"
        if code == NO_CONNECTION
        else "could not start Python; is --python there on every host?"
    )
    print(f"bertrain: host {name} {what} (exit code {code}; the line above says why)", file=sys.stderr, flush=True)


def worst(codes: list[int], what: str) -> int:
    """One exit code for all hosts: what a user has to mend comes first, then a failure, then a requeue.

    A host that cannot be reached is the user's to mend; one that was lost on the way is a failure.
    """
    if any(code in (EXIT_USER_ERROR, *NO_PYTHON) for code in codes):
        return EXIT_USER_ERROR
    if NO_CONNECTION in codes:
        return EXIT_USER_ERROR if what == PREFLIGHT else 1
    failed = [code for code in codes if code not in (0, EXIT_REQUEUE, EXIT_LOST_RANK)]
    if failed:
        return max((code if code > 0 else 128 - code) for code in failed)
    return max(codes)
