"""Gradient norm, clipping factor and the finite check, all on the device."""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 4096  # values per partial norm


def norm(vector: Tensor) -> Tensor:
    """The norm of a vector of any length.

    On a CPU, PyTorch adds squares in float32 one after another: for 110 million values, rounding makes the norm 1 % too
    small. The norm of the norms of rows is exact to 1e-4.
    """
    if vector.device.type != "cpu" or len(vector) <= ROW:
        return torch.linalg.vector_norm(vector)
    whole = len(vector) // ROW * ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, ROW), dim=1)
    return torch.hypot(torch.linalg.vector_norm(rows), torch.linalg.vector_norm(vector[whole:]))


def norms(vectors: list[Tensor]) -> Tensor:
    """The norm of each vector, in a few launches on a GPU."""
    is_on_cpu = vectors[0].device.type == "cpu"
    return torch.stack([norm(one) for one in vectors] if is_on_cpu else torch._foreach_norm(vectors))


def clip_factor(norm: Tensor, limit: Tensor | float) -> Tensor:
    """The factor that scales a vector of this norm down to `limit`; 1 if it is below. For an infinite norm, 0."""
    return limit / norm.clamp(min=limit)


def is_finite(loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """1 if both are finite, else 0."""
    return (torch.isfinite(loss) & torch.isfinite(gradient_norm)).float()
