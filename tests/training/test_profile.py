"""`bertrain profile` on this CPU from end to end, its report and its roofline; and on the H200's set, where it lies."""

from __future__ import annotations

import csv
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertrain.base.console import PHASES
from bertrain.profiling.profile import profile, settings_to_profile
from bertrain.profiling.profile_report import profile_report, read_roofline
from bertrain.profiling.sets import ITERATION_COLUMNS, LAUNCH_COLUMNS, find_sets
from bertrain.training.start import pretrain
from tests import helpers

H200 = Path(__file__).parents[1] / "data" / "profile-h200"
FILES = {
    "device.json", "iterations.csv", "kernels.csv", "launches.csv.gz", "roofline.csv", "telemetry.csv",
    "telemetry.json", "trace.json.gz",
}  # fmt: skip


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two repeats of twelve steps, with a trace."""
    out = tmp_path_factory.mktemp("profile") / "out"
    settings = helpers.tiny_settings(model__vocab_size=200)
    made = profile(
        settings, out, steps=12, warm_up=3, repeat=2, recorded=2, telemetry_ms=10, trace=True, say=lambda _: None
    )
    assert [path.relative_to(out).parts[1] for path in made] == ["repeat-1", "repeat-2"]
    return out


def read_csv(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return list(csv.DictReader(file))


def test_a_set_is_whole(profiled: Path) -> None:
    for folder in sorted(profiled.glob("*/*")):
        assert {path.name for path in folder.iterdir()} == FILES
        facts = json.loads((folder / "device.json").read_text())
        assert facts["timed_steps"] == [4, 15]
        assert facts["recorded_steps"] == [16, 17]
        assert facts["data"].startswith("synthetic")
        assert facts["settings"]["batch"]["tokens"] == 256, "one bin"


def test_iterations_follow_one_another(profiled: Path) -> None:
    rows = read_csv(next(profiled.rglob("iterations.csv")))
    assert list(rows[0]) == list(ITERATION_COLUMNS)
    assert [int(row["step"]) for row in rows] == list(range(4, 16))
    starts = np.array([float(row["started"]) for row in rows])
    seconds = np.array([float(row["seconds"]) for row in rows])
    assert np.allclose(starts[1:], starts[:-1] + seconds[:-1], atol=1e-4), "nothing lies between two steps"
    phases = np.array([[float(row[f"{phase}_s"]) for phase in PHASES] for row in rows])
    assert np.allclose(phases.sum(axis=1), seconds)
    assert {(row["tokens"], row["own_tokens"], row["bins"]) for row in rows} == {("256", "256", "1")}


def test_launches_come_after_the_timed_steps_and_within_the_telemetry(profiled: Path) -> None:
    """The three files join by time: samples surround the steps, and the steps' launches follow."""
    folder = next(profiled.rglob("iterations.csv")).parent
    launches = read_csv(folder / "launches.csv.gz")
    assert list(launches[0]) == list(LAUNCH_COLUMNS)
    begins = [int(row["start_ns"]) / 1e9 for row in launches]
    assert begins == sorted(begins)
    iterations = read_csv(folder / "iterations.csv")
    over = float(iterations[-1]["started"]) + float(iterations[-1]["seconds"])
    assert begins[0] > over - 0.005
    samples = [float(row["time"]) for row in read_csv(folder / "telemetry.csv")]
    assert samples[0] <= float(iterations[0]["started"])
    assert samples[-1] >= begins[-1] - 0.005
    assert {row["region"] for row in launches} >= {"forward", "backward", "optimizer"}
    by_name = {row["name"]: row for row in read_csv(folder / "kernels.csv")}
    products = [int(row["duration_ns"]) for row in launches if row["name"] == "aten::addmm"]
    assert int(by_name["aten::addmm"]["calls"]) == len(products)
    assert float(by_name["aten::addmm"]["total_ms"]) == pytest.approx(sum(products) / 1e6)
    assert sum(float(row["share"]) for row in by_name.values()) == pytest.approx(1)


def test_the_trace_has_named_regions(profiled: Path) -> None:
    with gzip.open(next(profiled.rglob("trace.json.gz")), "rt") as file:
        trace = json.load(file)
    host = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"data", "forward", "forward and backward", "all-reduce", "optimizer"} <= host
    device = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "region"]
    assert [name for name in device if name in ("forward", "optimizer")] == ["forward", "optimizer"] * 2


