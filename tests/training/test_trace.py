"""The trace of a step on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bertrain.profiling.trace import (
    RegionMarks,
    launches_of,
    mark_forward,
)
from bertrain.ranks.watchdog import Heartbeat


def test_a_cpus_operators_stand_in_for_kernels(tmp_path: Path) -> None:
    model = torch.nn.Linear(48, 64)
    behind = Heartbeat()
    marks, hooks = RegionMarks(behind), mark_forward(model)
    began = time.time_ns()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        marks.enter("data", 3)
        x = torch.randn(16, 48)
        marks.enter("forward and backward")
        model(x).square().sum().backward()
        marks.enter("update")
        torch.zeros(5).add_(1)
        marks.close()
    over = time.time_ns()
    for hook in hooks:
        hook.remove()
    assert behind.now[:2] == (3, "update"), "the watchdog hears of it"
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    launches = launches_of(json.loads((tmp_path / "trace.json").read_bytes()))
    regions = {(one.name, one.region) for one in launches}
    assert {("aten::addmm", "forward"), ("aten::randn", "data"), ("aten::add_", "optimizer")} <= regions
    assert ("aten::mm", "backward") in regions
    (product,) = [one for one in launches if one.name == "aten::addmm"]
    assert product.sizes == ((64,), (16, 48), (48, 64))
    assert all(began - 2e6 <= one.start_ns <= over + 2e6 for one in launches), "Unix time, to a few milliseconds"
