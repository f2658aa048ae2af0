"""Reads torch.profiler's Chrome traces: each kernel launch, its duration, its region of the step and its operator.

Kernels are joined with the call that launched them by their correlation number: kernels inside a CUDA graph have the
region of the graph's launch. On a CPU the operators take the place of kernels, without the time of nested operators.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch.profiler import record_function

from bertrain.ranks.watchdog import Heartbeat, Place

REGIONS = {"data": "data", "sum over ranks": "all-reduce", "update": "optimizer"}
"""Names in a trace for places of the loop (`watchdog.PLACES`); forward and backward are separated below."""
BOTH, FORWARD, BACKWARD = "forward and backward", "forward", "backward"
DEVICE_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "set"}
FIRST_OF_FORWARD = {"_plan_kernel", "_embed_forward"}  # of the fused path: attention tiles; on a CPU, embeddings
LAST_OF_FORWARD = {"_rows_kernel", "_cross_entropy"}  # the loss of the masked words
RegionAt = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel, copy or operator."""

    name: str
    kind: str
    start_ns: int  # Unix time
    duration_ns: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    region: str
    operator: str  # the PyTorch operator that launched it; empty for our own kernels and inside graphs
    sizes: tuple[tuple[int, ...], ...]  # of the operator's inputs, if they were recorded

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class RegionMarks(Heartbeat):
    """A heartbeat that also opens and closes the named regions of a trace."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__()
        self._heartbeat, self._open = heartbeat, ExitStack()

    def enter(self, place: Place, step: int | None = None) -> None:
        self._heartbeat.enter(place, step)
        self.close()
        self._open.enter_context(record_function(REGIONS.get(place, place)))

    def move(self) -> None:
        self._heartbeat.move()

    def close(self) -> None:
        self._open.close()


def mark_forward(model: Any) -> list[Any]:
    """Mark each forward pass of a plain model as a region; returns hooks to `remove` afterwards."""
    region = ExitStack()

    def begin(*_: Any) -> None:
        region.enter_context(record_function(FORWARD))

    return [model.register_forward_pre_hook(begin), model.register_forward_hook(lambda *_: region.close())]


def launches_of(trace: dict[str, Any], *, shift_s: float = 0.0) -> list[Launch]:
    """Every launch of the device in order of its start; without a device, the operators of the CPU.

    `shift_s` is added to all times, to undo a change of the system clock.
    """
    base = trace.get("baseTimeNanoseconds", 0) + round(shift_s * 1e9)
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            by_kind[event.get("cat", "")].append(event)
    names = (*REGIONS.values(), BOTH, FORWARD)
    marked = [event for event in by_kind["user_annotation"] if event["name"] in names]
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in marked)

    def region_at(moment: float) -> str:
        """The innermost region of the host at a time; empty outside all regions."""
        begun = spans[: bisect_right(spans, moment, key=lambda span: span[0])]
        return next((name for _, end, name in reversed(begun) if moment <= end), "")

    on_device = [event for kind in DEVICE_KINDS for event in by_kind[kind]]
    found = _device_launches(on_device, by_kind, region_at, base) or _operators(by_kind["cpu_op"], region_at, base)
    return _split_forward_and_backward(sorted(found, key=lambda launch: launch.start_ns))


def _device_launches(
    events: Sequence[dict[str, Any]], by_kind: dict[str, list[dict[str, Any]]], region_at: RegionAt, base: int
) -> list[Launch]:
    on_host = (*by_kind["cuda_runtime"], *by_kind["cuda_driver"])
    calls = {event.get("args", {}).get("correlation"): event["ts"] for event in on_host}
    operators = {event.get("args", {}).get("External id"): event for event in by_kind["cpu_op"]}
    found = []
    for event in events:
        given = event.get("args", {})
        operator = operators.get(given.get("External id"))
        found.append(
            Launch(
                name=event["name"],
                kind=DEVICE_KINDS[event["cat"]],
                start_ns=base + round(event["ts"] * 1e3),
                duration_ns=round(event["dur"] * 1e3),
                stream=int(given.get("stream", -1)),
                grid=tuple(given.get("grid", ())),
                block=tuple(given.get("block", ())),
                region=region_at(calls.get(given.get("correlation"), float("-inf"))),
                operator=operator["name"] if operator else "",
                sizes=_sizes(operator) if operator else (),
            )
        )
    return found


def _operators(events: Sequence[dict[str, Any]], region_at: RegionAt, base: int) -> list[Launch]:
    """The operators of the CPU, each without the time of nested operators."""
    found = []
    for event, own in own_times(events):
        name, start = event["name"], base + round(event["ts"] * 1e3)
        thread, region = int(event["tid"]), region_at(event["ts"])
        found.append(Launch(name, "operator", start, round(own * 1e3), thread, (), (), region, name, _sizes(event)))
    return found


def own_times(events: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Each event with its duration less that of the events directly inside it, thread by thread."""
    own = {id(event): float(event["dur"]) for event in events}
    stacks: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= event["dur"]
        stack.append(event)
    return [(event, max(0.0, own[id(event)])) for event in events]


