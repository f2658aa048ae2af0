"""MADGRAD, StableAdamW and ACClip against their authors' code or formula, and what holds for every update rule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from madgrad import MADGRAD
from torch import Tensor, nn

from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert
from bertrain.optim.registry import OPTIMIZERS, build_optimizer
from tests import helpers

ONE = torch.tensor(1.0)
RATES = [0.0, 4e-3, 8e-3, 1e-2, 9e-3, 7e-3, 5e-3, 3e-3]  # a warm-up from zero, and a decay


def net() -> nn.Module:
    """Its matrices lie across the borders of two and of three shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.LayerNorm(40), nn.Linear(40, 25))


def settings_of(name: str, **values: float) -> OptimizerSettings:
    return OptimizerSettings(name=name, **values)  # type: ignore[arg-type]


def gradients_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """One gradient for each rate, of very unequal sizes, so that clipping and roots have something to do."""
    draw = torch.Generator().manual_seed(3)
    for step in range(len(RATES)):
        size = 10.0 if step in (2, 5) else 0.1
        yield [size * torch.randn(parameter.shape, generator=draw) for parameter in model.parameters()]


def follow(arena: Arena, settings: OptimizerSettings, model: nn.Module) -> Iterator[float]:
    """Update an arena along `gradients_of`, giving the rate after each step."""
    optimizer = build_optimizer(arena, settings)
    for rate, gradients in zip(RATES, gradients_of(model), strict=True):
        arena.load(arena.gradients, dict(zip(arena.places, gradients, strict=True)))
        optimizer.step(rate, ONE, ONE)
        yield rate


# --- MADGRAD ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta1", "decay"), [(0.9, 0.1), (0.5, 0.0), (0.0, 0.0)])
def test_madgrad_equals_its_authors(beta1: float, decay: float) -> None:
    """Theirs adds epsilon to a rate that is not zero, and without momentum lets decay move the starting point."""
    ours, theirs, epsilon = net(), net(), 1e-6
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = MADGRAD(groups, momentum=beta1, eps=epsilon, decouple_decay=True)
    settings = settings_of("madgrad", beta1=beta1, weight_decay=decay, epsilon=epsilon)
    moves = follow(Arena(ours), settings, ours)
    for rate, gradients, _ in zip(RATES, gradients_of(theirs), moves, strict=True):
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        for group in reference.param_groups:
            group["lr"] = rate - epsilon if rate else 0.0
        reference.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- StableAdamW --------------------------------------------------------------------------------------


