"""Sums of losses and of correct predictions over bins, and their layout as one vector.

On a device they are one vector, so that bins and ranks add them in one operation. Only this file defines its order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """Sums over one bin, scalars on its device.

    Pre-training predicts masked words (`mlm_`) and, per sequence, whether B follows A; with `model.rtd` also, for some
    tokens, whether they were replaced (`rtd_`). Fine-tuning predicts one answer per sequence; only the tag head
    predicts words, which `mlm_` then counts.
    """

    mlm_loss: Tensor
    sequence_loss: Tensor
    mlm_correct: Tensor
    sequence_correct: Tensor
    rtd_loss: Tensor | None = None
    rtd_correct: Tensor | None = None
    rtd_tokens: Tensor | None = None

    def pack(self) -> Tensor:
        """The vector of these sums, without gradients."""
        zero = torch.zeros_like(self.mlm_loss)
        return torch.stack([zero if value is None else value.detach() for value in self])


def unpack_sums(packed: Tensor) -> dict[str, float]:
    """The sums of a packed vector by name, on the host; waits for its device."""
    return dict(zip(Sums._fields, packed.tolist(), strict=True))


def packed_sums(value: float = 0.0, device: torch.device | str = "cpu") -> Tensor:
    """A packed vector in float64 whose sums all have this value."""
    return torch.full((len(Sums._fields),), value, dtype=torch.float64, device=device)
