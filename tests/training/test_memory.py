"""Runs refused for want of memory, and the token budget a run settles on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.data.formats.shards import Shards
from bertrain.training import resolve_auto
from bertrain.training.start import pretrain, resume
from tests import helpers


def test_a_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    settings = helpers.tiny_settings(batch__token_budget=10**10)
    with helpers.refused("out-of-memory", "--batch.token_budget"):
        pretrain(settings, data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def budget_of(run: Path) -> int:
    return int(json.loads((run / "config.json").read_text())["settings"]["batch"]["token_budget"])


def test_the_budget_is_a_ranks_share_of_a_step_and_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    common = {"batch__auto": True, "batch__token_budget": 64, "checkpoint__every_steps": 2}
    settings = helpers.tiny_settings(train__max_steps=4, **common)
    pretrain(settings, data, run)
    mean = float(Shards.open(data).lengths.mean())
    budget = budget_of(run)
    assert 24 * mean < budget <= 24 * mean + 64 + 64
    assert budget % 64 == 0
    said = capsys.readouterr().out
    assert f"batch.auto: bins of up to {budget:,} tokens, a rank's share of a step; about" in said
    calm = helpers.losses(run)
    # The same command, and resume, on a machine with less memory: the run keeps the budget it has.
    monkeypatch.setattr(resolve_auto, "FILLED", 0.0)
    (run / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    pretrain(settings, data, run)
    assert f"batch.auto: bins of up to {budget:,} tokens, as the run began" in capsys.readouterr().out
    (run / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    resume(run)
    assert budget_of(run) == budget
    assert helpers.losses(run) == calm
