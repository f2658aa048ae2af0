"""Clipping to a global norm, and the test for a step that must not be applied. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_to_norm(gradients: Tensor, limit: float, loss_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Norm of the flat gradients, and the factor that brings it down to `limit` (1 where it is below, or limit 0).

    Gradients of a loss that was multiplied by `loss_scale` are too large by it: the norm is the true one, and the
    factor undoes the scale too.
    """
    norm = torch.linalg.vector_norm(gradients)
    if loss_scale is not None:
        norm = norm / loss_scale
    factor = torch.ones_like(norm) if limit == 0 else limit / norm.clamp(min=limit)
    return norm, factor if loss_scale is None else factor / loss_scale


def is_finite(loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """1 where both are finite, else 0."""
    return (torch.isfinite(loss) & torch.isfinite(gradient_norm)).float()