def _sizes(operator: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The sizes of inputs that are tensors, and of the tensors in lists."""
    found: list[tuple[int, ...]] = []
    for size in operator.get("args", {}).get("Input Dims", ()):
        if size and isinstance(size[0], list):
            found += [tuple(one) for one in size if isinstance(one, list)]
        elif size:
            found.append(tuple(size))
    return tuple(found)


def _split_forward_and_backward(launches: list[Launch]) -> list[Launch]:
    """Split the region "forward and backward" in two.

    The fused path marks neither: its first kernel starts forward, and that of the MLM loss ends it.
    The plain path marks forward passes; everything else in the region is backward.
    """
    is_fused = any(launch.name in LAST_OF_FORWARD for launch in launches)
    current, found = "data", []
    for launch in launches:
        region = launch.region
        if "nccl" in launch.name.lower():
            region = "all-reduce"
        elif launch.kind == "copy" and "HtoD" in launch.name:
            region = "data"
        elif region == BOTH:
            if launch.name in FIRST_OF_FORWARD:
                current = FORWARD
            region = current if is_fused else BACKWARD
            if launch.name in LAST_OF_FORWARD:
                current = BACKWARD
        else:
            current = "data"
        found.append(launch if region == launch.region else replace(launch, region=region))
    return found


def add_device_regions(trace: dict[str, Any], launches: Sequence[Launch]) -> None:
    """Add a row of regions to the trace, by device time: each from its first launch to its last."""
    base = trace.get("baseTimeNanoseconds", 0)
    spans: list[list[Any]] = []
    for launch in launches:
        if spans and spans[-1][0] == launch.region:
            spans[-1][2] = max(spans[-1][2], launch.end_ns)
        elif launch.region:
            spans.append([launch.region, launch.start_ns, launch.end_ns])
    for name, start, end in spans:
        trace["traceEvents"].append(
            {
                "ph": "X", "cat": "region", "name": name, "pid": "bertrain", "tid": "regions on the device",
                "ts": (start - base) / 1e3, "dur": (end - start) / 1e3,
            }
        )  # fmt: skip


@dataclass(frozen=True)
class KernelTotal:
    """All launches of one name."""

    name: str
    calls: int
    total_ms: float
    mean_us: float
    median_us: float
    share: float


def total_by_name(launches: Iterable[Launch]) -> list[KernelTotal]:
    """Sum launches by name, the slowest first; shares are of the time of all launches."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for launch in launches:
        by_name[launch.name].append(launch.duration_ns)
    whole = max(1, sum(map(sum, by_name.values())))
    totals = []
    for name, times in by_name.items():
        mean, median = statistics.fmean(times) / 1e3, statistics.median(times) / 1e3
        totals.append(KernelTotal(name, len(times), sum(times) / 1e6, mean, median, sum(times) / whole))
    return sorted(totals, key=lambda total: -total.total_ms)
