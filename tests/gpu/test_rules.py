"""The update rules on a GPU: without a wait for the device, and as on the CPU."""

from __future__ import annotations

import pytest
import torch

from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena
from bertrain.optim.clipping import clip_factor, is_finite
from bertrain.optim.registry import OPTIMIZERS, build_optimizer
from tests import helpers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def trained(name: str, device: str) -> Arena:
    """A small model's arena after six steps, the fourth of which is not finite and not applied."""
    arena = Arena(helpers.build_model(helpers.tiny_settings().model).to(device))
    optimizer = build_optimizer(arena, OptimizerSettings(name=name))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(1)
    gradients = [torch.randn(len(arena.values), generator=draw).to(device) for _ in range(6)]
    gradients[3][5] = float("nan")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, gradient in enumerate(gradients):
            arena.gradients.copy_(gradient)
            norm = arena.gradients.norm()
            optimizer.step(1e-3 * step, clip_factor(norm, 1.0), is_finite(norm, norm))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert optimizer.num_applied == 5
    return arena


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gpu_updates_as_a_cpu_and_waits_for_nothing(name: str) -> None:
    expected = trained(name, "cpu").values
    begun = Arena(helpers.build_model(helpers.tiny_settings().model)).values
    moved = trained(name, "cuda").values.cpu() - begun
    # Muon's products are in bf16 on a GPU.
    assert helpers.relative_error(moved, expected - begun) < (2e-2 if name == "muon" else 1e-4)
