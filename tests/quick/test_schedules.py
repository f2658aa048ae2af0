"""The learning rate: by hand from published configurations, in closed form, and what holds whatever the settings."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.config.resolve import resolve
from bertrain.config.settings import ScheduleSettings
from bertrain.optim.schedules import learning_rate
from tests import helpers

DECAYS = get_args(get_type_hints(ScheduleSettings)["decay"])


def checked(schedule: ScheduleSettings) -> ScheduleSettings:
    return replace(helpers.tiny_settings(), schedule=schedule).check().schedule


def rate(step: int, max_steps: int, **schedule: Any) -> float:
    return learning_rate(step, 1.0, checked(ScheduleSettings(**schedule)), max_steps)


# --- published ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("warmup", "start", "max_steps", "step", "expected"),
    [
        (0, 0, 3680, 0, 1.0),  # H100 1x8x48: no warm-up
        (0, 0, 3680, 1840, 0.5),
        (10000, -9500, 1024, 0, 0.95),  # H100 64x8x3: nearly up, for 500 steps
        (10000, -9500, 1024, 499, 0.9999),
        (10000, -9500, 1024, 500, 1 - 500 / 1024),
        (256, -76, 820, 0, 76 / 256),  # A100 128x8x2
        (256, -76, 820, 180, 1 - 180 / 820),
        (170200, -200000, 600, 0, 1.0),  # GB200 128x4x8: a start beyond the warm-up's length switches it off
        (0, -700, 700, 350, 0.5),  # the reference's convergence points at 6,144
    ],
)
def test_nvidias_configurations(warmup: int, start: int, max_steps: int, step: int, expected: float) -> None:
    assert rate(step, max_steps, warmup_steps=warmup, start_warmup_step=start) == pytest.approx(expected, abs=1e-12)


def test_samsungs_configuration() -> None:
    """3.93e-4, 82 steps of warm-up from -16, a line from step 82 to 4.945e-5 at step 179 of 299.

    Theirs runs above the base rate from the end of the warm-up, at step 66, until step 82; ours stays at it.
    """
    base, end = 3.9299421615882676e-4, 4.94549e-5
    schedule = checked(
        ScheduleSettings(
            warmup_steps=82, start_warmup_step=-16, decay="linear", decay_start=82, decay_steps=179, floor=end / base
        )
    )
    rates = [learning_rate(step, base, schedule, 299) for step in range(299)]
    assert rates[0] == pytest.approx(base * 16 / 82)
    assert rates[65] == pytest.approx(3.88e-4, rel=1e-3)
    assert rates[66:83] == pytest.approx([base] * 17)
    assert rates[130] == pytest.approx(end + (base - end) * (1 - 48 / 97))
    assert rates[179:] == pytest.approx([end] * 120)


# --- closed form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"decay": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({"decay": "polynomial", "power": 2.0}, [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]),
        ({"decay": "square-root"}, [1.0, math.sqrt(3) / 2, math.sqrt(0.5), 0.5, 0.0, 0.0]),
        ({"decay": "1-sqrt"}, [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0, 0.0]),
        ({"decay": "1-sqrt", "decay_share": 0.5}, [1.0, 1.0, 1.0, 1 - math.sqrt(0.5), 0.0, 0.0]),
        ({"decay": "linear", "decay_share": 1.0}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({"decay": "linear", "warmup_share": 0.25, "decay_share": 0.5}, [0.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ({"decay": "linear", "warmup_steps": 1, "decay_share": 0.25, "floor": 0.5}, [0.0, 1.0, 1.0, 1.0, 0.5, 0.5]),
        ({"decay": "cosine"}, [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0.0, 0.0]),
        ({"decay": "constant"}, [1.0] * 6),
        ({"decay": "linear", "floor": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"decay": "cosine", "floor": 0.5}, [1.0, (6 + math.sqrt(2)) / 8, 0.75, (6 - math.sqrt(2)) / 8, 0.5, 0.5]),
        ({"decay": "linear", "decay_steps": 2}, [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
        ({"decay": "linear", "decay_start": 2}, [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ({"decay": "linear", "warmup_steps": 2, "decay_start": 2}, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]),
        ({"decay": "linear", "warmup_steps": 2}, [0.0, 0.5, 0.5, 0.25, 0.0, 0.0]),
        ({"decay": "constant", "warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"decay": "linear", "decay_start": 9}, [1.0] * 6),  # the run ends before the decay begins
    ],
)
def test_decays_of_four_steps(schedule: dict[str, Any], expected: list[float]) -> None:
    assert [rate(step, 4, **schedule) for step in range(6)] == pytest.approx(expected, abs=1e-12)


def test_names_of_powers() -> None:
    """linear and square-root are polynomials of powers 1 and 1/2, by names that cannot be mistyped."""
    for name, power in (("linear", 1.0), ("square-root", 0.5)):
        for step in range(0, 100, 3):
            assert rate(step, 90, decay=name) == pytest.approx(rate(step, 90, decay="polynomial", power=power))


# --- whatever the settings --------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSettings:
    """Any schedule that is not refused."""
    decay = draw(st.sampled_from(DECAYS))
    falls = {}
    if decay != "constant":
        falls = {"floor": draw(st.floats(0, 1))}
        if draw(st.booleans()):
            falls["decay_share"] = draw(st.floats(0, 1))
        else:
            falls |= {
                "decay_start": draw(st.integers(0, 60)),
                "decay_steps": draw(st.sampled_from([0, 1, 30, 61, 100])),
            }
    schedule = ScheduleSettings(
        decay=decay,
        warmup_steps=draw(st.integers(0, 300)),
        start_warmup_step=-draw(st.integers(0, 400)),
        power=draw(st.floats(0, 4)) if decay == "polynomial" else 1.0,
        **falls,  # type: ignore[arg-type]
    )
    try:
        return checked(schedule)
    except UserError:
        assume(False)
        raise


@given(schedules(), st.floats(1e-6, 1.0), st.integers(1, 120))
def test_the_rate_stays_between_floor_and_base_and_never_rises_again(
    schedule: ScheduleSettings, base: float, max_steps: int
) -> None:
    rates = [learning_rate(step, base, schedule, max_steps) for step in range(max_steps + 5)]
    assert all(0 <= one <= base for one in rates)
    warmup_end = max(0, schedule.warmup_steps + schedule.start_warmup_step)
    assert all(one < other for one, other in pairwise(rates[:warmup_end]))
    falling = rates[warmup_end:]
    assert all(one >= other for one, other in pairwise(falling))
    assert all(one >= schedule.floor * base * (1 - 1e-12) for one in falling)


# --- contradictions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"decay": "cosine", "power": "2"}, ["cosine", "--schedule.power 1"]),
        ({"decay": "linear", "power": "0.5"}, ["linear", "--schedule.power 1"]),
        ({"decay": "constant", "floor": "0.1"}, ["constant", "--schedule.floor 0"]),
        ({"decay": "constant", "decay_steps": "500"}, ["constant", "--schedule.decay_steps 0"]),
        ({"warmup_steps": "0", "decay_start": "50", "decay_steps": "50"}, ["decay_start", "decay_steps 50"]),
        ({"decay": "constant", "decay_share": "0.2"}, ["constant", "--schedule.decay_share 0"]),
        ({"decay_share": "0.2", "decay_start": "50"}, ["decay_share", "decay_start"]),
        ({"warmup_steps": "0", "warmup_share": "0.4", "decay_share": "0.7"}, ["warmup_share", "decay_share", "1.1"]),
        ({"warmup_steps": "100", "decay_steps": "50"}, ["step 100", "decay_steps 50"]),
    ],
)
def test_contradictions_are_refused(overrides: dict[str, str], named: list[str]) -> None:
    with helpers.refused("conflicting-settings", *named):
        resolve("bert-tiny", [(f"schedule.{name}", value) for name, value in overrides.items()])


def test_a_power_that_says_the_same_is_no_contradiction() -> None:
    """A recipe's power of 1/2 agrees with a square root."""
    assert resolve("bert-large-phase1", [("schedule.decay", "square-root")]).schedule.power == 0.5
