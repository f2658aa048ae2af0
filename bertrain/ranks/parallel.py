"""The ranks of a run: who they are, and the few things they say to each other.

Ranks are started by torchrun (or by `--nproc`, which uses it). Sums go over NCCL between GPUs and over gloo
between CPUs. A run that no launcher started is one rank, and never touches torch.distributed.
"""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bertrain.base.errors import AgreedError, LostRankError, ReportedElsewhereError, UserError
from bertrain.base.units import parse_duration
from bertrain.config.settings import TrainSettings
from bertrain.ranks.binding import Binding, bind, node_of_pci_device
from bertrain.ranks.watchdog import Heartbeat, Watchdog

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""The backends' own, which ends a wait in a traceback: the watchdog, which can name a rank, comes long before it."""
SAID = "bertrain/said"  # where a rank that ends in a sentence leaves word of it
BEGUN = "bertrain/begun"  # left in the store once all ranks are connected
REFUSED = "bertrain/refused"  # how many ranks have refused a store that was begun with


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """Where words of agreement go: always between CPUs, so that no GPU is waited for."""
    store: Store | None = None
    """Where ranks leave word for each other without waiting; kept by the launcher."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Where this rank is, for the watchdog."""
    bindings: Sequence[Binding] = ()
    """What the ranks of this machine keep to, in their order; empty where they keep to nothing."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of this machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def local_world(self) -> int:
        """How many ranks this machine has."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    @property
    def is_connected(self) -> bool:
        """Whether there is a process group; a single rank has one if torchrun started it."""
        return self.control is not None

    @property
    def _copies_through_host(self) -> bool:
        """Whether GPUs talk over gloo, which knows sums and broadcasts of their memory only."""
        return self.device.type == "cuda" and dist.get_backend() == "gloo"

    def sum(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all ranks. The order of addition depends on nothing but the ranks."""
        for tensor in tensors:
            if self.is_connected:
                dist.all_reduce(tensor)

    def begin_sum(self, tensor: Tensor) -> dist.Work:
        """Begin to replace a tensor by its sum over all ranks; it is done when the result was waited for."""
        return dist.all_reduce(tensor, async_op=True)

    def begin_sum_to(self, owner: int, tensor: Tensor) -> dist.Work:
        """Begin to replace a tensor by its sum on one rank; on the others it then means nothing."""
        if self._copies_through_host:
            return dist.all_reduce(tensor, async_op=True)
        return dist.reduce(tensor, owner, async_op=True)

    def all_gather_shards(self, flat: Tensor) -> None:
        """Give every rank the shards of all: rank r brings the r-th of equal parts of `flat`."""
        if not self.is_connected:
            return
        parts = flat.chunk(self.world)
        if self._copies_through_host:
            for owner, part in enumerate(parts):
                dist.broadcast(part, owner)
        else:
            _all_gather(flat, parts[self.rank])

    def gather(self, part: Tensor, into: Tensor | None) -> None:
        """Copy the parts of all ranks, one after another, `into` host memory of the first rank; the others bring none.

        It takes room for one part more on the device, and no more.
        """
        for owner in range(self.world):
            travelling = part.clone() if owner == self.rank else torch.empty_like(part)
            dist.broadcast(travelling, owner)
            if into is not None:
                into.chunk(self.world)[owner].copy_(travelling)

    def maximum(self, *tensors: Tensor) -> None:
        """Replace each tensor by its largest values over all ranks."""
        for tensor in tensors:
            if self.is_connected:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def all_max(self, value: int) -> int:
        """The largest `value` that any rank brought: how ranks agree on stopping. All ranks must call it."""
        if not self.is_connected:
            return value
        words = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.control)
        return int(words.item())

    def broadcast_int(self, value: int) -> int:
        """The first rank's `value`, on every rank; also a barrier, which no rank passes before the first."""
        return self.all_max(value if self.is_first else -1)


def choose_device(wish: str, local_rank: int = 0) -> tuple[torch.device, str]:
    """The device to compute on, and why."""
    if wish == "cpu":
        return torch.device("cpu"), "asked for"
    if torch.cuda.is_available():
        reason = "asked for" if wish == "cuda" else "there is a GPU"
        return torch.device("cuda", local_rank % torch.cuda.device_count()), reason
    if wish == "cuda":
        raise UserError("train.device is cuda, but torch sees no GPU here; use --train.device cpu")
    return torch.device("cpu"), "torch sees no GPU"


def gpu_nodes(local_world: int) -> list[int | None]:
    """The NUMA nodes of the GPUs of so many local ranks."""
    nodes = []
    for rank in range(local_world):
        facts: Any = torch.cuda.get_device_properties(rank % torch.cuda.device_count())
        nodes.append(
            node_of_pci_device(f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0")
        )
    return nodes


def choose_backend(wish: str, device: torch.device, local_world: int) -> str:
    """Who carries tensors between ranks; UserError where PyTorch, or a rank without a GPU of its own, cannot."""
    # NCCL wants a GPU for each rank; ranks that share one talk over gloo.
    has_own_gpu = device.type == "cuda" and local_world <= torch.cuda.device_count()
    if wish == "auto":
        return "nccl" if has_own_gpu else "gloo"
    if wish == "nccl" and not has_own_gpu:
        raise AgreedError("train.backend nccl needs a GPU for each rank; use --train.backend auto")
    if wish == "ccl":
        try:
            importlib.import_module("oneccl_bindings_for_pytorch")  # makes itself known to PyTorch
        except ImportError:
            raise AgreedError(
                "train.backend ccl needs the package oneccl_bindings_for_pytorch; use --train.backend gloo"
            ) from None
    if not dist.is_backend_available(wish):
        raise AgreedError(f"train.backend {wish}: this PyTorch was built without it; use --train.backend gloo")
    return wish


def count_ranks() -> int:
    """The ranks of this run, by its launcher's word."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def join(settings: TrainSettings) -> Iterator[Ranks]:
    """Take this process's place among the ranks; leave it at the end."""
    rank, world = int(os.environ.get("RANK", 0)), count_ranks()
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, _ = choose_device(settings.device, local_rank)
    bindings: list[Binding] = []
    if settings.binding == "auto":
        bindings = bind(local_rank, local_world, gpu_nodes(local_world) if device.type == "cuda" else ())
    cores = len(bindings[local_rank].cores) if bindings else len(os.sched_getaffinity(0)) // local_world
    torch.set_num_threads(settings.threads or max(1, cores))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _fresh_store() if "RANK" in os.environ else None
    heartbeat, seconds = Heartbeat(), parse_duration(settings.hang_timeout, "train.hang_timeout")
    watchdog = (
        Watchdog(heartbeat, settings.hang_timeout, seconds, rank=rank, world=world, store=store) if seconds else None
    )
    try:
        if store is None:
            yield Ranks(0, 1, device, heartbeat=heartbeat, bindings=bindings)
        else:
            with _connected(choose_backend(settings.backend, device, local_world), store, rank, world):
                control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
                store.set(BEGUN, "1")  # here every rank is connected with every other, so none has yet to look for it
                yield Ranks(rank, world, device, control, store, heartbeat, bindings)
    finally:
        if watchdog is not None:
            watchdog.stop()


_joined = itertools.count()
"""How often this process has joined the others: several runs, one after another, may share the ranks."""


def _fresh_store() -> Store:
    """The store of this start of the ranks; a part of it that nobody has written to, where they met before.

    torchrun's agent keeps one store through all of its restarts, and torch's own words of the ranks before, their
    addresses among them, are then taken for those of the new ones. Nobody would ever meet; so that is refused.
    """
    store: Store = next(rendezvous("env://"))[0]
    number = next(_joined)
    if number:
        return PrefixStore(f"bertrain/join-{number}", store)
    if store.check([BEGUN]):
        # Whoever looks first says it: at its end torchrun ends the others, who may not have come this far.
        if store.add(REFUSED, 1) > 1:
            raise ReportedElsewhereError("another rank has refused the store, and said why")
        raise UserError(
            "torchrun started these ranks with the store of ranks that are gone, over which they cannot meet; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or use --nproc and --restarts of bertrain"
        )
    return store


@contextmanager
def _connected(backend: str, store: Store, rank: int, world: int) -> Iterator[None]:
    """Connect the ranks; what ends one of them is told apart from what befalls the others in consequence."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
        yield
    except UserError:
        store.set(SAID, str(rank))  # before this rank's connections break, which the others will stumble over
        dist.destroy_process_group()
        raise
    except Exception as error:
        # The connections are left as they are: to end them in order may mean to wait for one who is gone.
        if _has_said(store):
            raise ReportedElsewhereError("another rank has ended, and said why") from error
        if lost := _broken_connection(error):
            raise LostRankError(f"rank {rank} on host {platform.node()} lost another rank: {lost}") from error
        raise
    else:
        dist.destroy_process_group()


def _broken_connection(error: Exception) -> str:
    """What gloo or NCCL say where another rank's end is what this one stumbled over; nothing for all else."""
    text = str(error)
    if isinstance(error, dist.DistNetworkError) or any(word in text for word in ("gloo/transport", "ncclRemoteError")):
        return re.sub(r"^\[\S*\] ", "", text.split("\n")[0]).split(". ")[0]
    return ""


def _has_said(store: Store) -> bool:
    """Whether a rank has left word that it ended in a sentence."""
    try:
        return store.check([SAID])
    except Exception:  # whoever keeps the store may be gone too; then nobody knows
        return False


# Newer versions of torch call it all_gather_single, and warn of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
