"""The loss scale, step by step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bertrain.run.loss_scale import GROWTH_STEPS, MINIMUM, START, LossScale, next_scale
from tests.training.test_loss_scale import CPU


def as_numbers(scale: float, streak: int, applied: bool) -> tuple[float, int]:
    """The rule, written for one number at a time."""
    if not applied:
        return max(scale / 2, MINIMUM), 0
    if streak + 1 == GROWTH_STEPS:
        return scale * 2, 0
    return scale, streak + 1


@given(st.integers(0, 30), st.integers(0, GROWTH_STEPS - 1), st.booleans())
def test_next_scale_is_the_rule(exponent: int, streak: int, applied: bool) -> None:
    scale, longer = next_scale(torch.tensor(2.0**exponent), torch.tensor(streak), torch.tensor(float(applied)))
    assert (scale.item(), longer.item()) == as_numbers(2.0**exponent, streak, applied)


def test_it_doubles_after_two_thousand_steps_and_is_halved_down_to_one() -> None:
    scale = LossScale(CPU)
    tensor, one, zero = scale.scale, torch.tensor(1.0), torch.tensor(0.0)
    for _ in range(GROWTH_STEPS):
        assert scale.scale == START
        scale.update(one)
    assert scale.scale == 2 * START
    for _ in range(30):
        scale.update(zero)
    assert scale.scale == MINIMUM
    assert scale.scale is tensor, "a CUDA graph holds it"


def test_its_state_goes_on_where_it_was() -> None:
    scale, continued = LossScale(CPU), LossScale(CPU)
    scale.update(torch.tensor(0.0))
    for _ in range(GROWTH_STEPS - 1):
        scale.update(torch.tensor(1.0))
    continued.load({name: tensor.clone() for name, tensor in scale.state().items()})
    for one in (scale, continued):
        one.update(torch.tensor(1.0))
        assert one.scale == START
