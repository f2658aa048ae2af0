"""`bertrain launch preflight`: whether the nodes of a job are fit to train on, found out by the job's own ranks.

They are started just as they will be for training, so the meeting, the binding and the connections are tried too. Each
leaves word of what it found in the launcher's store; the first one compares, and decides. What would spoil the run is
refused (versions that differ, data that is not there or not the same, no room); what would slow it down is warned of.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bertrain.base import machine
from bertrain.base.errors import AgreedError, ReportedElsewhereError, UserError
from bertrain.config import resolve as config
from bertrain.config.model_size import count_parameters
from bertrain.config.settings import Settings
from bertrain.data.formats.source import open_data
from bertrain.launch import facts as look
from bertrain.launch.facts import Facts
from bertrain.launch.job import RECIPE, Job, code_version, read_job
from bertrain.planning.memory import GIB
from bertrain.ranks import parallel
from bertrain.ranks.parallel import Ranks

CLOCKS_APART_S = 1.0
SLOW_SHARE = 0.5
"""Of the median: a link with less bandwidth is named."""
LITTLE_MEMORY = 2 * GIB
REPEATS = 5
WAIT_S = 120


@dataclass(frozen=True)
class Link:
    """A stretch between two neighbouring nodes."""

    hosts: tuple[str, str]
    gb_per_s: float


@dataclass(frozen=True)
class Preflight:
    """What was found on all nodes together."""

    facts: list[Facts]
    links: list[Link]
    all_reduce_gb_per_s: float
    refusals: list[str]
    warnings: list[str]

    def text(self) -> str:
        """For people."""
        lines = [_describe(one, self.facts) for one in self.facts if one.is_first_of_node]
        if self.all_reduce_gb_per_s:
            lines.append(f"all-reduce over {len(self.facts)} rank(s): {self.all_reduce_gb_per_s:.2f} GB/s")
        lines += [f"{link.hosts[0]} to {link.hosts[1]}: {link.gb_per_s:.2f} GB/s" for link in self.links]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"refused: {refusal}" for refusal in self.refusals]
        lines += [] if self.refusals else ["pre-flight: fit to train"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def refuse(self) -> None:
        """Raise for what would spoil the run."""
        if self.refusals:
            raise AgreedError(f"the pre-flight found {len(self.refusals)} reason(s) not to train: {self.refusals[0]}")


def preflight_job(folder: str | Path) -> Preflight | None:
    """Look at this machine, or, as a rank of a job, at all of its nodes; only the first rank is told what was found."""
    job = read_job(folder)
    settings = config.resolve(str(job.folder / RECIPE))
    with parallel.join(settings.train) as ranks:
        probe = _leave_probe(job, ranks)
        ranks.broadcast_int(0)  # and so all clocks are read at the same moment, and the probe is there
        clock = time.time()
        mine = replace(gather(job, settings, ranks), clock=clock)
        if probe is not None and not probe.exists():
            mine = replace(
                mine, can_write=False, run_place=f"{mine.run_place}, which is another folder than the first node's"
            )
        all_facts = _exchange(mine, ranks)
        bandwidth, links = measure(ranks, all_facts) if ranks.is_connected else (0.0, [])
        ranks.broadcast_int(0)
        if ranks.is_first and probe is not None:
            probe.unlink(missing_ok=True)
        refusals, warnings = compare(all_facts, links, job, settings)
        is_fit = ranks.broadcast_int(not refusals)
    if not ranks.is_first:
        if not is_fit:
            raise ReportedElsewhereError("the first rank has said why")
        return None
    return Preflight(all_facts, links, bandwidth, refusals, warnings)


def _leave_probe(job: Job, ranks: Ranks) -> Path | None:
    """A file where the run will be, by which the other nodes see that it is the same place; None where it cannot be."""
    if ranks.world == 1:
        return None
    place = next(path for path in (Path(job.run), *Path(job.run).parents) if path.exists())
    # Other jobs, and the other repeats of this one, may be looking at the same place at the same time.
    probe = place / f".bertrain-probe-{ranks.broadcast_int(secrets.randbits(62)):016x}"
    if ranks.is_first:
        try:
            probe.touch()
        except OSError:
            return None
    return probe


def gather(job: Job, settings: Settings, ranks: Ranks) -> Facts:
    """What this rank finds; the costly part only on the first of each node."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    found = Facts(
        rank=ranks.rank,
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=platform.node(),
        is_first_of_node=local_rank == 0,
        versions=look.versions(code_version()),
        gpus_seen=torch.cuda.device_count() if settings.train.device != "cpu" else 0,
        binding=ranks.bindings[local_rank].describe() if ranks.bindings else "any core",
    )
    if local_rank != 0:
        return found
    own = look.own_processes()
    on_gpus = tuple(
        f"{process.name} ({process.number}, {process.used_mb} MB)"
        for process in machine.gpu_processes()
        if process.number not in own
    )
    free, place, can_write = look.disk_free(Path(job.run))
    fingerprint, problem = _look_at_data(job, settings)
    return replace(
        found,
        memory_free=machine.free_memory() or 0,
        disk_free=free,
        run_place=place,
        can_write=can_write,
        data=fingerprint,
        data_problem=problem,
        gpus=machine.gpus(),
        on_gpus=on_gpus,
        foreign=look.foreign_processes(own),
        network=look.describe_network(os.environ.get("MASTER_ADDR", "localhost")),
        is_loopback=look.is_loopback(platform.node()) and "GLOO_SOCKET_IFNAME" not in os.environ,
    )


