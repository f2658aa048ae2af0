"""How long a gradient is, how much to shorten it, and whether to use it at all. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 4096  # values whose squares are added up before they meet those of others


def norm(vector: Tensor) -> Tensor:
    """The length of a vector of any number of values.

    On a CPU PyTorch adds the squares of float32 one after another in float32, so that of 110 million values the last
    ones are rounded away: 1 % too short, always. Norms of rows, then the norm of these, are right to 1e-4.
    """
    if vector.device.type != "cpu" or len(vector) <= ROW:
        return torch.linalg.vector_norm(vector)
    whole = len(vector) // ROW * ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, ROW), dim=1)
    return torch.hypot(torch.linalg.vector_norm(rows), torch.linalg.vector_norm(vector[whole:]))


def norms(vectors: list[Tensor]) -> Tensor:
    """The length of each vector; of all of them in a few launches on a GPU."""
    is_on_cpu = vectors[0].device.type == "cpu"
    return torch.stack([norm(one) for one in vectors] if is_on_cpu else torch._foreach_norm(vectors))


def clip_factor(norm: Tensor, limit: Tensor | float) -> Tensor:
    """What brings a vector of this norm down to `limit`; 1 where it is below. Of what is not finite nothing is left."""
    return limit / norm.clamp(min=limit)


def is_finite(loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """1 where both are finite, else 0."""
    return (torch.isfinite(loss) & torch.isfinite(gradient_norm)).float()
