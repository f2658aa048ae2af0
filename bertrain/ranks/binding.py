"""Binds each rank of a machine to cores: those next to its GPU, or an even share of all.

`read_topology` reads the machine; everything else is a function of the cores it found. Only processors that this
process may use are assigned, whatever gaps a cpuset leaves. Hyper-threads of a core stay together, and a rank spans two
NUMA nodes only if it must.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.base.machine import read_or_empty

T = TypeVar("T")
USABLE = "BERTRAIN_CPUS"  # the processors that the ranks of this machine share, set by their launcher


@dataclass(frozen=True)
class Core:
    """A physical core: its processors (hyper-threads) that may be used, and its NUMA node."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """The cores of one rank."""

    cores: tuple[Core, ...]
    is_shared: bool = False
    """Whether another rank has one of these cores too, because there are fewer cores than ranks."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    def describe(self) -> str:
        nodes = sorted({core.node for core in self.cores})
        where = f"NUMA node{'s' if len(nodes) > 1 else ''} {write_cpu_list(nodes)}"
        shared = ", shared with other ranks" if self.is_shared else ""
        return f"cpus {write_cpu_list(self.cpus)} ({counted(len(self.cores), 'core')}, {where}{shared})"


def parse_cpu_list(text: str) -> list[int]:
    """The numbers in a list as the kernel writes it, such as 0-3,8,10-11."""
    numbers: list[int] = []
    for part in text.strip().split(",") if text.strip() else []:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if found is None:
            raise ValueError(f"{text!r} is not a list of processors")
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return numbers


def write_cpu_list(numbers: Iterable[int]) -> str:
    """The reverse of `parse_cpu_list`, as short as it can be."""
    stretches: list[list[int]] = []
    for number in sorted(set(numbers)):
        if stretches and stretches[-1][1] == number - 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in stretches)


def read_topology(usable: Iterable[int], sys: Path = Path("/sys")) -> list[Core]:
    """The cores of this machine as far as they are `usable`, by NUMA node and then by their first processor."""
    usable = set(usable)
    node_of = {
        cpu: int(folder.name[4:])
        for folder in (sys / "devices/system/node").glob("node[0-9]*")
        for cpu in parse_cpu_list(read_or_empty(folder / "cpulist"))
    }
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(usable):
        listed = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = parse_cpu_list(read_or_empty(listed)) or [cpu]
        together = tuple(sorted(usable & {cpu, *siblings}))
        cores.setdefault(together, Core(node_of.get(cpu, 0), together))
    return sorted(cores.values(), key=lambda core: (core.node, core.cpus))


def node_of_pci_device(address: str, sys: Path = Path("/sys")) -> int | None:
    """The NUMA node that a device such as 0000:1b:00.0 is attached to; None if it is not known."""
    text = read_or_empty(sys / f"bus/pci/devices/{address.lower()}/numa_node").strip()
    return int(text) if text.isdigit() else None  # -1 if the kernel does not know


def assign_cores(cores: Sequence[Core], ranks: int, gpu_nodes: Sequence[int | None] = ()) -> list[Binding]:
    """The cores of each rank; `gpu_nodes` are the NUMA nodes of their GPUs, if they have any.

    A rank with a GPU gets cores of its GPU's node; if that has none or is not known, of the node with most to spare.
    Ranks without GPUs are spread so that the smallest share is as large as possible: a node of few cores may stay
    idle, because a rank on it would slow down all others.
    """
    if not cores:
        raise ValueError("there are no cores to assign")
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    if not gpu_nodes and ranks < len(by_node):
        return [Binding(tuple(chain(*nodes))) for nodes in _split(list(by_node.values()), ranks)]
    placed: dict[int, list[int]] = {node: [] for node in by_node}
    unplaced = []
    for rank in range(ranks):
        node = gpu_nodes[rank] if gpu_nodes else None
        if node in placed:
            placed[node].append(rank)
        else:
            unplaced.append(rank)
    for _ in unplaced:
        # the node on which one more rank leaves the most for each; of equals, the first
        roomiest = max(by_node, key=lambda node: (len(by_node[node]) / (len(placed[node]) + 1), -node))
        placed[roomiest].append(-1)
    # They take their places in order, so that neighboring ranks are neighbors on the machine.
    places = iter(unplaced)
    bindings: dict[int, Binding] = {}
    for node, on_node in placed.items():
        numbers = sorted(rank for rank in on_node if rank >= 0) + [next(places) for rank in on_node if rank < 0]
        for number, part in zip(numbers, _split(by_node[node], len(numbers)), strict=True):
            bindings[number] = Binding(tuple(part), is_shared=len(numbers) > len(by_node[node]))
    return [bindings[rank] for rank in range(ranks)]


def _split(items: list[T], parts: int) -> list[list[T]]:
    """Consecutive parts of even size, of cores or of whole nodes; with fewer items than parts, items are shared."""
    bounds = [(part * len(items) // parts, (part + 1) * len(items) // parts) for part in range(parts)]
    return [items[start : max(stop, start + 1)] for start, stop in bounds]


def usable_cpus() -> list[int]:
    """The processors that the ranks of this machine share: set by their launcher, or all that this process may use."""
    return parse_cpu_list(os.environ.get(USABLE, "")) or sorted(os.sched_getaffinity(0))


def bind(local_rank: int, local_world: int, gpu_nodes: Sequence[int | None] = ()) -> list[Binding]:
    """Bind this process, and the threads it will start, to its share of the cores; returns the shares of all ranks."""
    bindings = assign_cores(read_topology(usable_cpus()), local_world, gpu_nodes)
    own = bindings[local_rank]
    try:
        os.sched_setaffinity(0, own.cpus)
    except OSError as error:
        failed = f"cannot bind local rank {local_rank} to {own.describe()}: {error.strerror}"
        raise UserError("cannot-bind", f"{failed}; set --train.binding none") from None
    return bindings
