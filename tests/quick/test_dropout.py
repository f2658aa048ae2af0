"""Dropout on the CPU: its rate, its scale, its seed, its gradient."""

from __future__ import annotations

import pytest
import torch

from bertrain.model.dropout import drop_mask, dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.003])
def test_rate_and_mean(p: float) -> None:
    torch.manual_seed(0)
    count = 4_000_003
    dropped = drop_mask(torch.Size([count]), p)
    deviation = (p * (1 - p) / count) ** 0.5
    assert abs(dropped.float().mean(dtype=torch.float64).item() - p) < 5 * deviation + 1 / 65536
    # the four elements of one random word, and neighbours, are independent
    lanes = dropped[: count // 4 * 4].view(-1, 4).double()
    assert (torch.corrcoef(lanes.T) - torch.eye(4)).abs().max() < 0.005
    assert (lanes.mean(0) - p).abs().max() < 10 * deviation + 1 / 65536


def test_follows_the_seed_and_scales_what_is_kept() -> None:
    x = torch.randn(7, 31, requires_grad=True)

    def out(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return dropout(x, 0.25)

    assert torch.equal(out(3), out(3))
    assert not torch.equal(out(3), out(4))
    y = out(3)
    kept = y != 0
    assert torch.equal(y[kept], (x * (1 / 0.75))[kept])
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, kept * (1 / 0.75))


def test_off_when_not_training_or_at_rate_zero() -> None:
    x = torch.randn(5)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
