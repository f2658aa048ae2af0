"""Muon against torch's own Muon and AdamW, its singular values, and shards that cut its matrices."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena
from bertrain.model.encoder import split_parts
from bertrain.optim import muon
from bertrain.optim.registry import build_optimizer
from tests import helpers

ONE = torch.tensor(1.0)
SETTINGS = OptimizerSettings(name="muon", weight_decay=0.1)
STEPS, RATE = 20, 1e-2


def rate_of(name: str) -> float:
    return 0.5 if name.startswith("layers.0.") else 1.0


def arena_of(shards: int = 1) -> Arena:
    return Arena(helpers.build_model(helpers.tiny_settings().model), split_parts, rate_of, shards=shards)


def gradients_at(arena: Arena, step: int) -> dict[str, Tensor]:
    """As those of a model are: few directions are large, and the steps have something in common."""
    named = {}
    for number, (name, (_, shape)) in enumerate(arena.places.items()):
        often, once = (torch.Generator().manual_seed(1000 * number + seed) for seed in (999, step))
        draw = partial(torch.randn, shape)
        gradient = draw(generator=often) + draw(generator=once)
        named[name] = 1e-2 * gradient * torch.linspace(1, 0.2, shape[-1])
    return named


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's Muon, on CPUs without bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_equals_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose Muon computes in bf16; query, key and value are three matrices, and a layer may have a rate of its own."""
    monkeypatch.setattr(muon, "product_dtype", lambda device: dtype)
    arena = arena_of()
    begun = {name: value.clone() for name, value in arena.named(arena.values).items()}
    matrices, others, theirs = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, list[Tensor]]()
    for name, value in begun.items():
        is_matrix = name.startswith("layers.") and value.ndim == 2
        theirs[name] = [part.clone().requires_grad_() for part in value.chunk(split_parts(name) if is_matrix else 1)]
        group = {"params": theirs[name], "lr": RATE * rate_of(name), "weight_decay": 0.1 if value.ndim > 1 else 0.0}
        (matrices if is_matrix else others).append(group)
    assert len(matrices) == 4 * 2
    references = (
        torch.optim.Muon(matrices, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.999), eps=SETTINGS.epsilon),
    )
    optimizer = build_optimizer(arena, SETTINGS)
    for step in range(STEPS):
        gradients = gradients_at(arena, step)
        arena.load(arena.gradients, gradients)
        optimizer.step(RATE, ONE, ONE)
        for name, parts in theirs.items():
            for part, gradient in zip(parts, gradients[name].chunk(len(parts)), strict=True):
                part.grad = gradient.clone()
        for reference in references:
            reference.step()
    for name, value in arena.named(arena.values).items():
        expected = torch.cat(theirs[name]).detach()
        if name.startswith("layers.") and value.ndim == 2:
            assert helpers.relative_error(value - begun[name], expected - begun[name]) < 2e-2, name
        else:
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (192, 48)])
def test_singular_values_come_near_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Whatever the size of the matrix; and the singular vectors stay."""
    draw = torch.Generator().manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(3, *shape, generator=draw), full_matrices=False)
    sizes = torch.logspace(0, -1.7, min(shape)) * torch.tensor([1e-4, 1.0, 1e4])[:, None]
    result = muon.orthogonalize(left * sizes[:, None] @ right, dtype).float()
    singular = torch.linalg.svdvals(result)
    assert 0.6 < singular.min() < singular.max() < 1.3
    mixed = left.mT @ result @ right.mT
    assert (mixed - torch.diag_embed(mixed.diagonal(dim1=1, dim2=2))).abs().max() < 0.05


def test_few_at_once_are_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    whole = [torch.randn(shape, generator=draw) for shape in [(8, 8), (8, 16), (16, 8), (8, 8), (8, 8)]]
    some = [matrix.clone() for matrix in whole]
    muon.orthogonalize_all(whole, torch.float32)
    monkeypatch.setattr(muon, "WINDOW", 2 * 64)
    muon.orthogonalize_all(some, torch.float32)
    for one, other in zip(whole, some, strict=True):
        torch.testing.assert_close(one, other)
        assert 0.1 < one.square().mean().sqrt() < 0.3, "the usual size of AdamW's updates"


class Meeting:
    """Threads that stand for ranks, and add up their tensors."""

    def __init__(self, size: int) -> None:
        self._tensors: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size)

    def sum_over_ranks(self, tensor: Tensor, rank: int) -> None:
        self._tensors[rank] = tensor.clone()
        self._barrier.wait(60)
        tensor.copy_(torch.stack([one for one in self._tensors if one is not None]).sum(0))
        self._barrier.wait(60)


@pytest.mark.parametrize("shards", [2, 3, 24])
def test_shards_move_as_the_whole(shards: int) -> None:
    """To the last bit: also where a matrix lies in several shards, and where a shard has no whole matrix."""
    whole, parts, meeting = arena_of(), arena_of(shards), Meeting(shards)
    reference = build_optimizer(whole, SETTINGS)
    start, shape = parts.places["layers.1.expand.weight"]
    borders = [parts.shard(rank, shards).start for rank in range(1, shards)]
    assert sum(start < border < start + shape.numel() for border in borders) >= (2 if shards == 24 else 0)
    assert any(one.start < border < one.stop and one.is_adapted for border in borders for one in parts.segments)
    optimizers = [
        build_optimizer(
            parts, SETTINGS, span=parts.shard(rank, shards), sum_over_ranks=partial(meeting.sum_over_ranks, rank=rank)
        )
        for rank in range(shards)
    ]
    for step in range(4):
        apply = torch.tensor(float(step != 2))
        for arena in (whole, parts):
            arena.load(arena.gradients, gradients_at(arena, step))
        reference.step(RATE, ONE, apply)
        threads = [threading.Thread(target=one.step, args=(RATE, ONE, apply)) for one in optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = whole.named(whole.values) | reference.state()
    gathered = {kind: torch.cat([one.buffers[kind] for one in optimizers]) for kind in reference.buffers}
    found = parts.named(parts.values)
    for kind, buffer in gathered.items():
        found |= {f"{kind}/{tensor}": value for tensor, value in parts.named(buffer).items()}
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=key)


def test_the_operations_are_counted() -> None:
    """As PyTorch counts the products of an update, of which each matrix has fifteen."""
    model, arena = helpers.tiny_settings().model, arena_of()
    optimizer = build_optimizer(arena, SETTINGS)
    arena.gradients.normal_()
    with FlopCounterMode(display=False) as counted:
        optimizer.step(RATE, ONE, ONE)
    inner = model.intermediate_size
    assert counted.get_total_flops() == muon.operations(model.num_layers, model.hidden_size, inner, inner)
