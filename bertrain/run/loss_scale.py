"""Dynamic loss scaling for fp16, whose smallest numbers are larger than many gradients.

The scale is a tensor on the device, and so is whether a step was applied: nothing waits for them. An overflow skips one
step and halves the scale; two thousand steps without one double it.
"""

from __future__ import annotations

import torch
from torch import Tensor

START, MINIMUM = 2.0**16, 1.0
GROWTH_STEPS = 2000
SCALE, STREAK = "loss_scale/scale", "loss_scale/streak"


def next_scale(scale: Tensor, streak: Tensor, applied: Tensor) -> tuple[Tensor, Tensor]:
    """The scale after a step that was `applied` (1) or not (0), and the number of steps applied since it changed."""
    was_applied = applied > 0
    longer = torch.where(was_applied, streak + 1, 0)
    grows = longer >= GROWTH_STEPS
    halved = (scale / 2).clamp(min=MINIMUM)
    return torch.where(was_applied, torch.where(grows, scale * 2, scale), halved), torch.where(grows, 0, longer)


class LossScale:
    """The scale of one run: the loss is multiplied by `scale`, and its gradient divided by it."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(START, device=device)
        self._streak = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, applied: Tensor) -> None:
        """Update the scale after a step, in place, so that a CUDA graph may hold it."""
        scale, streak = next_scale(self.scale, self._streak, applied)
        self.scale.copy_(scale)
        self._streak.copy_(streak)

    def state(self) -> dict[str, Tensor]:
        return {SCALE: self.scale, STREAK: self._streak}

    def load(self, state: dict[str, Tensor]) -> None:
        if SCALE in state:
            self.scale.copy_(state[SCALE])
            self._streak.copy_(state[STREAK])
