"""What resuming refuses, it refuses before it touches the run; what it is told once, it does once."""

from __future__ import annotations

from bertrain.config.resolve import parse_overrides
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
