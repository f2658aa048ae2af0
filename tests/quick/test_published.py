"""Published MLPerf results beside bertrain: the shipped table, measured rates, predictions, `mlperf show`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bertrain.cli.main import app
from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import resolve
from bertrain.mlperf.published import (
    CPU_TOKENS_PER_S,
    MEASURED,
    compare_batch,
    compare_recipe,
    headlines,
    published_results,
)
from tests import helpers

ROOT = Path(__file__).parents[2]
LOG = ROOT / "tests" / "golden" / "mlperf-h200-result_3.txt"
RESULTS = ROOT / "benchmarks" / "results"


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["mlperf", "show", *arguments])
    assert result.exit_code == 0, result.exception
    return result.output


def test_every_recipe_of_the_table_exists_and_has_its_batch() -> None:
    for one in published_results():
        if one.recipe:
            assert one.recipe in recipe_names()
            assert resolve(one.recipe).nominal_sequences == one.batch, one


def test_the_measured_rates_are_those_of_the_raw_results() -> None:
    raw = json.loads((RESULTS / "gpu_pretrain.json").read_text())
    for (_, precision), rate in MEASURED.items():
        (found,) = (
            row["sequences_per_s"]
            for row in raw
            if (row["system"], row["precision"], row["token_budget"], row["max_seq_length"])
            == ("bertrain", precision, 24576, 512)
        )
        assert rate == found
    assert json.loads((RESULTS / "cpu_pretrain.json").read_text())[0]["real_tokens_per_s"] == CPU_TOKENS_PER_S


def test_the_fastest_of_each_gpu_is_the_headline() -> None:
    times = {one.gpu: one.minutes for one in headlines(batch=768, count=8)}
    assert times == {"gb200": 3.4145, "b200": 3.4923, "h200": 4.7643, "h100": 5.3057}
    assert [one.system for one in headlines(recipe="mlperf-samsung-128x8x16")] == ["Samsung supercomputer21 n128"]


def test_a_measured_rate_stands_beside_the_published_one() -> None:
    """HPE's 8 H200 reach 8,128 sequences/s, 1,016 on each; bertrain 1,331.4 on one."""
    (h200,) = (one for one in compare_recipe("mlperf-nvidia-1x8x48-packed") if one.published.gpu == "h200")
    assert "1.31 times" in "\n".join(h200.lines())
    assert h200.predicted_s == pytest.approx(267.6, abs=0.1), "as docs/how-to-plan.md has it"


@pytest.mark.parametrize("recipe", ["mlperf-nvidia-1x8x48-packed", "mlperf-samsung-128x8x16"])
def test_the_named_command_prints_the_prediction(recipe: str) -> None:
    found = compare_recipe(recipe)[-1]
    done = CliRunner().invoke(app, [*shlex.split(found.command)[1:], "--json"])
    (plan,) = json.loads(done.stdout)["plans"]
    assert plan["seconds"] == found.predicted_s
    assert plan["sequences_per_s"] == found.predicted_sequences_per_s


def test_a_cpu_has_a_measurement_and_no_prediction() -> None:
    (intel,) = compare_batch(2048, 32)
    text = "\n".join(intel.lines())
    assert "85.90 min on 32 ranks" in text
    assert "286.5 tokens/s" in text
    assert intel.predicted_s is None
    assert not intel.command


def test_a_log_names_the_results_it_corresponds_to() -> None:
    text = shown(str(LOG))
    assert "published: 4.76 min on 8 h200 (HPE XD670 n1, v5.0)" in text
    assert "predicted, never run: 4.46 min" in text
    record = json.loads(shown(str(LOG), "--json"))
    assert record["ranks"] == 8
    assert {one["published"]["gpu"] for one in record["published"]} == {"h100", "h200", "b200", "gb200"}
    assert "nothing in our table; batch 768, accelerators 5" in shown(str(LOG), "--ranks", "5")


def test_a_log_without_its_batch_corresponds_to_none(tmp_path: Path) -> None:
    log = tmp_path / "result.txt"
    log.write_text("".join(line for line in LOG.open() if '"global_batch_size"' not in line))
    assert "nothing in our table; batch unknown, accelerators 8" in shown(str(log))


def test_a_recipe_names_its_result() -> None:
    text = shown("mlperf-nvidia-434x8x2-packed")
    assert "7.2 s on 3,472 h100" in text
    assert json.loads(shown("mlperf-intel-8x4x64", "--json"))["recipe"] == "mlperf-intel-8x4x64"


def test_other_recipes_have_none() -> None:
    with helpers.refused("no-published-result", "bert-base", "mlperf-intel-8x4x64"):
        compare_recipe("bert-base")
    refused = CliRunner().invoke(app, ["mlperf", "show", "mlperf-intel-8x4x64", "--plot", "x.svg"])
    assert getattr(refused.exception, "code", None) == "conflicting-options"
