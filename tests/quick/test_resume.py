"""What resuming refuses, it refuses before it touches the run; what it is told once, it does once."""

from __future__ import annotations

from pathlib import Path

from bertrain.config.resolve import parse_overrides
from bertrain.training.announce import dry_run
from tests import helpers


def test_a_setting_can_be_emptied() -> None:
    assert parse_overrides(["--train.hang_timeout", "", "--train.max_time="]) == [
        ("train.hang_timeout", ""),
        ("train.max_time", ""),
    ]
    with helpers.refused("missing-value", "hang_timeout"):
        parse_overrides(["--train.hang_timeout"])


def test_an_epsilon_of_nothing_is_refused() -> None:
    """Where a gradient has always been zero it would make 0 / 0 of it."""
    with helpers.refused("out-of-range", "optimizer.epsilon"):
        helpers.tiny_settings(optimizer__epsilon=0)


def test_a_dry_run_tells_what_may_end_the_run_and_refuses_what_it_would(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    told = dry_run(helpers.tiny_settings(train__max_samples=48), data)
    assert "steps: 20, about 4.9 epochs; fewer if train.max_samples 48 comes first" in told
    with helpers.refused("missing-data", "nowhere"):
        dry_run(helpers.tiny_settings(evaluate__data=tmp_path / "nowhere"), data)
