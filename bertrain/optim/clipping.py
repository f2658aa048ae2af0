"""How much to shorten a gradient, and whether to use it at all. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_factor(norm: Tensor, limit: Tensor | float) -> Tensor:
    """What brings a vector of this norm down to `limit`; 1 where it is below. Of what is not finite nothing is left."""
    return limit / norm.clamp(min=limit)


def is_finite(loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """1 where both are finite, else 0."""
    return (torch.isfinite(loss) & torch.isfinite(gradient_norm)).float()
