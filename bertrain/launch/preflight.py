"""`bertrain launch preflight`: the ranks of a job check their nodes before it trains.

They are started exactly as for training, which also tests rendezvous, binding and connections. The ranks exchange their
facts through the launcher's store; the first one compares them. Problems that would spoil the run are refused
(different versions, missing or different data, too little disk space); problems that would slow it down are warnings.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bertrain.base import machine
from bertrain.base.errors import AgreedError, ReportedElsewhereError, UserError
from bertrain.base.files import existing_parent
from bertrain.base.formatting import GIB, counted
from bertrain.base.machine import is_first_rank
from bertrain.base.schema import parse_json
from bertrain.config import resolve as config
from bertrain.config.model_size import count_parameters
from bertrain.config.settings import Settings
from bertrain.data.formats.source import open_data
from bertrain.launch import facts as look
from bertrain.launch.facts import Facts
from bertrain.launch.job import RECIPE, Job, code_version, read_job
from bertrain.ranks import parallel
from bertrain.ranks.parallel import Ranks

MAX_CLOCK_SKEW_S = 1.0
SLOW_LINK = 0.5
"""Share of the median bandwidth below which a link is reported."""
LOW_MEMORY = 2 * GIB
REPEATS = 5
STORE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Link:
    """The connection between two neighboring nodes."""

    hosts: tuple[str, str]
    gb_per_s: float


@dataclass(frozen=True)
class Preflight:
    """The result for all nodes."""

    facts: list[Facts]
    links: list[Link]
    all_reduce_gb_per_s: float
    refusals: list[str]
    warnings: list[str]

    def text(self) -> str:
        lines = [_describe(one, self.facts) for one in self.facts if one.is_first_of_node]
        if self.all_reduce_gb_per_s:
            lines.append(f"all-reduce over {counted(len(self.facts), 'rank')}: {self.all_reduce_gb_per_s:.2f} GB/s")
        lines += [f"{link.hosts[0]} to {link.hosts[1]}: {link.gb_per_s:.2f} GB/s" for link in self.links]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"refused: {refusal}" for refusal in self.refusals]
        lines += [] if self.refusals else ["pre-flight: fit to train"]
        return "\n".join(lines)

    def refuse(self) -> None:
        if self.refusals:
            first, *others = self.refusals
            reasons = f"found {counted(1 + len(others), 'problem')}, the first: {first}"
            raise AgreedError("preflight-failed", f"the check of the nodes {reasons}")


def preflight_job(folder: str | Path) -> Preflight | None:
    """Check this machine or, as a rank of a job, all of its nodes. Returns None on all ranks but the first."""
    job = read_job(folder)
    recipe = job.folder / RECIPE
    settings = config.resolve(str(recipe)) if recipe.is_file() else Settings()
    with parallel.join(settings.train) as ranks:
        marker = _create_marker(job, ranks)
        ranks.broadcast_int(0)  # a barrier: the marker exists now, and all ranks read their clocks at the same moment
        clock = time.time()
        own_facts = replace(gather(job, settings, ranks), clock=clock)
        if marker is not None and not marker.exists():
            place = f"{own_facts.run_place}, which is another folder than the first node's"
            own_facts = replace(own_facts, can_write=False, run_place=place)
        all_facts = _exchange(own_facts, ranks)
        bandwidth, links = measure(ranks, all_facts) if ranks.is_connected else (0.0, [])
        ranks.broadcast_int(0)
        if ranks.is_first and marker is not None:
            marker.unlink(missing_ok=True)
        refusals, warnings = compare(all_facts, links, job, settings)
        is_fit = ranks.broadcast_int(not refusals)
    if not ranks.is_first:
        if not is_fit:
            raise ReportedElsewhereError("reported-elsewhere", "the first rank reports the reason")
        return None
    return Preflight(all_facts, links, bandwidth, refusals, warnings)


def _create_marker(job: Job, ranks: Ranks) -> Path | None:
    """A file beside the run folder, by which the other nodes see that they share it; None if it cannot be written."""
    if ranks.world == 1:
        return None
    own = output_folder(job)
    place = existing_parent(own)
    # The random name keeps this job apart from others, and from its other repeats, in the same folder.
    marker = place / f".bertrain-probe-{ranks.broadcast_int(secrets.randbits(62)):016x}"
    if ranks.is_first:
        try:
            marker.touch()
        except OSError:
            return None
    return marker


def output_folder(job: Job) -> Path:
    """What the first task writes; every node must see it."""
    return Path(job.tasks[0].folder or job.directory)


def gather(job: Job, settings: Settings, ranks: Ranks) -> Facts:
    """Collect the facts of this rank; those of the whole node only on its first rank."""
    found = Facts(
        rank=ranks.rank,
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=platform.node(),
        is_first_of_node=ranks.local_rank == 0,
        versions=look.versions(code_version()),
        gpus_seen=torch.cuda.device_count() if job.spec.gpus_per_node else 0,
        binding=ranks.bindings[ranks.local_rank].describe() if ranks.bindings else "any core",
    )
    if not found.is_first_of_node:
        return found
    own = look.own_processes()
    free, place, can_write = look.disk_free(output_folder(job))
    fingerprint, problem = _fingerprint_data(job, settings)
    return replace(
        found,
        memory_free=machine.free_memory() or 0,
        disk_free=free,
        run_place=place,
        can_write=can_write,
        data=fingerprint,
        data_problem=problem,
        gpus=machine.gpus(),
        on_gpus=tuple(words for number, words in machine.gpu_processes().items() if number not in own),
        foreign=look.foreign_processes(own),
        network=look.describe_network(os.environ.get("MASTER_ADDR", "localhost")),
        is_loopback=look.is_loopback(platform.node()) and "GLOO_SOCKET_IFNAME" not in os.environ,
    )


def _fingerprint_data(job: Job, settings: Settings) -> tuple[str, str]:
    """The fingerprint of pre-training data, and an error if it is damaged; for other data only whether it exists."""
    for path in job.data:
        if not Path(path).exists():
            return "", f"there is no {path}"
    if settings.task.name or not (job.folder / RECIPE).is_file():
        return "", ""
    try:
        quiet = not is_first_rank()
        opened = [open_data(folder, vocab=settings.data.vocab, verify="size", quiet=quiet) for folder in job.data]
    except UserError as error:
        return "", str(error)
    return " ".join(data.fingerprint for data in opened), ""


def _exchange(own_facts: Facts, ranks: Ranks) -> list[Facts]:
    if ranks.store is None:
        return [own_facts]
    ranks.store.set(f"bertrain/preflight/{ranks.rank}", json.dumps(asdict(own_facts)))
    ranks.store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
    every = []
    for rank in range(ranks.world):
        every.append(parse_json(ranks.store.get(f"bertrain/preflight/{rank}"), Facts))
    return every


# --- links ----------------------------------------------------------------------------------------


def measure(ranks: Ranks, facts: Sequence[Facts]) -> tuple[float, list[Link]]:
    """Bandwidth in GB/s of an all-reduce over all ranks, and of each link between neighboring nodes."""
    is_nccl = dist.get_backend() == "nccl"
    device = ranks.device if is_nccl else torch.device("cpu")
    payload = torch.ones((64 if is_nccl else 16) * 2**20 // 4, device=device)
    seconds = _median_seconds(lambda: dist.all_reduce(payload), device)
    moved = 2 * (ranks.world - 1) / ranks.world * payload.nbytes
    nodes = [one for one in facts if one.is_first_of_node]
    links = []
    for left, right in ring_links(len(nodes)):
        ends = (nodes[left].rank, nodes[right].rank)
        took = torch.zeros(1, dtype=torch.float64)
        if ranks.rank in ends:
            took[0] = _median_seconds(lambda: _ping_pong(payload, ranks.rank, ends), device)  # noqa: B023
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=ranks.control)
        links.append(Link((nodes[left].host, nodes[right].host), 2 * payload.nbytes / float(took) / 1e9))
    return (moved / seconds / 1e9 if ranks.world > 1 else 0.0), links


def ring_links(nodes: int) -> list[tuple[int, int]]:
    return [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]


def _ping_pong(payload: torch.Tensor, rank: int, ends: tuple[int, int]) -> None:
    first, second = ends
    for sender, receiver in (ends, (second, first)):
        if rank == sender:
            dist.send(payload, receiver)
        else:
            dist.recv(payload, sender)


def _median_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Of as many runs on every rank, after one that opens the connections; the best would hide a link that falters."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


# --- refusals and warnings ------------------------------------------------------------------------


def compare(facts: Sequence[Facts], links: Sequence[Link], job: Job, settings: Settings) -> tuple[list[str], list[str]]:
    """Reasons not to train, and warnings: a sentence each."""
    nodes = [one for one in facts if one.is_first_of_node]
    gpus = _gpu_refusals(facts, nodes) if job.spec.gpus_per_node else ()
    refusals = [*_differences(facts, nodes), *gpus, *_disk_refusals(nodes, settings)]
    return refusals, [*_warnings(facts, nodes, links, job)]


def _name(one: Facts) -> str:
    return f"node {one.node} ({one.host})"


def _ranks_of_node(node: Facts, facts: Sequence[Facts]) -> list[Facts]:
    return [one for one in facts if (one.node, one.host) == (node.node, node.host)]


def _differences(facts: Sequence[Facts], nodes: Sequence[Facts]) -> list[str]:
    """Refuse nodes that have other versions or other data than the first."""
    first = facts[0]
    versions = [
        f"{_name(one)} has {package} {version}, but {_name(first)} has {first.versions.get(package)}; install the same "
        "version on all nodes"
        for one in facts[1:]
        for package, version in one.versions.items()
        if version != first.versions.get(package)
    ]
    problems = [f"{_name(one)}: {one.data_problem}" for one in nodes if one.data_problem]
    readable = [one for one in nodes if one.data]
    data = [
        f"{_name(one)} has other data than {_name(readable[0])} under the same path; copy the same to all nodes"
        for one in readable
        if one.data != readable[0].data
    ]
    return [*dict.fromkeys(versions), *problems, *data]  # the ranks of a node find the same versions


def _gpu_refusals(facts: Sequence[Facts], nodes: Sequence[Facts]) -> Iterator[str]:
    for one in nodes:
        ranks = len(_ranks_of_node(one, facts))
        if one.gpus_seen < ranks:
            seen = f"{counted(one.gpus_seen, 'GPU')} for {counted(ranks, 'rank')}"
            yield f"{_name(one)} has {seen}; lower --gpus-per-node, or request more GPUs"
        for gpu in one.gpus:
            if gpu.errors:
                yield f"{_name(one)}: GPU {gpu.number} has {counted(gpu.errors, 'uncorrected memory error')}"


def _disk_refusals(nodes: Sequence[Facts], settings: Settings) -> list[str]:
    found = [f"{_name(one)} cannot write into {one.run_place}" for one in nodes if not one.can_write]
    checkpoint = 12 * count_parameters(settings.model)[0] if settings.checkpoint.enabled else 0
    first = nodes[0]  # only the first rank writes
    if first.disk_free < 2 * checkpoint:
        free, needed = first.disk_free / GIB, 2 * checkpoint / GIB
        found.append(f"{_name(first)} has {free:.2f} GiB free at {first.run_place}; two checkpoints take {needed:.2f}")
    return found


def _warnings(facts: Sequence[Facts], nodes: Sequence[Facts], links: Sequence[Link], job: Job) -> Iterator[str]:
    written, now = f"{job.code['version']} (files {job.code['files'][:12]})", facts[0].versions["bertrain"]
    if now != written:
        yield f"the job was written by bertrain {written}, but this is {now}"
    slow, fast = min(facts, key=lambda one: one.clock), max(facts, key=lambda one: one.clock)
    skew = fast.clock - slow.clock
    if skew >= MAX_CLOCK_SKEW_S:
        yield f"the clocks of {_name(slow)} and {_name(fast)} differ by {skew:.1f} s; times in logs will not agree"
    hosts = {one.host for one in nodes}
    for one in nodes:
        if one.foreign:
            yield f"{_name(one)}: other processes are busy: {', '.join(one.foreign[:5])}"
        if one.on_gpus:
            yield f"{_name(one)}: other processes use its GPUs: {', '.join(one.on_gpus[:5])}"
        if one.memory_free < LOW_MEMORY:
            yield f"{_name(one)} has only {one.memory_free / GIB:.1f} GiB of memory free"
        if one.is_loopback and len(hosts) > 1:
            yield f"{_name(one)} resolves its own name to a loopback address, which others cannot reach; give --nic"
    median = statistics.median(link.gb_per_s for link in links) if len(links) > 2 else 0.0
    for link in links:
        if link.gb_per_s < SLOW_LINK * median:
            yield f"the link {' to '.join(link.hosts)} has {link.gb_per_s:.2f} GB/s; the median is {median:.2f}"


def _describe(node: Facts, facts: Sequence[Facts]) -> str:
    gpus = ", ".join(f"{gpu.name} at {gpu.temperature} C" for gpu in node.gpus)
    memory, disk = (size / GIB for size in (node.memory_free, node.disk_free))
    return "\n".join(
        [
            f"{_name(node)}: {', '.join(f'{name} {version}' for name, version in node.versions.items())}",
            f"  {memory:.1f} GiB of memory free, {disk:.1f} GiB of disk at {node.run_place}",
            *([f"  {counted(node.gpus_seen, 'GPU')}: {gpus}"] if node.gpus_seen else []),
            f"  network: {node.network}",
            *(f"  rank {one.rank} is bound to {one.binding}" for one in _ranks_of_node(node, facts)),
        ]
    )
