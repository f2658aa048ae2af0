"""The result of one update, and its layout as a vector on the device, where no step waits for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """Gradient norm before clipping, whether the step was applied, and in fp16 the loss scale it was computed at."""

    gradient_norm: float
    applied: bool
    loss_scale: float | None = None

    @staticmethod
    def pack(gradient_norm: Tensor, applied: Tensor, loss_scale: Tensor | None = None) -> Tensor:
        """A vector [2], or [3] with a loss scale; `applied` is 1 or 0."""
        return torch.stack([gradient_norm, applied] if loss_scale is None else [gradient_norm, applied, loss_scale])

    @classmethod
    def unpack(cls, packed: Tensor) -> Verdict:
        """Read a packed vector; waits for its device."""
        gradient_norm, applied, *loss_scale = packed.tolist()
        return cls(gradient_norm, bool(applied), *loss_scale)


def not_computed() -> Tensor:
    """The packed verdict of a step that is skipped on request."""
    return Verdict.pack(torch.tensor(torch.nan), torch.tensor(0.0))
