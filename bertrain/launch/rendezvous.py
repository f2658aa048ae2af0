"""How the nodes of a job find each other: the first node publishes a host name and a port, the others read them.

The endpoint is a file in the folder of this start, on the file system that all nodes share.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.base.schema import load_json

ENDPOINT = "rendezvous.json"
TIMEOUT_S = 300


def node_and_count(environment: Mapping[str, str]) -> tuple[int, int]:
    """The index of this node and the number of nodes, as set by our launchers or by Slurm."""
    for index, count in (("BERTRAIN_NODE", "BERTRAIN_NODES"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if index in environment and count in environment:
            return int(environment[index]), int(environment[count])
    return 0, 1


def free_port(port: int = 0) -> int:
    """Return `port` (0: any) if nothing listens on it here; raises OSError if it is taken."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        return int(listener.getsockname()[1])


def publish_endpoint(folder: Path, *, host: str = "", port: int = 0) -> tuple[str, int]:
    """On the first node: choose the endpoint and write it into `folder`."""
    host = host or platform.node()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise UserError("unresolved-host", f"the first node cannot resolve {host!r}; give --rendezvous-host") from None
    try:
        port = free_port(port)
    except OSError as error:
        what = f"cannot listen on port {port} (--port) of {host}"
        raise UserError("port-in-use", f"{what}: {error.strerror}; choose another port") from None
    try:
        write_atomically(folder / ENDPOINT, json.dumps({"host": host, "port": port}))
    except OSError as error:
        failed = f"cannot write {folder / ENDPOINT}: {error.strerror}"
        raise UserError("cannot-write", f"{failed}; free some space, or change --job") from None
    return host, port


def wait_for_endpoint(
    folder: Path, node: int, timeout_s: float = TIMEOUT_S, *, is_listening: bool = True
) -> tuple[str, int]:
    """On every other node: wait for the endpoint and, if somebody is to listen on it, until it accepts connections."""
    deadline = time.monotonic() + timeout_s
    path = folder / ENDPOINT
    while not path.is_file():
        if time.monotonic() > deadline:
            waited = f"node {node} ({platform.node()}) waited {timeout_s:.0f} s for {path}"
            causes = "the first node did not start, or not all nodes share the file system of this folder (--job)"
            raise UserError("rendezvous-timeout", f"{waited}; {causes}")
        os.listdir(folder)  # makes a network file system refresh its cache
        time.sleep(0.1)
    endpoint = load_json(path, {"host": str, "port": int})
    host, port = endpoint["host"], endpoint["port"]
    if is_listening:
        _wait_for_listener(host, port, node, deadline)
    return host, port


def _wait_for_listener(host: str, port: int, node: int, deadline: float) -> None:
    here = f"node {node} ({platform.node()})"
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except socket.gaierror:
            cure = "name the first node with --rendezvous-host"
            raise UserError("unresolved-host", f"{here} cannot resolve {host!r}; {cure}") from None
        except OSError as error:
            if time.monotonic() > deadline:
                failed = f"{here} cannot reach the first node at {host}:{port}: {error.strerror or error}"
                causes = "it may have failed, or a firewall blocks the port (see --port)"
                raise UserError("unreachable-node", f"{failed}; {causes}") from None
        time.sleep(0.2)


TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""The same as Open MPI sets them, and Intel MPI and MPICH."""


def torchrun_variables_from_mpi(environment: Mapping[str, str], slots: Sequence[int] = ()) -> dict[str, str]:
    """torchrun's variables for a process that mpirun started; empty if it did not.

    `slots` are the ranks of each host, in order; without them, all hosts have equally many.
    """
    for names in MPI_VARIABLES:
        if all(name in environment for name in names):
            found = {ours: environment[theirs] for ours, theirs in zip(TORCHRUN_VARIABLES, names, strict=True)}
            rank = int(found["RANK"])
            node = bisect_right(list(accumulate(slots)), rank) if slots else rank // int(found["LOCAL_WORLD_SIZE"])
            return found | {"GROUP_RANK": str(node)}
    return {}
