"""Where the nodes of a job meet: the first one chooses a host name and a free port, and the others read of it.

Word of it is left in the folder of the start, on the file system that all nodes see anyway. A name that does not
resolve, a port that is taken or refused, and a first node that never comes each end in a sentence.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.launch.local import MEETING_S

WORD = "meeting.json"


@dataclass(frozen=True)
class Meeting:
    """One node's way to the others."""

    host: str
    port: int
    node: int
    nodes: int
    name: str
    """Of this start, so that nobody joins another one."""


def find_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """The number of this node and how many there are, by our own launchers' word or by Slurm's."""
    for number, count in (("BERTRAIN_NODE", "BERTRAIN_NODES"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if number in environment and count in environment:
            return int(environment[number]), int(environment[count])
    return 0, 1


def free_port(wish: int = 0) -> int:
    """A port that nobody listens on here: `wish`, or any. Raises OSError if the wish is taken."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", wish))
        return int(probe.getsockname()[1])


def call_together(folder: Path, *, host: str = "", port: int = 0) -> tuple[str, int]:
    """On the first node: choose where to meet, and leave word of it in `folder`."""
    host = host or platform.node()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise UserError(
            f"the first node is called {host!r}, which it cannot resolve itself; name it with --rendezvous-host"
        ) from None
    try:
        port = free_port(port)
    except OSError as error:
        raise UserError(
            f"port {port} (--port) of {host} cannot be listened on: {error.strerror}; choose another, or leave it out"
        ) from None
    try:
        write_atomically(folder / WORD, json.dumps({"host": host, "port": port}))
    except OSError as error:
        raise UserError(
            f"could not write {folder / WORD}: {error.strerror}; make room, or choose another --job"
        ) from None
    return host, port


def come_to(folder: Path, node: int, timeout_s: float = MEETING_S, *, is_listening: bool = True) -> tuple[str, int]:
    """On any other node: wait for the first one's word, and, if it is listening at all, until it can be reached."""
    deadline = time.monotonic() + timeout_s
    path = folder / WORD
    while not path.is_file():
        if time.monotonic() > deadline:
            raise UserError(
                f"node {node} ({platform.node()}) waited {timeout_s:.0f} s for the first node to leave word in {path}; "
                "it did not start, or the folder is not on a file system that all nodes see (--job)"
            )
        os.listdir(folder)  # has a network file system look again
        time.sleep(0.1)
    word = json.loads(path.read_text())
    host, port = str(word["host"]), int(word["port"])
    if is_listening:
        _wait_for_listener(host, port, node, deadline)
    return host, port


def _wait_for_listener(host: str, port: int, node: int, deadline: float) -> None:
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except socket.gaierror:
            raise UserError(
                f"node {node} ({platform.node()}) cannot resolve {host!r}, the name of the first node; give one that "
                "all nodes know with --rendezvous-host"
            ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"node {node} ({platform.node()}) cannot reach the first node at {host}:{port}: "
                    f"{error.strerror or error}; it may have failed, or a firewall keeps the port (--port chooses one)"
                ) from None
        time.sleep(0.2)


def meet(folder: Path, place: tuple[int, int], *, host: str = "", port: int = 0) -> Meeting:
    """Find the other nodes of this start."""
    node, nodes = place
    host, port = call_together(folder, host=host, port=port) if node == 0 else come_to(folder, node)
    return Meeting(host, port, node, nodes, folder.name)


MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""What Open MPI, and Intel MPI and MPICH, tell a process of itself."""


def ranks_of_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's words for a process that mpirun started; nothing if it did not."""
    for names in MPI_NAMES:
        if all(name in environment for name in names):
            ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            found = {our: environment[theirs] for our, theirs in zip(ours, names, strict=True)}
            return found | {"GROUP_RANK": str(int(found["RANK"]) // int(found["LOCAL_WORLD_SIZE"]))}
    return {}