def _look_at_data(job: Job, settings: Settings) -> tuple[str, str]:
    folders = [job.data, *([settings.evaluate.data] if settings.evaluate.data else [])]
    try:
        opened = [open_data(folder, vocab=settings.data.vocab, verify="size") for folder in folders]
    except UserError as error:
        return "", str(error)
    return " ".join(one.fingerprint for one in opened), ""


def _exchange(mine: Facts, ranks: Ranks) -> list[Facts]:
    """The facts of all ranks, on every rank."""
    if ranks.store is None:
        return [mine]
    ranks.store.set(f"bertrain/preflight/{ranks.rank}", json.dumps(asdict(mine)))
    ranks.store.set_timeout(timedelta(seconds=WAIT_S))
    return [_read(json.loads(ranks.store.get(f"bertrain/preflight/{rank}"))) for rank in range(ranks.world)]


def _read(content: dict[str, Any]) -> Facts:
    gpus = tuple(machine.Gpu(**gpu) for gpu in content["gpus"])
    lists: dict[str, Any] = {name: tuple(content[name]) for name in ("foreign", "on_gpus")}
    return Facts(**content | lists | {"gpus": gpus})


# --- links ----------------------------------------------------------------------------------------


def measure(ranks: Ranks, facts: Sequence[Facts]) -> tuple[float, list[Link]]:
    """Bandwidth of an all-reduce over all ranks, and of each link between neighbouring nodes; GB/s."""
    is_nccl = dist.get_backend() == "nccl"
    device = ranks.device if is_nccl else torch.device("cpu")
    payload = torch.ones((64 if is_nccl else 16) * 2**20 // 4, device=device)
    seconds = _median_seconds(lambda: dist.all_reduce(payload), device)
    travelled = 2 * (ranks.world - 1) / ranks.world * payload.nbytes
    firsts = [one for one in facts if one.is_first_of_node]
    links = []
    for here, there in neighbours(len(firsts)):
        ends = (firsts[here].rank, firsts[there].rank)
        took = torch.zeros(1, dtype=torch.float64)
        if ranks.rank in ends:
            took[0] = _median_seconds(lambda: _back_and_forth(payload, ranks.rank, ends), device)  # noqa: B023
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=ranks.control)
        links.append(Link((firsts[here].host, firsts[there].host), 2 * payload.nbytes / float(took) / 1e9))
    return (travelled / seconds / 1e9 if ranks.world > 1 else 0.0), links


def neighbours(nodes: int) -> list[tuple[int, int]]:
    """The links of a ring, each once."""
    return [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]


def _back_and_forth(payload: torch.Tensor, rank: int, ends: tuple[int, int]) -> None:
    first, second = ends
    if rank == first:
        dist.send(payload, second)
        dist.recv(payload, second)
    else:
        dist.recv(payload, first)
        dist.send(payload, first)