def test_stableadamw_equals_its_formula_tensor_by_tensor() -> None:
    """With the debiased betas of the paper; steps 3 and 6 are shortened, because the gradients grow a hundredfold."""
    ours, theirs = net(), net()
    beta1, beta2, epsilon, decay = 0.9, 0.98, 1e-6, 0.1
    settings = settings_of("stableadamw", beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay)
    weights = [parameter.detach().double() for parameter in theirs.parameters()]
    m, v = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    shortened = set()
    moves = follow(Arena(ours), settings, ours)
    for step, (rate, gradients, _) in enumerate(zip(RATES, gradients_of(theirs), moves, strict=True), start=1):
        hat1, hat2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in (beta1, beta2))
        for i, gradient in enumerate(gradient.double() for gradient in gradients):
            m[i] = hat1 * m[i] + (1 - hat1) * gradient
            v[i] = hat2 * v[i] + (1 - hat2) * gradient**2
            rms = float((gradient**2 / v[i].clamp(min=epsilon**2)).mean().sqrt())
            if rms > 1.2:
                shortened.add(step)
            own_rate = rate / max(1.0, rms)
            if weights[i].ndim > 1:
                weights[i] = weights[i] - own_rate * decay * weights[i]
            weights[i] = weights[i] - own_rate * m[i] / (v[i].sqrt() + epsilon)
        for one, other in zip(ours.parameters(), weights, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert shortened == {3, 6}


@pytest.mark.parametrize(("beta2", "decay"), [(0.98, 0.1), (0.999, 0.0)])
def test_stableadamw_equals_optimis(beta2: float, decay: float) -> None:
    """The library that ModernBERT was trained with."""
    optimi = pytest.importorskip("optimi")
    ours, theirs = net(), net()
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = optimi.StableAdamW(groups, lr=1e-3, betas=(0.9, beta2), eps=1e-6, triton=False)
    moves = follow(Arena(ours), settings_of("stableadamw", beta2=beta2, weight_decay=decay, epsilon=1e-6), ours)
    for rate, gradients, _ in zip(RATES, gradients_of(theirs), moves, strict=True):
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_stableadamw_under_even_gradients_is_adamw() -> None:
    """Gradients of one size throughout: r stays at 1."""
    nets = [net(), net()]
    for name, model in zip(("stableadamw", "adamw"), nets, strict=True):
        arena = Arena(model)
        optimizer = build_optimizer(arena, settings_of(name, weight_decay=0.1))
        arena.gradients.fill_(0.5)
        for rate in RATES:
            optimizer.step(rate, ONE, ONE)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


# --- ACClip -------------------------------------------------------------------------------------------


def test_acclip_equals_its_formula_tensor_by_tensor() -> None:
    ours, theirs = net(), net()
    beta1, beta2, epsilon, decay = 0.8, 0.95, 1e-6, 0.1
    settings = settings_of("acclip", beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay)
    weights = [parameter.detach().double() for parameter in theirs.parameters()]
    m, v, c = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    clipped = 0
    moves = follow(Arena(ours), settings, ours)
    for step, (rate, gradients, _) in enumerate(zip(RATES, gradients_of(theirs), moves, strict=True), start=1):
        for i, gradient in enumerate(gradient.double() for gradient in gradients):
            m[i] = beta1 * m[i] + (1 - beta1) * gradient
            v[i] = beta2 * v[i] + (1 - beta2) * gradient**2
            c[i] = beta2 * c[i] + (1 - beta2) * gradient.abs()
            m_hat, v_hat, c_hat = m[i] / (1 - beta1**step), v[i] / (1 - beta2**step), c[i] / (1 - beta2**step)
            factor = torch.clamp(c_hat / m_hat.abs(), max=1)
            clipped += int((factor < 0.99).sum())
            update = factor * m_hat / (v_hat.sqrt() + epsilon)
            if weights[i].ndim > 1:
                update = update + decay * weights[i]
            weights[i] = weights[i] - rate * update
        for one, other in zip(ours.parameters(), weights, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert clipped > 20


def test_acclip_of_equal_decays_is_adamw() -> None:
    nets = [net(), net()]
    for name, model in zip(("acclip", "adamw"), nets, strict=True):
        list(follow(Arena(model), settings_of(name, beta1=0.9, beta2=0.9), model))
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- every rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("lamb", "stableadamw")])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_move_as_the_whole(name: str, shards: int) -> None:
    """To the last bit, and their state adds up to the whole's; LAMB and StableAdamW sum over ranks: test_exchange."""
    whole, parts = Arena(net()), Arena(net(), shards=shards)
    settings = settings_of(name, weight_decay=0.1)
    reference = build_optimizer(whole, settings)
    spans = [parts.shard(number, shards) for number in range(shards)]
    assert any(segment.start < span.stop < segment.stop for span in spans for segment in parts.segments)
    optimizers = [build_optimizer(parts, settings, span=span) for span in spans]
    for rate, gradients in zip(RATES, gradients_of(net()), strict=True):
        for arena in (whole, parts):
            arena.load(arena.gradients, dict(zip(arena.places, gradients, strict=True)))
        for optimizer in (reference, *optimizers):
            optimizer.step(rate, ONE, ONE)
    expected = whole.named(whole.values) | reference.state()
    gathered = {kind: torch.cat([one.buffers[kind] for one in optimizers]) for kind in reference.buffers}
    found = parts.named(parts.values)
    for kind, buffer in gathered.items():
        found |= {f"{kind}/{tensor}": value for tensor, value in parts.named(buffer).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_for_the_device(name: str) -> None:
    """Tensors without data cannot be read: whatever asked for a number of theirs would fail."""
    with torch.device("meta"):
        arena = Arena(Bert(helpers.tiny_settings().model))
    build_optimizer(arena, settings_of(name)).step(1e-3, torch.ones((), device="meta"), torch.ones((), device="meta"))
    with pytest.raises(RuntimeError):
        arena.values.sum().item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused(name: str) -> None:
    other = next(rule for rule in OPTIMIZERS if not set(OPTIMIZERS[name].BUFFERS) <= set(OPTIMIZERS[rule].BUFFERS))
    state = build_optimizer(Arena(net()), settings_of(other)).state()
    with helpers.refused("optimizer-state-mismatch", name):
        build_optimizer(Arena(net()), settings_of(name)).load(state, 1)
