"""Steps that grow: by hand, and what holds whatever the ramp."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.config.settings import BatchSettings
from bertrain.data.feed.loader import Loader
from bertrain.data.feed.step_size import StepSize
from bertrain.data.formats.shards import Shards
from tests import helpers


def sizes_of(size: StepSize, steps: int) -> list[int]:
    found, position = [], 0
    for _ in range(steps):
        found.append(size.at(position))
        position += found[-1]
    return found


def test_a_ramp_in_sequences_by_hand() -> None:
    """4 to 20 over 40 sequences of 10 tokens: a sequence more for each 2.5 before the step."""
    size = StepSize.of(BatchSettings(sequences=20, ramp_from=4, ramp_tokens=400), Fraction(10))
    assert sizes_of(size, 8) == [4, 5, 7, 10, 14, 20, 20, 20]
    assert [size.examples_in(steps) for steps in (0, 1, 5, 6, 8)] == [0, 4, 40, 60, 100]
    assert [size.steps_for(examples) for examples in (0, 2, 4, 40, 60, 70)] == [0, 0.5, 1, 5, 6, 6.5]
    assert (size.examples_in(2, 9), size.steps_for(17, 9)) == (17, 2)
    assert size.full_steps(8) == 5


def test_a_ramp_in_tokens_by_hand() -> None:
    """100 to 500 over 1,000 tokens; tokens before a position are by the mean length of 12.5."""
    size = StepSize.of(BatchSettings(tokens=500, ramp_from=100, ramp_tokens=1000), Fraction(25, 2))
    assert [size.at(position) for position in (0, 1, 40, 79, 80, 10**9)] == [100, 104, 300, 494, 500, 500]
    assert size.examples_in(1) == 8
    assert size.steps_for(8) == 1


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 20_000), st.integers(1, 300), st.integers(0, 5000))
def test_whatever_the_ramp(first: int, more: int, ramp: int, steps: int, position: int) -> None:
    size = StepSize(first + more, first, ramp, Fraction(7, 2))
    found = [size.at(one) for one in range(0, 9000, 100)]
    assert found == sorted(found)
    assert found[0] == first
    assert size.at(ramp) == size.full
    examples = size.examples_in(steps, position)
    assert size.steps_for(examples, position) == pytest.approx(steps, rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "code", "named"),
    [
        ({"batch__ramp_tokens": 900}, "conflicting-settings", "batch.ramp_from"),
        ({"batch__ramp_from": 4}, "conflicting-settings", "batch.ramp_tokens"),
        ({"batch__ramp_tokens": 900, "batch__ramp_from": 25}, "conflicting-settings", "full size of a step, 24"),
        (
            {"batch__ramp_tokens": 900, "batch__ramp_from": 30, "batch__sequences": 0, "batch__tokens": 900},
            "step-too-small",
            "data.max_seq_length 64",
        ),
        (
            {"batch__ramp_tokens": 900, "batch__ramp_from": 4, "batch__shares": "3 3 3 3"},
            "conflicting-settings",
            "shares",
        ),
    ],
)
def test_ramps_that_make_no_sense_are_refused(changed: dict[str, object], code: str, named: str) -> None:
    with helpers.refused(code, named):
        helpers.tiny_settings(**changed)


# --- on data --------------------------------------------------------------------------------------------

RAMP = {"batch__sequences": 0, "batch__tokens": 900, "batch__ramp_from": 100, "batch__ramp_tokens": 5000}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("data"))


def test_every_example_comes_once_per_epoch_on_any_number_of_ranks(data: Path) -> None:
    shards, settings = Shards.open(data), helpers.tiny_settings(**RAMP)
    one = list(Loader(shards, settings).steps(0, 0, 30))
    others = [list(Loader(shards, settings, rank=rank, world=3).steps(0, 0, 30)) for rank in range(3)]
    position = 0
    for number, step in enumerate(one):
        assert step.first_position == position
        assert {other[number].num_tokens for other in others} == {step.num_tokens}
        assert sum(batch.num_tokens for other in others for batch in other[number].bins) == step.num_tokens
        assert step.num_tokens <= Loader(shards, settings).step_size.at(position)
        position = step.next_position
    assert one[-1].num_tokens > 6 * one[0].num_tokens
    direct = Loader(shards, settings).step(20, one[20].first_position)
    assert direct.num_tokens == one[20].num_tokens
