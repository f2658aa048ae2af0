"""How long ranks take to exchange gradients and weights: latency and bandwidth of rings, trees and hierarchies.

A collective over p devices in n machines of g: a *ring* passes every byte round all devices, a *tree* up and down
log2(n) machines, and a *hierarchy* sums within each machine, then between machines, each device its own part. All move
the same bytes over the slowest link; they differ in hops. NCCL takes the fastest, and so does `all_reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bertrain.planning.devices import LINK_SHARE, Network


@dataclass(frozen=True)
class Group:
    """Devices that exchange: `nodes` machines of `per_node` devices each."""

    nodes: int
    per_node: int
    network: Network

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def inside(self) -> float:
        """Bytes per second between devices of a machine."""
        return LINK_SHARE * self.network.inside

    @property
    def between(self) -> float:
        """Bytes per second of a whole machine to the others."""
        return LINK_SHARE * self.network.between

    @property
    def slowest(self) -> float:
        """Bytes per second of a ring or tree over all devices."""
        return self.inside if self.nodes == 1 else min(self.inside, self.between) if self.per_node > 1 else self.between

    @property
    def machine(self) -> Group:
        """The devices of one machine."""
        return Group(1, self.per_node, self.network)


def ring_hops_s(group: Group) -> float:
    """Seconds of one pass round the ring, empty-handed: nearly all hops are inside a machine."""
    between = group.nodes if group.nodes > 1 else 0
    inside = max(0, group.size - 1 - between)
    return inside * group.network.inside_hop_s + between * group.network.between_hop_s


def ring_all_reduce(size: float, group: Group) -> float:
    """Each device sends 2 (p - 1) / p of the bytes, in twice p - 1 hops."""
    return 2 * (size * (group.size - 1) / group.size / group.slowest + ring_hops_s(group))


def tree_all_reduce(size: float, group: Group) -> float:
    """Up and down: a chain inside each machine, a binary tree between machines."""
    depth = math.ceil(math.log2(group.nodes))
    inside = (group.per_node - 1) * group.network.inside_hop_s
    return 2 * (size / group.slowest + inside + depth * group.network.between_hop_s)


def hierarchical_all_reduce(size: float, group: Group) -> float:
    """Reduce-scatter inside each machine, all-reduce of each part between machines, all-gather inside."""
    if group.nodes == 1 or group.per_node == 1:
        return ring_all_reduce(size, group)
    share, nodes = size / group.per_node, group.nodes
    bandwidth = group.between / group.per_node
    ring = 2 * (share * (nodes - 1) / nodes / bandwidth + nodes * group.network.between_hop_s)
    tree = 2 * (share / bandwidth + math.ceil(math.log2(nodes)) * group.network.between_hop_s)
    return 2 * gather(size, group.machine) + min(ring, tree)


def all_reduce(size: float, group: Group) -> float:
    """The fastest algorithm's time for `size` bytes."""
    if group.size == 1:
        return 0.0
    return min(algorithm(size, group) for algorithm in (ring_all_reduce, tree_all_reduce, hierarchical_all_reduce))


def gather(size: float, group: Group) -> float:
    """All-gather of `size` bytes, of which each device has a part; a reduce-scatter takes as long."""
    if group.size == 1:
        return 0.0
    return size * (group.size - 1) / group.size / group.slowest + ring_hops_s(group)


def finish_exchange(ready_s: Sequence[float], each_s: float) -> float:
    """When the last of several buckets has been exchanged, one after another, each not before it is ready."""
    end = 0.0
    for ready in ready_s:
        end = max(end, ready) + each_s
    return end
