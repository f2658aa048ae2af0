"""AdamW, and LAMB as MLPerf's reference computes it; they differ by the factor r.

    m  <- beta1 m + (1 - beta1) g            v  <- beta2 v + (1 - beta2) g^2
    u   = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w
    w  <- w - rate * r * u                   r = |w| / |u| (LAMB), 1 (AdamW)

Decay and r apply to matrices only; r is 1 if either norm is 0.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from bertrain.optim.clipping import norms
from bertrain.optim.optimizer import Optimizer

WINDOW = 2**22  # parameters per division, to limit its temporary memory


class Adam(Optimizer):
    """Steps along a ratio of moments, with decoupled weight decay and a learning rate per segment."""

    def update(self, gradient: Tensor, learning_rate: float, apply: Tensor) -> None:
        update = self.direction(gradient, apply)
        adapted = self.slices(update)
        if adapted:
            torch._foreach_add_(adapted, self.slices(self.values), alpha=self.settings.weight_decay)
        self.rescale(update)
        scaled = [segment for segment in self.segments if segment.rate != 1.0]
        if scaled:
            rates = [segment.rate for segment in scaled]
            torch._foreach_mul_([update[segment.start : segment.stop] for segment in scaled], rates)
        self.values.sub_(update.mul_(apply * learning_rate))

    @abstractmethod
    def direction(self, gradient: Tensor, apply: Tensor) -> Tensor:
        """Update the moments and return u without its decay, in the memory of `gradient`."""

    def rescale(self, update: Tensor) -> None:
        """Scale the updates of tensors, in place; by default, leave them unchanged."""

    def add_to_moments(self, gradient: Tensor, apply: Tensor) -> None:
        """Update both moments; leaves the squares in `gradient`."""
        first, second = self.buffers["first_moment"], self.buffers["second_moment"]
        first.lerp_(gradient, apply * (1 - self.settings.beta1))
        second.lerp_(gradient.square_(), apply * (1 - self.settings.beta2))

    def ratio_of_moments(self, out: Tensor) -> Tensor:
        """The corrected first moment over the root of the second, in the memory of `out`."""
        correction1, correction2 = self.corrections()
        update = torch.div(self.buffers["first_moment"], correction1, out=out)
        for part, moment in zip(update.split(WINDOW), self.buffers["second_moment"].split(WINDOW), strict=True):
            part /= (moment / correction2).sqrt_().add_(self.settings.epsilon)
        return update

    def corrections(self) -> list[Tensor]:
        """1 - beta^t for both betas."""
        count = self.num_applied.clamp(min=1)
        return [(1 - beta**count).to(self.values.dtype) for beta in (self.settings.beta1, self.settings.beta2)]


class AdamW(Adam):
    BUFFERS = ("first_moment", "second_moment")
    TEMPORARY_BYTES = 4

    def direction(self, gradient: Tensor, apply: Tensor) -> Tensor:
        self.add_to_moments(gradient, apply)
        return self.ratio_of_moments(out=gradient)


class Lamb(AdamW):
    """Adam whose update of each matrix is scaled to the norm of the matrix."""

    def begin(self) -> None:
        numbers = [segment.tensor for segment in self.adapted]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=self.values.device)

    def rescale(self, update: Tensor) -> None:
        updates = self.slices(update)
        # The norms of a tensor are those of all its parts, in the shards of all ranks.
        squares = torch.zeros(len(self.arena.segments), 2, device=self.values.device)
        if updates:
            lengths = [norms(parts) for parts in (self.slices(self.values), updates)]
            squares[self._numbers] = torch.stack(lengths, 1).square_()
        self.sum_over_ranks(squares)
        if updates:
            weight_norms, update_norms = squares.sqrt().unbind(-1)
            is_positive = (weight_norms > 0) & (update_norms > 0)
            ratios = torch.where(is_positive, weight_norms / update_norms, 1.0)
            torch._foreach_mul_(updates, list(ratios[self._numbers].unbind()))
