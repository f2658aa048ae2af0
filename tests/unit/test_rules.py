"""MADGRAD and ACClip against their authors' code or formula, and what holds for every update rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from madgrad import MADGRAD
from safetensors.torch import load_file
from torch import Tensor, nn

from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert
from bertrain.optim.registry import OPTIMIZERS, build_optimizer
from bertrain.training.start import pretrain, resume
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


def test_madgrad_begins_where_the_weights_are(tmp_path: Path) -> None:
    """Also with --init, which replaces the weights after the optimizer was made; a resumed run keeps that place."""
    data, first, second = helpers.make_data(tmp_path), tmp_path / "first", tmp_path / "second"
    common = {"train__max_steps": 4, "checkpoint__every_steps": 2, "model__initializer_range": 0.05}
    pretrain(helpers.tiny_settings(**common), data, first)
    pretrain(helpers.tiny_settings(**common, optimizer__name="madgrad"), data, second, init=str(first))
    calm, weights = helpers.losses(second), helpers.final_weights(second)

    taken = helpers.final_weights(first)
    kept = load_file(second / "checkpoints" / "step-00000004" / "optimizer.safetensors")
    assert {name for name in kept if name.startswith("start/")} == {f"start/{name}" for name in taken}
    for name, tensor in taken.items():
        assert torch.equal(kept[f"start/{name}"], tensor), name

    (second / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    resume(second)
    assert helpers.losses(second) == calm
    for name, tensor in helpers.final_weights(second).items():
        assert torch.equal(tensor, weights[name]), name


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


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lamb"])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_move_as_the_whole(name: str, shards: int) -> None:
    """To the last bit, and their state adds up to the whole's; LAMB has norms to sum, and a test of its own."""
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


@pytest.mark.parametrize("name", ["madgrad", "acclip"])
def test_a_model_learns(name: str, tmp_path: Path) -> None:
    """By the settings alone; tests/numerics shows it at length for the others."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(optimizer__name=name, optimizer__learning_rate=5e-3, train__max_steps=25), data, run)
    losses = helpers.losses(run)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3, losses
    assert json.loads((run / "config.json").read_text())["settings"]["optimizer"]["name"] == name
