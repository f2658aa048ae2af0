"""LAMB against the MLPerf reference optimizer's own trajectory (tests/golden/README.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena
from bertrain.optim.clipping import clip_factor, is_finite
from bertrain.optim.registry import build_optimizer

GOLDEN = Path(__file__).parent.parent / "golden"


def parameter_holder(tensors: dict[str, np.ndarray]) -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(torch.from_numpy(value)) for name, value in tensors.items()})


@pytest.mark.parametrize("name", ["lamb-reference", "lamb-reference-clip"])
def test_twelve_steps_follow_the_reference(name: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    rate, beta1, beta2, epsilon, decay, clips = golden["hyper"].tolist()
    names = [key.split("|")[1] for key in golden.files if key.startswith("init|")]
    holder = parameter_holder({name.replace("/", "_"): golden[f"init|{name}"] for name in names})
    arena = Arena(holder)
    # The reference leaves out tensors by name; here those are exactly the one-dimensional ones.
    adapted = {key for key in names if "LayerNorm" not in key and "bias" not in key}
    assert adapted == {key for key in names if golden[f"init|{key}"].ndim > 1}
    optimizer = build_optimizer(
        arena,
        OptimizerSettings(learning_rate=rate, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay),
    )
    for step in range(12):
        arena.load(
            arena.gradients,
            {key.replace("/", "_"): torch.from_numpy(golden[f"grad{step}|{key}"]) for key in names},
        )
        norm = arena.gradients.norm()
        scale = clip_factor(norm, 1.0) if clips else torch.ones(())
        optimizer.step(rate, scale, is_finite(norm, norm))
        for key in names:
            expected = golden[f"param{step}|{key}"]
            actual = holder[key.replace("/", "_")].detach().numpy()
            error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
            assert error <= 1e-6, f"{key} after step {step}: {error}"
