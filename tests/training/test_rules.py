"""Trainings with MADGRAD, StableAdamW, ACClip and Muon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertrain.training.start import pretrain, resume
from tests import helpers


def test_madgrad_begins_where_the_weights_are(tmp_path: Path) -> None:
    """Also with --init, which replaces the weights after the optimizer was made; a resumed run keeps that place."""
    data, first, second = helpers.make_data(tmp_path), tmp_path / "first", tmp_path / "second"
    common = {"train__max_steps": 4, "checkpoint__every_steps": 2, "model__initializer_range": 0.05}
    pretrain(helpers.tiny_settings(**common), data, first)
    pretrain(helpers.tiny_settings(**common, optimizer__name="madgrad"), data, second, init=str(first))
    calm, weights = helpers.losses(second), helpers.final_weights(second)

    taken = helpers.final_weights(first)
    kept = load_file(second / "checkpoints" / "step-00000004" / "optimizer.safetensors")
    assert {name for name in kept if name.startswith("start/")} == {f"start/{name}" for name in taken}
    for name, tensor in taken.items():
        assert torch.equal(kept[f"start/{name}"], tensor), name

    (second / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    resume(second)
    assert helpers.losses(second) == calm
    for name, tensor in helpers.final_weights(second).items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("family", helpers.FAMILIES)
@pytest.mark.parametrize("name", ["madgrad", "acclip", "muon", "stableadamw"])
def test_a_model_learns(name: str, family: str, tmp_path: Path) -> None:
    """By the settings alone; tests/numerics shows it at length for the others."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    common = helpers.FAMILIES[family] | {"optimizer__learning_rate": 5e-3, "train__max_steps": 25}
    pretrain(helpers.tiny_settings(**common, optimizer__name=name), data, run)
    losses = helpers.losses(run)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3, losses
    assert json.loads((run / "config.json").read_text())["settings"]["optimizer"]["name"] == name


@pytest.mark.parametrize("family", helpers.FAMILIES)
@pytest.mark.parametrize("name", ["muon", "stableadamw"])
def test_a_resumed_run_goes_on_to_the_last_bit(name: str, family: str, tmp_path: Path) -> None:
    data, whole, stopped = helpers.make_data(tmp_path), tmp_path / "whole", tmp_path / "stopped"
    common = helpers.FAMILIES[family] | {"train__max_steps": 4, "checkpoint__every_steps": 2}
    settings = helpers.tiny_settings(**common, optimizer__name=name)
    for run in (whole, stopped):
        pretrain(settings, data, run)
    (stopped / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    resume(stopped)
    assert helpers.losses(stopped) == helpers.losses(whole)
    files = [run / "checkpoints" / "step-00000004" / "optimizer.safetensors" for run in (whole, stopped)]
    states = [load_file(file) for file in files]
    weights = [helpers.final_weights(run) for run in (whole, stopped)]
    for one, other in (states, weights):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    is_muon = name == "muon"  # whose matrices have no second moment
    assert states[0]["second_moment/layers.0.expand.weight"].any() != is_muon
    assert states[0]["second_moment/embeddings.words.weight"].any()
