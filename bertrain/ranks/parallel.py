"""The ranks of a run and their collectives.

torchrun (or `--nproc`, which uses it) starts the ranks. GPUs communicate over NCCL, CPUs over gloo. A run that no
launcher started is one rank, and never touches torch.distributed.
"""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
"""Of the backends, which raise a traceback. The watchdog, which names the rank, acts long before."""
REPORTED = "bertrain/reported"  # how many ranks have raised a UserError
BEGUN = "bertrain/begun"  # set once all ranks are connected
REFUSED = "bertrain/refused"  # how many ranks have refused a store that was used before


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """The process group for agreements: always between CPUs, so that no GPU is waited for."""
    store: Store | None = None
    """The launcher's key-value store, through which ranks exchange messages without waiting."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """The position of this rank, for the watchdog."""
    bindings: Sequence[Binding] = ()
    """The cores of each rank of this machine, in order; empty if they are not bound."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def local_world(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    @property
    def is_connected(self) -> bool:
        """Whether there is a process group; a single rank has one if torchrun started it."""
        return self.control is not None

    @property
    def copies_through_host(self) -> bool:
        """Whether GPUs communicate over gloo, which has only all-reduce and broadcast for them."""
        return self.device.type == "cuda" and self.is_connected and dist.get_backend() == "gloo"

    def all_reduce_sum(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all ranks. The order of addition depends on nothing but the ranks."""
        for tensor in tensors:
            if self.is_connected:
                dist.all_reduce(tensor)

    def start_reduce(self, tensor: Tensor, owner: int | None = None) -> dist.Work:
        """Start to replace a tensor by its sum, on all ranks or on `owner`: undefined on the others; wait for it."""
        if owner is None or self.copies_through_host:
            return dist.all_reduce(tensor, async_op=True)
        return dist.reduce(tensor, owner, async_op=True)

    def all_gather_shards(self, flat: Tensor) -> None:
        """Give every rank all shards: rank r contributes the r-th of equal parts of `flat`."""
        if not self.is_connected:
            return
        parts = flat.chunk(self.world)
        if self.copies_through_host:
            for owner, part in enumerate(parts):
                dist.broadcast(part, owner)
        else:
            all_gather_flat(flat, parts[self.rank])

    def gather(self, part: Tensor, into: Tensor | None) -> None:
        """Copy the parts of all ranks `into` host memory of the first rank; needs memory for one part on the device."""
        for owner in range(self.world):
            travelling = part.clone() if owner == self.rank else torch.empty_like(part)
            dist.broadcast(travelling, owner)
            if into is not None:
                into.chunk(self.world)[owner].copy_(travelling)

    def all_reduce_max(self, *tensors: Tensor) -> None:
        """Replace each tensor by its largest values over all ranks."""
        for tensor in tensors:
            if self.is_connected:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def all_max(self, value: int) -> int:
        """The largest `value` of all ranks: how they agree on stopping. All ranks must call it."""
        if not self.is_connected:
            return value
        largest = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control)
        return int(largest.item())

    def all_gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in order, without waiting for a GPU. All ranks must call it."""
        rows = torch.zeros(self.world, len(row), dtype=torch.float64)
        rows[self.rank] = torch.tensor(row)
        dist.all_reduce(rows, group=self.control)
        return rows.tolist()

    def broadcast_int(self, value: int) -> int:
        """The first rank's `value` (at least -1), on every rank; also a barrier for all ranks."""
        return self.all_max(value if self.is_first else -1)


def choose_device(wish: str, local_rank: int = 0) -> tuple[torch.device, str]:
    """The device to compute on, and why."""
    if wish == "cpu":
        return torch.device("cpu"), "asked for"
    if torch.cuda.is_available():
        reason = "asked for" if wish == "cuda" else "there is a GPU"
        return torch.device("cuda", local_rank % torch.cuda.device_count()), reason
    if wish == "cuda":
        raise UserError("no-gpu", "train.device is cuda, but torch sees no GPU here; use --train.device cpu")
    return torch.device("cpu"), "torch sees no GPU"


def gpu_nodes(local_world: int) -> list[int | None]:
    nodes = []
    for rank in range(local_world):
        gpu: Any = torch.cuda.get_device_properties(rank % torch.cuda.device_count())
        nodes.append(node_of_pci_device(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"))
    return nodes


def choose_backend(wish: str, device: torch.device, local_world: int) -> str:
    """The backend of torch.distributed; UserError if it is not available, or needs a GPU for each rank."""
    # NCCL needs a GPU for each rank; ranks that share one communicate over gloo.
    has_own_gpu = device.type == "cuda" and local_world <= torch.cuda.device_count()
    if wish == "auto":
        return "nccl" if has_own_gpu else "gloo"
    if wish == "nccl" and not has_own_gpu:
        raise AgreedError("no-backend", "train.backend nccl needs a GPU for each rank; use --train.backend auto")
    if wish == "ccl":
        try:
            importlib.import_module("oneccl_bindings_for_pytorch")  # registers itself with PyTorch
        except ImportError:
            needs = "train.backend ccl needs the package oneccl_bindings_for_pytorch"
            raise AgreedError("no-backend", f"{needs}; use --train.backend gloo") from None
    if not dist.is_backend_available(wish):
        raise AgreedError("no-backend", f"this PyTorch has no train.backend {wish}; use --train.backend gloo")
    return wish


def count_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def join(settings: TrainSettings) -> Iterator[Ranks]:
    """Connect this process with the other ranks, bind it to its cores, and watch that it moves; undo it at the end."""
    rank, world = int(os.environ.get("RANK", 0)), count_ranks()
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device, _ = choose_device(settings.device, local_rank)
    bindings: list[Binding] = []
    unbound = os.sched_getaffinity(0)
    if settings.binding == "auto":
        bindings = bind(local_rank, local_world, gpu_nodes(local_world) if device.type == "cuda" else ())
    cores = len(bindings[local_rank].cores) if bindings else len(os.sched_getaffinity(0)) // local_world
    torch.set_num_threads(settings.threads or max(1, cores))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _fresh_store() if "RANK" in os.environ else None
    heartbeat, seconds = Heartbeat(), parse_duration(settings.hang_timeout, "train.hang_timeout")
    watchdog = Watchdog(heartbeat, settings.hang_timeout, seconds, rank, world, store) if seconds else None
    try:
        if store is None:
            yield Ranks(0, 1, device, heartbeat=heartbeat, bindings=bindings)
        else:
            with _connected(choose_backend(settings.backend, device, local_world), store, rank, world):
                control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
                store.set(BEGUN, "1")  # all ranks are connected here, so none has yet to check it
                yield Ranks(rank, world, device, control, store, heartbeat, bindings)
    finally:
        if watchdog is not None:
            watchdog.stop()
        with suppress(OSError):  # meanwhile these cores were taken from the process
            os.sched_setaffinity(0, unbound)  # or the next join would take a share of this share


_joined = itertools.count()  # joins of this process: several runs may follow each other on the same ranks


def _fresh_store() -> Store:
    """The store of this start of the ranks; after the first join, an unused part of it.

    torchrun's agent keeps one store through all of its restarts. It still holds the addresses of the ranks before,
    which the new ones would try to connect to forever; so that is refused.
    """
    store: Store = next(rendezvous("env://"))[0]
    number = next(_joined)
    if number:
        return PrefixStore(f"bertrain/join-{number}", store)
    if store.check([BEGUN]):
        # The first rank to look reports it: when it ends, torchrun ends the others, which may not be here yet.
        if store.add(REFUSED, 1) > 1:
            raise ReportedElsewhereError(
                "reported-elsewhere", "another rank has refused the store and printed the reason"
            )
        why = "torchrun restarted these ranks with the store of earlier ranks, through which they cannot connect"
        cure = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or use bertrain's --nproc and --restarts"
        raise UserError("used-store", f"{why}; {cure}")
    return store


@contextmanager
def _connected(backend: str, store: Store, rank: int, world: int) -> Iterator[None]:
    """Connect the ranks. An error of one rank is told apart from the broken connections of the others.

    Ranks that find the same UserError print it once: only the first of them to arrive here raises it.
    """
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
        yield
    except UserError as error:
        num_reports = 0
        with suppress(dist.DistNetworkError):  # the launcher keeps the store, and may be gone
            num_reports = store.add(REPORTED, 1)  # before this rank's connections break, which the others will notice
        dist.destroy_process_group()
        if num_reports > 1 and not isinstance(error, AgreedError):  # the first rank prints AgreedErrors itself
            raise ReportedElsewhereError("reported-elsewhere", "another rank has printed why it ended") from error
        raise
    except Exception as error:
        # The connections stay open: closing them in order may mean to wait for a rank that is gone.
        is_reported = False
        with suppress(Exception):  # the process that keeps the store may be gone too
            is_reported = store.check([REPORTED])
        if is_reported:
            raise ReportedElsewhereError("reported-elsewhere", "another rank has printed why it ended") from error
        if lost := _broken_connection(error):
            raise LostRankError(f"rank {rank} on host {platform.node()} lost another rank: {lost}") from error
        raise
    else:
        dist.destroy_process_group()


def _broken_connection(error: Exception) -> str:
    """The message of gloo or NCCL if a connection broke because another rank ended; empty for other errors."""
    text = str(error)
    if isinstance(error, dist.DistNetworkError) or any(word in text for word in ("gloo/transport", "ncclRemoteError")):
        return re.sub(r"^\[\S*\] ", "", text.split("\n")[0]).split(". ")[0]
    return ""


# Newer versions of torch call it all_gather_single, and warn of the old name.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
