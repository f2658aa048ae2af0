"""The optimizer over an arena: AdamW against torch's, three parts of one matrix, and steps not applied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert
from bertrain.model.encoder import split_parts
from bertrain.model.initialization import initialize
from bertrain.optim.clipping import clip_factor, is_finite, norm, norms
from bertrain.optim.registry import OPTIMIZERS, build_optimizer
from tests import helpers


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 3))


def test_adamw_equals_torch() -> None:
    ours, theirs = small_net(), small_net()
    arena = Arena(ours)
    optimizer = build_optimizer(arena, OptimizerSettings(name="adamw", epsilon=1e-6, weight_decay=0.1))
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, eps=1e-6
    )
    x = torch.randn(5, 7)
    for _ in range(10):
        arena.gradients.zero_()
        reference.zero_grad()
        ours(x).square().sum().backward()
        theirs(x).square().sum().backward()
        optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(1.0))
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_lamb_treats_query_key_and_value_as_three_tensors() -> None:
    """The fused matrix moves as three separate matrices would."""
    settings = OptimizerSettings(weight_decay=0.1)
    parts = nn.ParameterList([nn.Parameter((k + 1.0) * torch.randn(4, 5)) for k in range(3)])
    fused = nn.ParameterDict({"qkv.weight".replace(".", "_"): nn.Parameter(torch.cat(list(parts)).detach().clone())})
    one, three = Arena(fused, lambda name: 3), Arena(parts)
    gradient = torch.randn(12, 5)
    one.gradients[:60] = gradient.flatten()
    three.load(three.gradients, {str(k): gradient[4 * k : 4 * k + 4] for k in range(3)})
    for arena in (one, three):
        build_optimizer(arena, settings).step(0.1, torch.tensor(1.0), torch.tensor(1.0))
    torch.testing.assert_close(fused["qkv_weight"], torch.cat(list(parts)))
    assert split_parts("layers.3.qkv.weight") == 3
    assert split_parts("layers.3.qkv.bias") == split_parts("layers.3.expand.weight") == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("at_step", [0, 3])
def test_a_step_that_is_not_finite_changes_nothing(name: str, poison: float, at_step: int) -> None:
    arena = Arena(small_net())
    optimizer = build_optimizer(arena, OptimizerSettings(name=name))  # type: ignore[arg-type]
    for step in range(5):
        arena.gradients.normal_(generator=torch.Generator().manual_seed(step))
        before = copy.deepcopy([arena.values, *optimizer.buffers.values()])
        if step == at_step:
            arena.gradients[3] = poison
        norm = arena.gradients.norm()
        optimizer.step(0.1, clip_factor(norm, 1.0), is_finite(torch.tensor(1.0), norm))
        after = [arena.values, *optimizer.buffers.values()]
        unchanged = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        constants = list(optimizer.buffers).count("start")
        assert sum(unchanged) == (len(unchanged) if step == at_step else constants)
    assert optimizer.num_applied == 4
    assert torch.isfinite(arena.values).all()


def test_clipping() -> None:
    assert float(clip_factor(torch.tensor(5.0), 1.0)) == pytest.approx(0.2)
    assert clip_factor(torch.tensor(5.0), torch.tensor(10.0)) == 1
    assert clip_factor(torch.tensor(0.0), 1.0) == 1
    assert clip_factor(torch.tensor(float("nan")), 1.0).isnan()


def test_the_table_of_initial_weights_is_true() -> None:
    settings = helpers.tiny_settings(model__pad_vocab_to=64, model__initializer_range=0.05).model
    model = Bert(settings)
    initialize(model, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 0).all(), name
        else:
            assert parameter.abs().max() <= 0.1, name
            real = parameter[: settings.vocab_size] if name == "embeddings.words.weight" else parameter
            assert 0.03 < real.std() < 0.06, name
    assert (model.embeddings.words.weight[settings.vocab_size :] == 0).all()
    again = Bert(settings)
    initialize(again, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_arena_views_are_the_models_own_memory() -> None:
    net = small_net()
    arena = Arena(net)
    net(torch.randn(2, 7)).sum().backward()
    assert arena.gradients.norm() > 0
    arena.values.zero_()
    assert all((parameter == 0).all() for parameter in net.parameters())
    for start, shape in arena.places.values():
        assert start % 64 == 0
        assert shape.numel() > 0


def test_the_norm_of_many_values_is_not_too_short() -> None:
    """PyTorch's own is 0.1 % short of 20 million values on a CPU, and 1 % of BERT-Base's 110 million."""
    values = torch.randn(20_000_001, generator=torch.Generator().manual_seed(1))
    exact = float(values.double().norm())
    assert float(norm(values)) == pytest.approx(exact, rel=2e-4)
    few = [values[:0], values[:5], values[:4096], values[:10_000]]
    assert norms(few).tolist() == pytest.approx([float(part.double().norm()) for part in few], rel=1e-6)
    values[-1] = float("inf")
    assert norm(values).isinf()
    values[-1] = float("nan")
    assert norm(values).isnan()