def _median_seconds(work: Any, device: torch.device) -> float:
    """Of a few times, after one that makes connections."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


# --- judging --------------------------------------------------------------------------------------


def compare(facts: Sequence[Facts], links: Sequence[Link], job: Job, settings: Settings) -> tuple[list[str], list[str]]:
    """What would spoil the run, and what would only slow it down or may surprise: sentences."""
    firsts = [one for one in facts if one.is_first_of_node]
    return [
        *_differing_versions(facts),
        *_data_refusals(firsts),
        *_gpu_refusals(facts, settings),
        *_room_refusals(firsts, settings),
    ], [
        *_code_warnings(firsts, job),
        *_clock_warnings(facts),
        *_node_warnings(firsts),
        *_slow_links(links),
    ]


def _name(one: Facts) -> str:
    return f"node {one.node} ({one.host})"


def _differing_versions(facts: Sequence[Facts]) -> list[str]:
    found, said = [], set()
    for one in facts[1:]:
        for what, version in one.versions.items():
            expected = facts[0].versions.get(what)
            if version != expected and (one.node, one.host, what) not in said:
                said.add((one.node, one.host, what))
                found.append(
                    f"{_name(one)} has {what} {version}, and {_name(facts[0])} has {expected}; install the same on all"
                )
    return found


def _data_refusals(firsts: Sequence[Facts]) -> list[str]:
    found = [f"{_name(one)}: {one.data_problem}" for one in firsts if one.data_problem]
    whole = [one for one in firsts if one.data]
    found += [
        f"{_name(one)} has other data than {_name(whole[0])} under the same path; copy the same to all nodes"
        for one in whole
        if one.data != whole[0].data
    ]
    return found


def _gpu_refusals(facts: Sequence[Facts], settings: Settings) -> list[str]:
    if settings.train.device != "cuda":
        return []
    found = []
    for one in (one for one in facts if one.is_first_of_node):
        ranks = sum((other.node, other.host) == (one.node, one.host) for other in facts)
        if one.gpus_seen < ranks:
            found.append(
                f"{_name(one)} has {one.gpus_seen} GPU(s) for {ranks} rank(s); lower --gpus-per-node, or ask for more"
            )
        found += [
            f"{_name(one)}: GPU {gpu.number} has {gpu.errors} uncorrected memory error(s)"
            for gpu in one.gpus
            if gpu.errors
        ]
    return found


def _room_refusals(firsts: Sequence[Facts], settings: Settings) -> list[str]:
    found = [f"{_name(one)} cannot write into {one.run_place}" for one in firsts if not one.can_write]
    checkpoint = 12 * count_parameters(settings.model)[0] if settings.checkpoint.enabled else 0
    first = firsts[0]  # only its first rank writes
    if first.disk_free < 2 * checkpoint:
        found.append(
            f"{_name(first)} has {first.disk_free / GIB:.2f} GiB free at {first.run_place}, and two checkpoints take "
            f"{2 * checkpoint / GIB:.2f}; make room"
        )
    return found


def _code_warnings(firsts: Sequence[Facts], job: Job) -> list[str]:
    written = f"{job.code['version']} (files {job.code['files'][:12]})"
    now = firsts[0].versions["bertrain"]
    return [] if now == written else [f"the job was written by bertrain {written}, and this is {now}"]


def _clock_warnings(facts: Sequence[Facts]) -> list[str]:
    early, late = min(facts, key=lambda one: one.clock), max(facts, key=lambda one: one.clock)
    apart = late.clock - early.clock
    if apart < CLOCKS_APART_S:
        return []
    return [f"the clocks of {_name(early)} and {_name(late)} are {apart:.1f} s apart; times in logs will not agree"]


def _node_warnings(firsts: Sequence[Facts]) -> list[str]:
    found = []
    hosts = {one.host for one in firsts}
    for one in firsts:
        if one.foreign:
            found.append(f"{_name(one)}: other processes are at work: {', '.join(one.foreign[:5])}")
        if one.on_gpus:
            found.append(f"{_name(one)}: other processes are on its GPUs: {', '.join(one.on_gpus[:5])}")
        if one.memory_free < LITTLE_MEMORY:
            found.append(f"{_name(one)} has only {one.memory_free / GIB:.1f} GiB of memory free")
        if one.is_loopback and len(hosts) > 1:
            found.append(
                f"{_name(one)} takes its name for a loopback address, under which others cannot reach it; give --nic"
            )
    return found


def _slow_links(links: Sequence[Link]) -> list[str]:
    if len(links) < 3:
        return []
    median = statistics.median(link.gb_per_s for link in links)
    return [
        f"the link {link.hosts[0]} to {link.hosts[1]} has {link.gb_per_s:.2f} GB/s, and the median is {median:.2f}"
        for link in links
        if link.gb_per_s < SLOW_SHARE * median
    ]


def _describe(one: Facts, facts: Sequence[Facts]) -> str:
    ranks = [other for other in facts if (other.node, other.host) == (one.node, one.host)]
    gpus = ", ".join(f"{gpu.name} at {gpu.temperature} C" for gpu in one.gpus)
    lines = [
        f"{_name(one)}: {', '.join(f'{name} {version}' for name, version in one.versions.items())}",
        f"  {one.memory_free / GIB:.1f} GiB of memory free, {one.disk_free / GIB:.1f} GiB of disk at {one.run_place}",
        *([f"  {one.gpus_seen} GPU(s): {gpus}"] if one.gpus_seen else []),
        f"  network: {one.network}",
        *(f"  rank {other.rank} keeps to {other.binding}" for other in ranks),
    ]
    return "\n".join(lines)
