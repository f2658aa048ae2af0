"""MADGRAD (Defazio and Jelassi, 2021): dual averaging under a cube root, with momentum and decoupled decay.

    s  <- s + rate sqrt(t) g                 q  <- q + rate sqrt(t) g^2
    z   = start - s / (cbrt(q) + epsilon)
    w  <- beta1 w + (1 - beta1) z - rate * decay * w

`start` holds the initial weights: it is part of the state, and decay does not change it. So decay shifts the weights
away from z rather than shrinking them step by step, and is much weaker than AdamW's of the same size. The sums have no
exponential decay, so there is no beta2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.optim.optimizer import Optimizer

START = "start"  # this buffer is initially a copy of the weights


class Madgrad(Optimizer):
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
