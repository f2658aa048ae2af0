"""Facts about a machine, collected by each rank before training: versions, processes, memory, disk, GPUs, network."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bertrain.base.files import existing_parent
from bertrain.base.machine import Gpu, read_or_empty

BUSY_SHARE = 0.2
"""Of a core: a process that uses more counts as busy."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that one rank collected."""

    rank: int
    node: int
    host: str
    is_first_of_node: bool
    versions: dict[str, str]
    clock: float = 0.0
    memory_free: int = 0
    disk_free: int = 0
    run_place: str = ""
    """The folder that the run is written into, or why it cannot be."""
    can_write: bool = True
    data: str = ""
    """The fingerprints of the training and evaluation data on this node."""
    data_problem: str = ""
    gpus_seen: int = 0
    gpus: tuple[Gpu, ...] = ()
    on_gpus: tuple[str, ...] = ()
    """Processes on the GPUs that do not belong to the job."""
    foreign: tuple[str, ...] = ()
    """Busy processes that do not belong to the job."""
    network: str = ""
    is_loopback: bool = False
    """Whether this machine resolves its own name to a loopback address."""
    binding: str = ""


def versions(code: Mapping[str, str]) -> dict[str, str]:
    """The versions that must be the same on all nodes."""
    import numpy
    import torch

    return {
        "bertrain": f"{code['version']} (files {code['files'][:12]})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "byte order": sys.byteorder,
    }


def disk_free(folder: Path) -> tuple[int, str, bool]:
    """Bytes free where a folder is or will be, its closest existing parent, and whether we may write there."""
    place = existing_parent(folder)
    try:
        return shutil.disk_usage(place).free, str(place), os.access(place, os.W_OK | os.X_OK)
    except OSError as error:
        return 0, f"{place}: {error.strerror}", False


def foreign_processes(own: set[int], interval_s: float = 0.5) -> tuple[str, ...]:
    """Busy processes that are not among `own`, the busiest first: name, number and share of a core."""
    ticks = os.sysconf("SC_CLK_TCK")
    before, began = _processes(), time.monotonic()
    time.sleep(interval_s)
    after, passed = _processes(), time.monotonic() - began
    found = []
    for number, process in after.items():
        share = (process.ticks - before.get(number, process).ticks) / ticks / passed
        if share >= BUSY_SHARE and number not in own:
            found.append((share, f"{process.name} ({number}, {share:.0%} of a core)"))
    return tuple(text for _, text in sorted(found, reverse=True))


class Process(NamedTuple):
    """A line of /proc/PID/stat."""

    name: str
    parent: int
    ticks: int
    """Of processor time, user and system."""


def _processes() -> dict[int, Process]:
    """Every process of this machine by its number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                before, _, after = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue  # it has just ended
            words, name = after.split(), before.partition("(")[2]
            found[int(entry.name)] = Process(name, int(words[1]), int(words[11]) + int(words[12]))
    return found


def own_processes(generations: int = 2) -> set[int]:
    """The processes of the job on this machine: this rank's parent and grandparent, and all their descendants."""
    parents = {number: process.parent for number, process in _processes().items()}
    top = os.getpid()
    for _ in range(generations):
        if parents.get(top, 0) > 1:
            top = parents[top]
    own: set[int] = set()
    added = {top}
    while added:
        own |= added
        added = {number for number, parent in parents.items() if parent in own} - own
    return own


SIOCGIFADDR = 0x8915  # the ioctl that returns an interface's address
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")


def describe_network(towards: str, sys: Path = Path("/sys")) -> str:
    """The interface that leads to a host, its speed, InfiniBand devices, and the variables that gloo and NCCL read."""
    address = _own_address(towards)
    name = _interface_of(address)
    speed = read_or_empty(sys / f"class/net/{name}/speed").strip() if name else ""
    speed = f", {int(speed):,} Mbit/s" if speed.isdigit() else ""
    parts = [f"{name or 'an unknown interface'} ({address or 'no address'}{speed})"]
    for device in sorted((sys / "class/infiniband").glob("*")):
        rate, state = (read_or_empty(device / f"ports/1/{file}").strip() for file in ("rate", "state"))
        parts.append(f"{device.name} {rate} {state.partition(': ')[2] or state}".strip())
    chosen = [f"{name}={os.environ[name]}" for name in NETWORK_VARIABLES if os.environ.get(name)]
    parts.append(" ".join(chosen) or "gloo and NCCL choose for themselves")
    return "; ".join(parts)


def _own_address(towards: str) -> str:
    """The local address of packets to a host; sends none."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    import fcntl

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return "lo" if address.startswith("127.") or address == "::1" else ""


def is_loopback(host: str) -> bool:
    try:
        return all(str(found[4][0]).startswith(("127.", "::1")) for found in socket.getaddrinfo(host, None))
    except OSError:
        return False
