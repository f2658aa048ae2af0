"""Grouped attention against its specification, forward and backward."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bertrain.kernels.arguments import Dropout
from bertrain.kernels.attention import ragged_attention_plain
from bertrain.model.attention import plan_groups


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    window=st.none() | st.integers(1, 40),
    seed=st.integers(0, 100),
)
@example(lengths=[40, 40, 40], window=None, seed=0)  # every token is its own slot
@example(lengths=[40, 40, 40], window=5, seed=0)
@example(lengths=[40, 39, 40], window=None, seed=0)
def test_grouped_equals_one_at_a_time(lengths: list[int], window: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(sum(lengths), 3, 2, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(sum(lengths), 2, 8, dtype=torch.float64)
    plan = plan_groups(lengths, qkv.device)
    bounds, no_dropout = torch.from_numpy(np.cumsum([0, *lengths])), Dropout(0.0, torch.tensor([0]), 0)
    grouped, each = plan.attend(qkv, 0.0, window), ragged_attention_plain(qkv, bounds, no_dropout, window or 0)
    torch.testing.assert_close(grouped, each)
    (one,) = torch.autograd.grad((grouped * weights).sum(), qkv)
    (other,) = torch.autograd.grad((each * weights).sum(), qkv)
    torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(plan.attend(qkv, 0.0, window), each, msg="without gradients")


def test_dropout_keeps_the_mean_and_follows_the_seed() -> None:
    lengths = [64] * 32
    qkv = torch.randn(sum(lengths), 3, 2, 8)
    qkv[:, 2] = 1.0  # with constant values the output is the sum of the kept probabilities
    plan = plan_groups(lengths, qkv.device)

    def attended(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return plan.attend(qkv, 0.1)

    assert abs(attended(1).mean().item() - 1.0) < 0.01
    assert attended(1).std() > 0.01
    assert torch.equal(attended(1), attended(1))
    assert not torch.equal(attended(1), attended(2))


def test_nothing_grows_with_the_square_of_the_bin() -> None:
    """A bin of 4,096 sequences of 8 tokens: a mask of the whole bin would be 4 GiB in fp32."""
    lengths = [8] * 4096
    plan = plan_groups(lengths, torch.device("cpu"))
    assert [(group.count, group.length, group.keys) for group in plan.groups] == [(4096, 8, None)]
    plan.attend(torch.randn(sum(lengths), 3, 1, 4), 0.0)


def test_with_a_window_nothing_grows_with_the_square_of_a_sequence() -> None:
    """One sequence of 65,536 tokens: its scores would be 16 GiB in fp32."""
    plan = plan_groups([65536], torch.device("cpu"))
    plan.attend(torch.randn(65536, 3, 1, 4).requires_grad_(), 0.0, 8).sum().backward()