def test_the_roofline_accounts_for_the_step(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, facts = read_roofline(profiled)
    assert sum(row.share_of_step for row in rows) == pytest.approx(1)
    parts = {row.part: row for row in rows}
    width, tokens = 32, 256
    assert parts["query, key, value"].gflop * 1e9 == pytest.approx(2 * 6 * tokens * width * 3 * width)
    assert parts["query, key, value"].measured_ms > 0
    assert parts["attention"].measured_ms > 0
    assert facts["ceilings"]["operations_per_s"] > 0


@pytest.mark.usefixtures("c_kernels")
def test_kernels_for_cpus_are_seen(tmp_path: Path) -> None:
    """In C, and no operators of PyTorch's, yet in the tables under the part of the model they belong to."""
    wide = helpers.tiny_settings(
        model__hidden_size=64, model__num_heads=2, model__intermediate_size=256, train__precision="bf16"
    )
    profile(wide, tmp_path / "out", steps=3, warm_up=2)
    calls = {line["name"]: int(line["calls"]) for line in read_csv(next(tmp_path.rglob("kernels.csv")))}
    layers, recorded = wide.model.num_layers, calls["_embed_forward"]
    assert calls["_attention_forward"] == calls["_attention_backward"] == layers * recorded
    assert calls["_norm_forward"] == calls["_norm_backward"] >= 2 * layers * recorded
    launches = read_csv(next(tmp_path.rglob("launches.csv.gz")))
    regions = {line["name"]: line["region"] for line in launches if line["name"].startswith("_")}
    assert regions["_gelu_forward"] == "forward"
    assert regions["_gelu_backward"] == regions["_weight_gradient"] == "backward"
    assert regions["_lamb_update"] == "optimizer"
    measured = {one.part: one.measured_ms for one in read_roofline(tmp_path / "out")[0]}
    assert all(measured[part] > 0 for part in ("attention", "GELU", "feed-forward", "query, key, value"))


class Whole(HTMLParser):
    """Complains of a tag that is not closed, and of anything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        assert tag not in ("script", "link", "img")
        assert not any(
            name == "src" or (value or "").startswith("http") for name, value in attributes if "xml" not in name
        )
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_page_is_whole(page: str) -> None:
    parser = Whole()
    parser.feed(page)
    assert parser.open == []
    assert page.isascii()
    for title in ("Variability", "Sets", "Roofline", "Kernels", "Duration of a step", "Steps in order"):
        assert title in page


def test_the_report_is_one_page(profiled: Path, tmp_path: Path) -> None:
    path, found = profile_report([profiled], out=tmp_path / "report.html")
    assert_page_is_whole(path.read_text())
    assert len(found.sets) == 2
    assert len(found.devices) == 1
    assert re.search(r"[\d.]+% between its repeats", found.verdict)


def test_a_run_with_telemetry_is_a_set_too(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    settings = helpers.tiny_settings(train__max_steps=5, log__telemetry=True, log__telemetry_ms=10)
    pretrain(settings, data, tmp_path / "run")
    (found,) = find_sets([tmp_path / "run"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found.seconds.tolist() == pytest.approx(
        [sum(line["seconds"].values()) for line in lines if line["kind"] == "step"]
    )
    assert found.energy_tokens == sum(line["tokens"] for line in lines if line["kind"] == "step"), "there is one rank"
    page, _ = profile_report([tmp_path / "run"])
    assert page == tmp_path / "run" / "profile-report.html"


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with helpers.refused("no-gpu", "--each-gpu"):
        profile(helpers.tiny_settings(train__device="cpu"), tmp_path / "out", each_gpu=True)
    assert not (tmp_path / "out").exists()


def test_a_step_is_as_many_bins_as_asked_for() -> None:
    settings = helpers.tiny_settings(batch__token_budget=300)
    assert settings_to_profile(settings, bins=2, steps=9).batch.tokens == 2 * 256, "whole examples of 64 tokens"
    padded = settings_to_profile(helpers.tiny_settings(batch__policy="padded"), bins=2, steps=9).batch
    assert (padded.tokens, padded.sequences) == (0, 2 * 4)
    as_the_recipe = settings_to_profile(settings, bins=0, steps=9).batch
    assert (as_the_recipe.tokens, as_the_recipe.sequences) == (0, 24)


def test_the_h200s_set(tmp_path: Path) -> None:
    """250 steps of bert-large-phase1, as docs/how-to-profile.md says."""
    sets = find_sets([H200])
    for found in sets:
        assert found.uuid.startswith("GPU-")
        assert len(found.seconds) == 250
        assert {"sm_clock_mhz", "power_w", "temperature_c", "energy_j"} <= set(found.telemetry)
        inside = (found.telemetry["time"] >= found.started[0]) & (found.telemetry["time"] <= found.ended)
        assert inside.sum() > 20, "samples join with the steps"
        launches = read_csv(found.folder / "launches.csv.gz")
        kernels = {row["name"] for row in launches if row["kind"] == "kernel"}
        assert {"_attention_forward_kernel", "_backward_key_kernel", "_norm_forward_kernel"} <= kernels
        assert all(re.fullmatch(r"\d+x\d+x\d+", row["grid"]) for row in launches if row["kind"] == "kernel")
        begins = int(launches[0]["start_ns"]) / 1e9
        assert found.ended - 0.05 <= begins <= found.telemetry["time"][-1]
        assert found.energy_tokens == found.tokens.sum()
        rows, _ = read_roofline(found.folder)
        parts = {row.part: row for row in rows}
        for part in ("query, key, value", "feed-forward", "attention", "clipping and optimizer"):
            assert 0.1 < (parts[part].share_of_floor or 0) < 1.1
        assert parts["other"].share_of_step < 0.05 if "other" in parts else True
    path, result = profile_report([H200], out=tmp_path / "report.html")
    assert_page_is_whole(path.read_text())
    assert result.joules_per_million_tokens is not None
    assert 100 < result.joules_per_million_tokens < 1e6
