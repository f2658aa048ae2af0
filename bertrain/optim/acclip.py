"""ACClip (Zhang et al., 2020): Adam whose momentum is clipped, element by element, to the usual size of a gradient.

    m  <- beta1 m + (1 - beta1) g            v  <- beta2 v + (1 - beta2) g^2        c <- beta2 c + (1 - beta2) |g|
    u   = clip(m / (1 - beta1^t), to +- c / (1 - beta2^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w
    w  <- w - rate * u

The paper's optimizer has no v; this is the form that Samsung's MLPerf entry for BERT describes, with the paper's alpha
of 1. With beta1 = beta2 it is AdamW: an average is never larger than the same average of the magnitudes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.optim.rules import Adam


class AcClip(Adam):
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
