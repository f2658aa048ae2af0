"""The update rules of AdamW, LAMB, StableAdamW, ACClip and MADGRAD; Muon has a file of its own.

In the formulas, g is the gradient, w the weights, t the number of applied steps, and `rate` the learning rate.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from bertrain.optim.clipping import norms
from bertrain.optim.optimizer import Optimizer

WINDOW = 2**22  # parameters per division, to limit its temporary memory
START = "start"  # this buffer of MADGRAD is initially a copy of the weights


class Adam(Optimizer):
    """Base of the optimizers that divide a first moment by the root of a second, with decoupled weight decay.

    Weight decay and LAMB's trust ratio apply to matrices only. Each segment has its own factor on the learning rate.
    """

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
    """Adam with decoupled decay (Loshchilov and Hutter, 2019).

    m  <- beta1 m + (1 - beta1) g            v  <- beta2 v + (1 - beta2) g^2
    u   = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w
    w  <- w - rate * u
    """

    BUFFERS = ("first_moment", "second_moment")
    TEMPORARY_BYTES = 4

    def direction(self, gradient: Tensor, apply: Tensor) -> Tensor:
        self.add_to_moments(gradient, apply)
        return self.ratio_of_moments(out=gradient)


class Lamb(AdamW):
    """AdamW whose update of each matrix is scaled to the norm of the matrix, as MLPerf's reference computes it.

    w  <- w - rate * r * u                   r = |w| / |u|, and 1 if either norm is 0
    """

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


class StableAdamW(Adam):
    """AdamW that shortens the step of a tensor whose gradients outgrow their average (Wortsman et al., 2023).

    w  <- w - rate * u / max(1, r)           r^2 = mean of g^2 / max(v / (1 - beta2^t), epsilon^2) over the tensor

    If v is a good average of g^2, r is about 1. It is larger after a sudden growth of the gradients, which v follows
    only in 1 / (1 - beta2) steps. Query, key and value are three tensors.
    """

    BUFFERS = ("first_moment", "second_moment")
    TEMPORARY_BYTES = 4

    def begin(self) -> None:
        device = self.values.device
        self._numbers = torch.tensor([segment.tensor for segment in self.segments], dtype=torch.int64, device=device)
        sizes = [segment.stop - segment.start for segment in self.arena.segments]
        self._sizes = torch.tensor(sizes, dtype=self.values.dtype, device=device)

    def direction(self, gradient: Tensor, apply: Tensor) -> Tensor:
        self.add_to_moments(gradient, apply)
        self._excess = self.excess(gradient)
        return self.ratio_of_moments(out=gradient)

    def excess(self, squares: Tensor) -> Tensor:
        """max(1, r) of every tensor of the model, from the squares of the gradient, which it overwrites."""
        correction = self.corrections()[1]
        for part, moment in zip(squares.split(WINDOW), self.buffers["second_moment"].split(WINDOW), strict=True):
            part /= (moment / correction).clamp_(min=self.settings.epsilon**2)
        # The mean of a tensor is that of all its parts, in the shards of all ranks.
        sums = torch.zeros_like(self._sizes)
        if self.segments:
            sums[self._numbers] = norms(self._parts(squares.sqrt_())).square_()
        self.sum_over_ranks(sums)
        return sums.div_(self._sizes).sqrt_().clamp_(min=1)

    def rescale(self, update: Tensor) -> None:
        if self.segments:
            torch._foreach_div_(self._parts(update), list(self._excess[self._numbers].unbind()))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [flat[segment.start : segment.stop] for segment in self.segments]


class AcClip(Adam):
    """Adam whose momentum is clipped, element by element, to the usual size of a gradient (Zhang et al., 2020).

    m  <- beta1 m + (1 - beta1) g            v  <- beta2 v + (1 - beta2) g^2        c <- beta2 c + (1 - beta2) |g|
    u   = clip(m / (1 - beta1^t), to +- c / (1 - beta2^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w
    w  <- w - rate * u

    The paper's optimizer has no v; this is the form that Samsung's MLPerf entry for BERT describes, with the paper's
    alpha of 1. With beta1 = beta2 it is AdamW: an average is never larger than the same average of the magnitudes.
    """

    BUFFERS = ("first_moment", "second_moment", "clip_level")

    def direction(self, gradient: Tensor, apply: Tensor) -> Tensor:
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        first, second, level = (self.buffers[name] for name in self.BUFFERS)
        first.lerp_(gradient, apply * (1 - beta1))
        level.lerp_(gradient.abs_(), apply * (1 - beta2))
        second.lerp_(gradient.square_(), apply * (1 - beta2))
        correction1, correction2 = self.corrections()
        limit = level / correction2
        update = torch.div(first, correction1, out=gradient)
        update.clamp_(max=limit).clamp_(min=limit.neg_())
        update /= torch.div(second, correction2, out=limit).sqrt_().add_(self.settings.epsilon)
        return update


class Madgrad(Optimizer):
    """Dual averaging under a cube root, with momentum and decoupled decay (Defazio and Jelassi, 2021).

    s  <- s + rate sqrt(t) g                 q  <- q + rate sqrt(t) g^2
    z   = start - s / (cbrt(q) + epsilon)
    w  <- beta1 w + (1 - beta1) z - rate * decay * w

    `start` holds the initial weights: it is part of the state, and decay does not change it. So decay shifts the
    weights away from z rather than shrinking them step by step, and is much weaker than AdamW's of the same size. The
    sums have no exponential decay, so there is no beta2.
    """

    BUFFERS = ("gradient_sum", "square_sum", START)

    def begin(self) -> None:
        self.buffers[START].copy_(self.values)

    def update(self, gradient: Tensor, learning_rate: float, apply: Tensor) -> None:
        settings = self.settings
        gradient_sum, square_sum, start = (self.buffers[name] for name in self.BUFFERS)
        weight = (learning_rate * self.num_applied.sqrt()).to(gradient.dtype)
        gradient_sum.addcmul_(gradient, weight)  # if the step is not applied, the gradient is zero
        square_sum.addcmul_(gradient.square_(), weight)
        root = square_sum.pow(1 / 3).add_(settings.epsilon)
        z = torch.addcdiv(start, gradient_sum, root, value=-1, out=gradient)
        towards_z = z.sub_(self.values).mul_(apply * (1 - settings.beta1))
        decaying = self.slices(self.values)
        if decaying:
            torch._foreach_mul_(decaying, 1 - apply * learning_rate * settings.weight_decay)
        self.values.add_(towards_z)
