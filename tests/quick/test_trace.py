"""Reading Kineto's traces: real ones from an H200, one from this CPU, and one small enough to work out by hand."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bertrain.profiling.trace import (
    BOTH,
    Launch,
    add_device_regions,
    launches_of,
    own_times,
    total_by_name,
)

RECORDED = Path(__file__).parents[1] / "data" / "kineto-h200"
UNIX_2026 = 1.76e18
ON_7 = {"stream": 7, "grid": [1, 1, 1], "block": [32, 1, 1]}


def recorded(name: str) -> dict[str, Any]:
    """A trace of an H200, whose one region is called as the loop calls it."""
    trace: dict[str, Any] = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation" and event["name"] == "step":
            event["name"] = BOTH
    return trace


def test_graphs_and_single_launches_are_read_alike() -> None:
    """The same two steps: as many kernels of each of our own names, the same regions, the same grids."""
    graph, eager = launches_of(recorded("bf16-graph")), launches_of(recorded("bf16-eager"))

    def ours(launches: list[Launch]) -> Counter[tuple[Any, ...]]:
        kept = [one for one in launches if one.name.startswith("_") and "lamb" not in one.name]
        return Counter((one.name, one.region, one.grid, one.block) for one in kept)

    assert len(graph) == len(eager) == 634
    assert ours(graph) == ours(eager)
    assert sum(ours(graph).values()) > 100
    for launches in (graph, eager):
        assert [one.start_ns for one in launches] == sorted(one.start_ns for one in launches)
        assert launches[0].start_ns > UNIX_2026
        assert launches[-1].end_ns - launches[0].start_ns < 1e9
    assert all(one.operator == "" for one in graph if one.name.startswith("nvjet"))
    assert all(one.operator in ("aten::mm", "aten::addmm") for one in eager if one.name.startswith("nvjet"))


@pytest.mark.parametrize("name", ["bf16-graph", "bf16-eager", "fp8-eager"])
def test_forward_and_backward_are_told_apart(name: str) -> None:
    regions: dict[str, set[str]] = {}
    for launch in launches_of(recorded(name)):
        regions.setdefault(launch.name, set()).add(launch.region)
    for kernel in ("_plan_kernel", "_embed_forward_kernel", "_attention_forward_kernel", "_rows_kernel"):
        assert regions[kernel] == {"forward"}
    for kernel in ("_backward_query_kernel", "_norm_backward_kernel", "_embed_backward_kernel", "_position_kernel"):
        assert regions[kernel] == {"backward"}
    assert regions["Memcpy HtoD (Pinned -> Device)"] == {"data"}


def event(kind: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_a_kernel_has_the_region_of_its_launch() -> None:
    """A device runs behind its host: a kernel may begin when the host is two regions on."""
    trace = {
        "baseTimeNanoseconds": 1000,
        "traceEvents": [
            event("user_annotation", "data", 0, 10),
            event("user_annotation", BOTH, 10, 20),
            event("user_annotation", "forward", 11, 5),
            event("user_annotation", "optimizer", 30, 5),
            event("cpu_op", "aten::mm", 12, 2, **{"External id": 7, "Input Dims": [[2, 3], [3, 4], []]}),
            event("cuda_runtime", "cudaLaunchKernel", 13, 1, correlation=1),
            event("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=2),
            event("cuda_driver", "cuLaunchKernel", 31, 1, correlation=3),
            event("kernel", "product", 40, 5, correlation=1, **ON_7 | {"grid": [1, 2, 3], "External id": 7}),
            event("kernel", "gradient", 46, 5, correlation=2, **ON_7),
            event("kernel", "ncclDevKernel_AllReduce", 47, 9, correlation=2, **ON_7 | {"stream": 9}),
            event("kernel", "update", 60, 2.5, correlation=3, **ON_7),
            {"ph": "i", "name": "an instant"},
        ],
    }  # fmt: skip
    product, gradient, sum_over_ranks, update = launches_of(trace, shift_s=1e-6)
    assert product == Launch(
        "product", "kernel", 42_000, 5000, 7, (1, 2, 3), (32, 1, 1), "forward", "aten::mm", ((2, 3), (3, 4))
    )
    assert (gradient.region, sum_over_ranks.region, update.region) == ("backward", "all-reduce", "optimizer")
    assert (gradient.operator, gradient.sizes) == ("", ())
    assert update.duration_ns == 2500
    add_device_regions(trace, [product, gradient, sum_over_ranks, update])
    added = [one for one in trace["traceEvents"] if one.get("cat") == "region"]
    assert [(one["name"], one["ts"], one["dur"]) for one in added] == [
        ("forward", 41, 5), ("backward", 47, 5), ("all-reduce", 48, 9), ("optimizer", 61, 2.5),
    ]  # fmt: skip


def test_operators_count_without_those_they_call() -> None:
    events = [event("cpu_op", "outer", 0, 100), event("cpu_op", "inner", 10, 60), event("cpu_op", "leaf", 20, 30)]
    other = event("cpu_op", "elsewhere", 5, 50) | {"tid": 2}
    assert [(one["name"], own) for one, own in own_times([*events, other])] == [
        ("outer", 40), ("inner", 30), ("leaf", 30), ("elsewhere", 50),
    ]  # fmt: skip


def test_launches_are_summed_up_by_name() -> None:
    def launch(name: str, duration_us: int) -> Launch:
        return Launch(name, "kernel", 0, 1000 * duration_us, 7, (), (), "", "", ())

    totals = total_by_name([launch("a", 10), launch("b", 30), launch("a", 20), launch("a", 60)])
    assert [(one.name, one.calls) for one in totals] == [("a", 3), ("b", 1)]
    assert totals[0].total_ms == pytest.approx(0.09)
    assert (totals[0].mean_us, totals[0].median_us) == (30, 20)
    assert totals[0].share == pytest.approx(0.75)
    assert total_by_name([]) == []
