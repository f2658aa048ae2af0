"""Two phases: a run that begins with another's weights, positions and optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertrain.base.errors import UserError
from bertrain.model.bert import Bert
from bertrain.model.initialization import initialize
from bertrain.run import checkpoint
from bertrain.training.start import pretrain
from bertrain.weights.export import export
from tests import helpers

POSITIONS = "embeddings.positions.weight"
SECOND = {
    "model__max_positions": 96,
    "data__max_seq_length": 96,
    "train__init_positions": "extend",
    "batch__sequences": 8,
}
STILL = {"train__max_steps": 1, "optimizer__learning_rate": 0, "schedule__warmup_steps": 0}


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A first phase of six steps with 64 positions; data of 64 and of 96 tokens lie beside it."""
    short = helpers.make_data(tmp_path / "short", max_seq_length=64)
    helpers.make_data(tmp_path / "long", max_seq_length=96)
    pretrain(helpers.tiny_settings(train__max_steps=6, batch__sequences=8), short, tmp_path / "first")
    return tmp_path / "first"


def test_positions_are_extended_by_fresh_ones(first: Path, tmp_path: Path) -> None:
    data = tmp_path / "long" / "data"
    settings = helpers.tiny_settings(**SECOND, **STILL)
    pretrain(settings, data, tmp_path / "second", init=str(first))
    before, after = helpers.final_weights(first), helpers.final_weights(tmp_path / "second")
    fresh = Bert(settings.model)
    initialize(fresh, settings.train.seed)
    assert torch.equal(after[POSITIONS][:64], before[POSITIONS])
    assert torch.equal(after[POSITIONS][64:], fresh.embeddings.positions.weight[64:])
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items() if name != POSITIONS)
    with pytest.raises(UserError, match=r"positions.weight .*\(64, 32\).*\(96, 32\).*--train.init_positions extend"):
        pretrain(
            helpers.tiny_settings(**SECOND | {"train__init_positions": "same"}), data, tmp_path / "r", init=str(first)
        )
    fewer = helpers.tiny_settings(model__max_positions=48, data__max_seq_length=48, train__init_positions="extend")
    with helpers.refused("example-too-long", "64 tokens"):
        pretrain(fewer, tmp_path / "short" / "data", tmp_path / "r", init=str(first))
    assert not (tmp_path / "r").exists()


def test_a_kept_optimizer_goes_on_where_it_was(first: Path, tmp_path: Path) -> None:
    """One step of no gradient (all of it is clipped away) leaves the moments decayed by beta, and nothing else."""
    settings = helpers.tiny_settings(
        **SECOND, **STILL, train__init_optimizer="keep", optimizer__clip_norm=1e-30, model__hidden_dropout=0
    )
    pretrain(settings, tmp_path / "long" / "data", tmp_path / "second", init=str(first))
    before = load_file(first / "checkpoints" / "step-00000006" / "optimizer.safetensors")
    after = load_file(tmp_path / "second" / "checkpoints" / "step-00000001" / "optimizer.safetensors")
    for key, tensor in before.items():
        beta = settings.optimizer.beta1 if key.startswith("first") else settings.optimizer.beta2
        torch.testing.assert_close(after[key][: len(tensor)], beta * tensor, rtol=1e-5, atol=1e-12)
    rows = after[f"first_moment/{POSITIONS}"]
    assert len(rows) == 96
    assert float(rows[64:].abs().max()) < 1e-20, "rows that were not there begin at zero"
    assert checkpoint.read_progress(tmp_path / "second" / "checkpoints" / "step-00000001").updates == 7


def test_a_reset_optimizer_begins_anew(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(
        helpers.tiny_settings(train__max_steps=2), tmp_path / "short" / "data", tmp_path / "second", init=str(first)
    )
    assert "optimizer: starts with a new state" in capsys.readouterr().out
    assert checkpoint.read_progress(tmp_path / "second" / "checkpoints" / "step-00000002").updates == 2


def test_what_cannot_be_kept_is_refused(first: Path, tmp_path: Path) -> None:
    data = tmp_path / "short" / "data"

    def refused(code: str, *named: str, init: Path | str = "", **settings: object) -> None:
        with helpers.refused(code, *named):
            pretrain(helpers.tiny_settings(**settings), data, tmp_path / "refused", init=str(init))
        assert not (tmp_path / "refused").exists()

    keep = {"train__init_optimizer": "keep"}
    refused("other-optimizer", "adamw", "lamb", init=first, **keep, optimizer__name="lamb")
    without_pairs = tmp_path / "without pairs"
    pretrain(helpers.tiny_settings(model__nsp=False, train__max_steps=1), data, without_pairs)
    refused("other-model", "next_sentence", "reset", init=without_pairs, **keep)
    export(first, tmp_path / "exported")
    refused("no-optimizer-state", "exported", init=tmp_path / "exported", **keep)
    refused("missing-init", "train.init_optimizer keep", **keep)
    refused("missing-init", "train.init_positions extend", train__init_positions="extend")


def test_a_kept_madgrad_begins_new_positions_where_they_are(tmp_path: Path) -> None:
    """Its state holds where the weights began; positions that were not there begin as they were initialized."""
    short = helpers.make_data(tmp_path / "short", max_seq_length=64)
    long = helpers.make_data(tmp_path / "long", max_seq_length=96)
    first, second = tmp_path / "first", tmp_path / "second"
    common = {"optimizer__name": "madgrad", "batch__sequences": 8, "train__max_steps": 2}
    pretrain(helpers.tiny_settings(**common), short, first)
    settings = helpers.tiny_settings(**common | SECOND, train__init_optimizer="keep")
    pretrain(settings, long, second, init=str(first))
    starts = [checkpoint.read_checkpoint(run / "checkpoints" / "step-00000002").optimizer for run in (first, second)]
    before, after = (start[f"start/{POSITIONS}"] for start in starts)
    fresh = Bert(settings.model)
    initialize(fresh, settings.train.seed)
    assert torch.equal(after[:64], before)
    assert torch.equal(after[64:], dict(fresh.named_parameters())[POSITIONS].detach()[64:])
    assert after[64:].abs().max() > 0
