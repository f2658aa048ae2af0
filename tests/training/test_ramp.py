"""Runs whose steps grow: resumed, annealed, counted and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertrain.data.formats.shards import Shards
from bertrain.planning.devices import find_gpu, find_network
from bertrain.planning.plan import Wish, make_plan
from bertrain.planning.step_time import Cluster
from bertrain.training.anneal import anneal
from bertrain.training.announce import dry_run
from bertrain.training.benchmark import only_steps
from bertrain.training.resolve_auto import fit_to_data
from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.launched import records

RAMP: dict[str, Any] = {
    "batch__sequences": 0, "batch__tokens": 900, "batch__ramp_from": 100, "batch__ramp_tokens": 5000,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_a_run_resumed_within_the_ramp_goes_on_to_the_last_bit(family: str, data: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    common = helpers.FAMILIES[family] | RAMP | {"schedule__decay": "constant", "schedule__warmup_steps": 0}
    settings = helpers.tiny_settings(**common, train__max_steps=12, checkpoint__every_steps=4)
    pretrain(settings, data, whole)
    pretrain(settings, data, stopped)
    for step in (12, 8):
        (stopped / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    resume(stopped)
    tokens = [step["tokens"] for step in records(whole)]
    assert tokens == [step["tokens"] for step in records(stopped)]
    assert tokens[4] < tokens[8] < 900, "the checkpoint is within the ramp"
    expected = helpers.final_weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in helpers.final_weights(stopped).items())

    # An annealing from there goes on within the ramp, too.
    anneal(whole, tmp_path / "annealed", 4, which="8")
    assert [step["tokens"] for step in records(tmp_path / "annealed")] == tokens[8:]


def test_epochs_and_predictions_count_the_steps(data: Path, tmp_path: Path) -> None:
    """Two passes over the data are two passes, give or take a step; `plan` and `--dry-run` know how long it takes."""
    shards = Shards.open(data)
    growing = {"batch__ramp_from": 2, "batch__ramp_tokens": 5000}
    settings, notes = fit_to_data(helpers.tiny_settings(**growing, train__epochs=2), shards)
    steps = settings.train.max_steps
    assert f"train.max_steps {steps} (2 epochs)" in notes[0]
    assert pretrain(settings, data, tmp_path / "run").samples == pytest.approx(2 * len(shards), abs=24)
    constant, _ = fit_to_data(helpers.tiny_settings(train__epochs=2), shards)
    assert constant.train.max_steps < 0.8 * steps
    shown = dry_run(settings, data)
    assert f"steps: {steps}, about 2." in shown
    assert "a step is 2 to 24 sequences, growing over the first 5,000 tokens" in shown
    assert f"for {steps} steps" in shown
    assert "for the first step; a rough estimate" in dry_run(settings, data, world=1000)

    gpu = find_gpu("h100")
    cluster = Cluster(gpu, find_network("nvlink+ib-ndr", gpu, 8), 1, 8)
    lengths = np.asarray(shards.lengths, dtype=np.int64)
    plans = [make_plan(Wish(one, lengths, cluster), 1) for one in (settings, constant)]
    assert plans[0].step.seconds == plans[1].step.seconds
    assert plans[0].seconds < plans[1].seconds * steps / constant.train.max_steps
    assert only_steps(settings, 5).batch.ramp_tokens == 0, "a benchmark times full steps"


@pytest.mark.parametrize("measure", [RAMP, {"batch__ramp_from": 2, "batch__ramp_tokens": 5000}])
def test_the_metrics_show_the_growth(measure: dict[str, object], data: Path, tmp_path: Path) -> None:
    pretrain(helpers.tiny_settings(**measure, train__max_steps=16), data, tmp_path / "run")
    steps = records(tmp_path / "run")
    tokens = np.array([step["tokens"] for step in steps])
    assert tokens[0] < 200
    assert tokens[-1] > 4 * tokens[0]
