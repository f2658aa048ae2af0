"""LAMB as MLPerf's reference computes it, and AdamW: one file, since they differ by one factor.

    m  <- beta1 m + (1 - beta1) g            v  <- beta2 v + (1 - beta2) g^2
    u   = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w
    w  <- w - rate * r * u                   r = |w| / |u| (LAMB), 1 (AdamW)

Decay and r apply to matrices only; r is 1 where either norm is 0. Everything runs on the device: whether a step
is applied at all (`apply`, 0 or 1) is a tensor that nobody waits for, and a step that is not applied leaves
weights, moments and the count t exactly as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.optim.arena import Arena
from bertrain.settings import OptimizerSettings


class AdaptiveOptimizer:
    """LAMB or AdamW over an arena, by `settings.name`."""

    def __init__(self, arena: Arena, settings: OptimizerSettings) -> None:
        self.arena, self.settings = arena, settings
        self.first_moment = torch.zeros_like(arena.values)
        self.second_moment = torch.zeros_like(arena.values)
        self.num_applied = torch.zeros((), dtype=torch.float64, device=arena.values.device)
        self._adapted = [segment for segment in arena.segments if segment.is_adapted]
        self._weights = [arena.values[segment.start : segment.stop] for segment in self._adapted]

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: Tensor, apply: Tensor) -> None:
        """One update from `gradient_scale` times the arena's gradients, if `apply` is 1; nothing if it is 0."""
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        values = self.arena.values
        apply = apply.to(values.dtype)
        self.num_applied += apply
        # A gradient that is not finite must not reach the moments, not even multiplied by zero.
        gradient = torch.where(apply > 0, self.arena.gradients * gradient_scale, 0.0)
        self.first_moment.lerp_(gradient, apply * (1 - beta1))
        self.second_moment.lerp_(gradient.square_(), apply * (1 - beta2))

        count = self.num_applied.clamp(min=1)
        corrected_second = self.second_moment / (1 - beta2**count).to(values.dtype)
        update = self.first_moment / (1 - beta1**count).to(values.dtype)
        update /= corrected_second.sqrt_().add_(self.settings.epsilon)
        adapted = [update[segment.start : segment.stop] for segment in self._adapted]
        torch._foreach_add_(adapted, self._weights, alpha=self.settings.weight_decay)
        if self.settings.name == "lamb":
            torch._foreach_mul_(adapted, self._trust_ratios(adapted))
        values.sub_(update.mul_(apply * learning_rate))

    def _trust_ratios(self, updates: list[Tensor]) -> list[Tensor]:
        weight_norms = torch.stack(torch._foreach_norm(self._weights))
        update_norms = torch.stack(torch._foreach_norm(updates))
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
        return list(ratios.unbind())

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name: what a checkpoint stores, free of layout and world size."""
        moments = {"first_moment": self.first_moment, "second_moment": self.second_moment}
        return {
            f"{kind}/{name}": tensor
            for kind, flat in moments.items()
            for name, tensor in self.arena.named(flat).items()
        }

    def load(self, state: dict[str, Tensor], num_applied: int) -> None:
        """Put back what `state` gave out."""
        for kind, flat in (("first_moment", self.first_moment), ("second_moment", self.second_moment)):
            self.arena.load(flat, {name: state[f"{kind}/{name}"] for name in self.arena.places})
        self.num_applied.fill_(num_applied)
