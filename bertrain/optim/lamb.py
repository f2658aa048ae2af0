"""LAMB as MLPerf's reference computes it, and AdamW: one file, since they differ by one factor.

    m  <- beta1 m + (1 - beta1) g            v  <- beta2 v + (1 - beta2) g^2
    u   = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w
    w  <- w - rate * r * u                   r = |w| / |u| (LAMB), 1 (AdamW)

Decay and r apply to matrices only; r is 1 where either norm is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.optim.clipping import norms
from bertrain.optim.optimizer import Optimizer

WINDOW = 2**22  # parameters whose divisors are worked out at a time, so that they take little memory


class AdamW(Optimizer):
    """Adam with decoupled weight decay."""

    BUFFERS = ("first_moment", "second_moment")
    ON_THE_WAY = 4

    def update(self, gradient: Tensor, learning_rate: float, apply: Tensor) -> None:
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        first, second = self.buffers["first_moment"], self.buffers["second_moment"]
        first.lerp_(gradient, apply * (1 - beta1))
        second.lerp_(gradient.square_(), apply * (1 - beta2))
        count = self.num_applied.clamp(min=1)
        correction1, correction2 = ((1 - beta**count).to(first.dtype) for beta in (beta1, beta2))
        update = torch.div(first, correction1, out=gradient)
        for part, moment in zip(update.split(WINDOW), second.split(WINDOW), strict=True):
            part /= (moment / correction2).sqrt_().add_(self.settings.epsilon)
        adapted = self.slices(update)
        if adapted:
            torch._foreach_add_(adapted, self.slices(self.values), alpha=self.settings.weight_decay)
        self.rescale(adapted)
        slowed = [segment for segment in self.segments if segment.rate != 1.0]
        if slowed:
            rates = [segment.rate for segment in slowed]
            torch._foreach_mul_([update[segment.start : segment.stop] for segment in slowed], rates)
        self.values.sub_(update.mul_(apply * learning_rate))

    def rescale(self, updates: list[Tensor]) -> None:
        """Adapt the updates of the matrices, in place: AdamW leaves them as they are."""


class Lamb(AdamW):
    """Adam whose step of each matrix is as long as the matrix itself."""

    def begin(self) -> None:
        numbers = [segment.tensor for segment in self.adapted]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=self.values.device)

    def rescale(self, updates: list[Tensor]) -> None:
        # A tensor's norms are those of all its parts, in whichever rank's shard they lie.
        squares = torch.zeros(len(self.arena.segments), 2, device=self.values.device)
        if updates:
            lengths = [norms(parts) for parts in (self.slices(self.values), updates)]
            squares[self._numbers] = torch.stack(lengths, 1).square_()
        self.sum_over_ranks(squares)
        if updates:
            torch._foreach_mul_(updates, list(trust_ratios(squares)[self._numbers].unbind()))


def trust_ratios(squares: Tensor) -> Tensor:
    """|w| / |u| from the squared norms [.., 2] of each tensor, 1 where either is 0."""
    weights, updates = squares.sqrt().unbind(-1)
    return torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
