"""The learning rate against numbers worked out by hand from MLPerf's published configurations."""

from __future__ import annotations

import pytest

from bertrain.optim.schedules import learning_rate
from bertrain.settings import ScheduleSettings


def rate(step: int, max_steps: int, **schedule: float) -> float:
    return learning_rate(step, 1.0, ScheduleSettings(**schedule), max_steps)  # type: ignore[arg-type]


def test_no_warm_up_is_a_straight_line_to_zero() -> None:
    assert [rate(step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_jump_onto_the_decay_line() -> None:
    """H100 8x8: start -200000, warm-up 200330 of 700 steps: all but constant, then 1 - 330/700."""
    schedule = {"warmup_steps": 200330, "start_warmup_step": -200000}
    assert rate(0, 700, **schedule) == pytest.approx(0.99835, abs=1e-5)
    assert rate(329, 700, **schedule) == pytest.approx(1.0, abs=1e-5)
    assert rate(330, 700, **schedule) == pytest.approx(1 - 330 / 700)


def test_warm_up_that_begins_part_way_up() -> None:
    """H100 434x8: start -100, warm-up 290 of 480 steps: begins at 34 %, peaks at step 190."""
    schedule = {"warmup_steps": 290, "start_warmup_step": -100}
    assert rate(0, 480, **schedule) == pytest.approx(100 / 290)
    assert rate(189, 480, **schedule) == pytest.approx(289 / 290)
    assert rate(190, 480, **schedule) == pytest.approx(1 - 190 / 480)


def test_decay_reaches_zero_where_it_is_told_to_and_stays_there() -> None:
    assert rate(50, 100, decay_steps=50) == 0.0
    assert rate(80, 100, decay_steps=50) == 0.0
    assert rate(25, 100, decay_steps=50, power=0.5) == pytest.approx(0.5**0.5)
