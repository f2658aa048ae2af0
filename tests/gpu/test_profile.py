"""Telemetry and profiles on a GPU: NVML's gauges, kernels inside of graphs, parts of the model, time that joins."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bertrain.kernels.backend import available
from bertrain.profiling.profile import profile
from bertrain.profiling.profile_report import profile_report, read_roofline
from bertrain.profiling.sets import find_sets
from bertrain.profiling.variability import joules, summarize
from bertrain.run.metrics import Stopwatch
from bertrain.run.sensors import sensors_for, uuid_of
from bertrain.training.start import pretrain
from tests import helpers
from tests.training.test_profile import FILES, read_csv

USABLE, REASON = available("cuda") if torch.cuda.is_available() else (False, "no CUDA device")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
needs_kernels = pytest.mark.skipif(not USABLE, reason=REASON)
needs_fp8 = pytest.mark.skipif(not USABLE or torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8")
WIDE = {
    "model__vocab_size": 2000, "model__hidden_size": 256, "model__num_heads": 4, "model__intermediate_size": 1024,
    "model__pad_vocab_to": 64, "batch__token_budget": 4096, "train__device": "cuda",
}  # fmt: skip


def test_nvml_reads_this_gpu() -> None:
    sensors = sensors_for(uuid_of(0))
    assert "gpu" not in sensors.missing, sensors.missing
    found = {gauge.column: gauge.read() for gauge in sensors.gauges}
    assert 100 < found["sm_clock_mhz"] < 5000
    assert 10 < found["power_w"] < 2000
    assert 10 < found["temperature_c"] < 110
    assert found["memory_used_bytes"] > 1 << 20
    assert sensors.device["uuid"] == uuid_of(0)
    print(found, sensors.missing)


def test_moments_are_those_of_the_device() -> None:
    """A mark behind much work is passed when that is done, not when it was made."""
    import time

    watch, a = Stopwatch(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    torch.mm(a, a)
    torch.cuda.synchronize()
    watch.start()
    for _ in range(100):
        torch.mm(a, a)
    watch.mark()
    made = time.time()
    marks = watch.lap()
    (seconds,) = watch.seconds(marks)
    first, last = watch.moments(marks)
    assert last - first == pytest.approx(seconds, rel=1e-3)
    assert last >= made - 0.05
    assert abs(last - time.time()) < 1


@pytest.mark.parametrize(
    ("precision", "kernels"),
    [
        ("fp32", "plain"),
        pytest.param("bf16", "auto", marks=needs_kernels),
        pytest.param("fp8", "auto", marks=needs_fp8),
    ],
)
def test_a_profile(tmp_path: Path, precision: str, kernels: str) -> None:
    settings = helpers.tiny_settings(**WIDE, train__precision=precision, train__kernels=kernels)
    (folder,) = profile(settings, tmp_path / "out", steps=30, telemetry_ms=10, trace=True)
    assert {path.name for path in folder.iterdir()} == FILES
    (found,) = find_sets([tmp_path / "out"])
    assert found.uuid == uuid_of(0)
    assert found.missing == {}, "nothing is missing on a machine with NVML and CUPTI"
    summary = summarize(found)
    assert summary.power_w is not None
    assert joules(found) is not None
    launches = read_csv(folder / "launches.csv.gz")
    kernels_seen = [row for row in launches if row["kind"] == "kernel"]
    assert all(row["grid"].count("x") == row["block"].count("x") == 2 for row in kernels_seen)
    assert {"forward", "backward", "optimizer"} <= {row["region"] for row in kernels_seen}
    outside = [row for row in kernels_seen if not row["region"]]
    assert len(outside) < 0.02 * len(kernels_seen)
    begins = np.array([int(row["start_ns"]) / 1e9 for row in launches])
    assert begins[0] > found.ended - 0.01, "recorded after the timed steps"
    assert begins[-1] < found.telemetry["time"][-1] + 0.1
    rows, facts = read_roofline(folder)
    for row in rows:
        print(row)
    measured = {row.part: row.measured_ms for row in rows}
    for part in ("query, key, value", "attention", "attention output", "feed-forward", "GELU", "heads", "embeddings"):
        assert measured[part] > 0, part
    assert facts["ceilings"]["bytes_per_s"] > 1e11
    if kernels == "auto":
        assert facts["recorded_one_by_one"] == [4, 6]
    profile_report([tmp_path / "out"])


def test_each_gpu_is_measured_alone(tmp_path: Path) -> None:
    made = profile(helpers.tiny_settings(**WIDE), tmp_path / "out", steps=5, each_gpu=True, recorded=1)
    assert len(made) == torch.cuda.device_count()
    uuids = {found.uuid for found in find_sets([tmp_path / "out"])}
    assert uuids == {uuid_of(number) for number in range(torch.cuda.device_count())}


def test_a_run_says_its_joules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = helpers.make_data(tmp_path)
    settings = helpers.tiny_settings(train__device="cuda", log__telemetry=True, log__telemetry_ms=10)
    pretrain(settings, data, tmp_path / "run")
    end = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert end["joules"] > 0
    assert " J per million tokens" in capsys.readouterr().out
    (found,) = find_sets([tmp_path / "run"])
    assert found.uuid == uuid_of(0)
    assert found.telemetry["time"][0] <= found.started[0] + 0.2
