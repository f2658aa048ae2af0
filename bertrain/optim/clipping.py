"""Clipping to a global norm, and the test for a step that must not be applied. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_to_norm(gradients: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Norm of the flat gradients, and the factor that brings it down to `limit` (1 where it is below, or limit 0)."""
    norm = torch.linalg.vector_norm(gradients)
    if limit == 0:
        return norm, torch.ones_like(norm)
    return norm, limit / norm.clamp(min=limit)


def is_finite(loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """1 where both are finite, else 0."""
    return (torch.isfinite(loss) & torch.isfinite(gradient_norm)).float()
