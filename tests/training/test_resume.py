"""Resuming from an older checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertrain.ranks.restart import ROLLED_BACK
from bertrain.training.start import pretrain, resume, roll_back
from tests import helpers


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(train__max_steps=6, checkpoint__every_steps=2), data, run)
    return data, run


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_nothing_is_put_aside_before_all_was_checked(trained: tuple[Path, Path]) -> None:
    _, run = trained
    before = checkpoints(run)
    with helpers.refused("missing-data", "nowhere"):
        resume(run, [("evaluate.data", "nowhere")], from_step=2)
    with helpers.refused("unknown-checkpoint", 3, "2, 4, 6"):
        resume(run, from_step=3)
    with helpers.refused("fixed-setting", "batch.auto", "batch.token_budget"):
        resume(run, [("batch.auto", "true")], from_step=2)
    assert checkpoints(run) == before


def test_ranks_do_not_go_back_again(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher goes back before it starts them; whatever they have done since stays."""
    _, run = trained
    calm = helpers.losses(run)
    roll_back(run, 2)
    assert "step-00000004" not in checkpoints(run)
    monkeypatch.setenv(ROLLED_BACK, "1")
    for _ in range(2):  # the second time, as ranks that were started again
        resume(run, from_step=2)
        assert {"step-00000006", "aside-1-step-00000006"} <= checkpoints(run)
        assert "aside-2-step-00000006" not in checkpoints(run)
    assert helpers.losses(run) == calm
