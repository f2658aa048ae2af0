"""What one rank can say of its machine before a job trains: versions, processes, memory, disk, devices, network."""

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

from bertrain.base.machine import Gpu

BUSY_SHARE = 0.2
"""Of a core: a process that takes this much of one is no bystander."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank found."""

    rank: int
    node: int
    host: str
    is_first_of_node: bool
    versions: dict[str, str]
    clock: float = 0.0
    memory_free: int = 0
    disk_free: int = 0
    run_place: str = ""
    """Where the run will be written, or why it cannot be."""
    can_write: bool = True
    data: str = ""
    """The fingerprints of the data to train on and to evaluate on, as this node sees them."""
    data_problem: str = ""
    gpus_seen: int = 0
    gpus: tuple[Gpu, ...] = ()
    on_gpus: tuple[str, ...] = ()
    """Processes of others on the GPUs."""
    foreign: tuple[str, ...] = ()
    """Processes of others that take a good part of a core."""
    network: str = ""
    is_loopback: bool = False
    """Whether this machine's name means itself only, to itself."""
    binding: str = ""


def versions(code: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on all nodes."""
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
    """Bytes free where a folder is or will be, that place, and whether we may write there."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return shutil.disk_usage(place).free, str(place), os.access(place, os.W_OK | os.X_OK)
    except OSError as error:
        return 0, f"{place}: {error.strerror}", False


def foreign_processes(own: set[int], interval_s: float = 0.5) -> tuple[str, ...]:
    """Processes that are not among `own` and take a good part of a core: name, number and share."""
    ticks = os.sysconf("SC_CLK_TCK")
    before, began = _work_of_all(), time.monotonic()
    time.sleep(interval_s)
    after, passed = _work_of_all(), time.monotonic() - began
    found = []
    for process, (name, work) in after.items():
        share = (work - before.get(process, (name, work))[1]) / ticks / passed
        if share >= BUSY_SHARE and process not in own:
            found.append((share, f"{name} ({process}, {share:.0%} of a core)"))
    return tuple(text for _, text in sorted(found, reverse=True))


def _work_of_all() -> dict[int, tuple[str, int]]:
    """Name and work (user and system, in ticks) of each process."""
    found = {}
    for process, (name, fields) in _stat_of_all().items():
        found[process] = name, int(fields[11]) + int(fields[12])
    return found


def _stat_of_all() -> dict[int, tuple[str, list[str]]]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                before, _, after = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue  # it has just ended
            found[int(entry.name)] = before.partition("(")[2], after.split()
    return found


def own_processes(generations: int = 2) -> set[int]:
    """This rank, the agent that started it, whoever started that, and all below them: the job on this machine."""
    stat = _stat_of_all()
    parent = {process: int(fields[1]) for process, (_, fields) in stat.items()}
    top = os.getpid()
    for _ in range(generations):
        if parent.get(top, 0) > 1:
            top = parent[top]
    own, grows = {top}, True
    while grows:
        grown = own | {process for process, above in parent.items() if above in own}
        grows, own = grown != own, grown
    return own


# --- network --------------------------------------------------------------------------------------


def describe_network(towards: str, sys: Path = Path("/sys")) -> str:
    """The interface that leads to a host, its speed, InfiniBand devices, and what was asked of gloo and NCCL."""
    address = _own_address(towards)
    name = _interface_of(address)
    speed = _text(sys / f"class/net/{name}/speed") if name else ""
    words = [f"{name or 'an unknown interface'} ({address or 'no address'}"]
    words[0] += f", {int(speed):,} Mbit/s)" if speed.isdigit() else ")"
    for device in sorted((sys / "class/infiniband").glob("*")):
        rate, state = (_text(device / f"ports/1/{what}") for what in ("rate", "state"))
        words.append(f"{device.name} {rate} {state.partition(': ')[2] or state}".strip())
    asked = [f"{name}={os.environ[name]}" for name in ASKED if os.environ.get(name)]
    words.append(" ".join(asked) if asked else "gloo and NCCL choose for themselves")
    return "; ".join(words)


ASKED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")


def _own_address(towards: str) -> str:
    """The address that packets to a host would leave from; none are sent."""
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


SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    """Whether a name leads back to this very machine, and would lead any other to itself."""
    try:
        return all(str(found[4][0]).startswith(("127.", "::1")) for found in socket.getaddrinfo(host, None))
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
