"""What resuming refuses, it refuses before it touches the run; what it is told once, it does once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertrain.base.errors import UserError
from bertrain.config.resolve import parse_overrides
from bertrain.ranks.restart import ROLLED_BACK
from bertrain.training.announce import dry_run
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
    with pytest.raises(UserError, match="nowhere"):
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


def test_a_setting_can_be_emptied() -> None:
    assert parse_overrides(["--train.hang_timeout", "", "--train.max_time="]) == [
        ("train.hang_timeout", ""),
        ("train.max_time", ""),
    ]
    with pytest.raises(UserError, match="hang_timeout"):
        parse_overrides(["--train.hang_timeout"])


def test_an_epsilon_of_nothing_is_refused() -> None:
    """Where a gradient has always been zero it would make 0 / 0 of it."""
    with pytest.raises(UserError, match=r"optimizer\.epsilon"):
        helpers.tiny_settings(optimizer__epsilon=0)


def test_a_dry_run_tells_what_may_end_the_run_and_refuses_what_it_would(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    told = dry_run(helpers.tiny_settings(train__max_samples=48), data)
    assert "steps: 20, about 4.9 epochs; fewer if train.max_samples 48 comes first" in told
    with pytest.raises(UserError, match="nowhere"):
        dry_run(helpers.tiny_settings(evaluate__data=tmp_path / "nowhere"), data)
