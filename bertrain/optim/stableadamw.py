"""StableAdamW (Wortsman et al., 2023): AdamW that shortens the step of a tensor whose gradients outgrow their average.

    m  <- beta1 m + (1 - beta1) g            v  <- beta2 v + (1 - beta2) g^2
    u   = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w
    w  <- w - rate * u / max(1, r)           r^2 = mean of g^2 / max(v / (1 - beta2^t), epsilon^2) over the tensor

If v is a good average of g^2, r is about 1. It is larger after a sudden growth of the gradients, which v follows only
in 1 / (1 - beta2) steps. Decay applies to matrices only; query, key and value are three tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.optim import rules
from bertrain.optim.clipping import norms


class StableAdamW(rules.Adam):
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
        for part, moment in zip(
            squares.split(rules.WINDOW), self.buffers["second_moment"].split(rules.WINDOW), strict=True
        ):
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
