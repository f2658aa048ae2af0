"""What every update rule shares: flat buffers, a count of the steps applied, and state by parameter name.

A rule is a subclass that names its buffers and writes `update`. It sees one stretch of the arena, the whole of it or a
rank's shard, and must not take a segment for a whole tensor: what it needs of whole tensors (LAMB's norms) it sums over
the ranks. Everything runs on the device: whether a step is applied at all (`apply`, 0 or 1) is a tensor that nobody
waits for, and a step that is not applied leaves weights, buffers and the count exactly as they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena


class Optimizer(ABC):
    """An update rule over a stretch of an arena; the whole, unless `span` says which."""

    BUFFERS: ClassVar[tuple[str, ...]]
    """Names of the rule's state, a flat buffer each, zero at the beginning unless `begin` sets it."""
    ON_THE_WAY: ClassVar[int] = 8
    """Bytes per parameter that `step` needs while it computes, the gradient that it hands to `update` among them."""

    def __init__(
        self,
        arena: Arena,
        settings: OptimizerSettings,
        *,
        span: range | None = None,
        sum_over_ranks: Callable[[Tensor], None] = lambda tensor: None,
    ) -> None:
        self.arena, self.settings, self.sum_over_ranks = arena, settings, sum_over_ranks
        self.span = range(len(arena.values)) if span is None else span
        self.values = arena.values[self.span.start : self.span.stop]
        self.gradients = arena.gradients[self.span.start : self.span.stop]
        self.segments = arena.segments_in(self.span)
        self.adapted = [segment for segment in self.segments if segment.is_adapted]
        self.buffers = {name: torch.zeros_like(self.values) for name in self.BUFFERS}
        self.num_applied = torch.zeros((), dtype=torch.float64, device=arena.values.device)
        self.begin()

    def begin(self) -> None:  # noqa: B027 - most rules have nothing to set
        """Set what does not begin as zero; called again when the weights are replaced before the first step."""

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: Tensor, apply: Tensor) -> None:
        """One update from `gradient_scale` times the gradients, if `apply` is 1; nothing if it is 0."""
        apply = apply.to(self.values.dtype)
        self.num_applied += apply
        # A gradient that is not finite must not reach the buffers, not even multiplied by zero.
        gradient = (self.gradients * gradient_scale).masked_fill_(apply == 0, 0.0)
        self.update(gradient, learning_rate, apply)

    @abstractmethod
    def update(self, gradient: Tensor, learning_rate: float, apply: Tensor) -> None:
        """Change weights and buffers by `gradient`, whose memory is free to use, or by nothing where `apply` is 0."""

    def slices(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer to which decay and layer-wise rates apply."""
        return [flat[segment.start : segment.stop] for segment in self.adapted]

    def state(self, whole: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Buffers by parameter name: what a checkpoint stores, free of layout and world size.

        Of a shard, `whole` brings the buffers of all shards together.
        """
        return {
            f"{kind}/{name}": tensor
            for kind, buffer in (whole or self.buffers).items()
            for name, tensor in self.arena.named(buffer).items()
        }

    def load(self, state: dict[str, Tensor], num_applied: int) -> None:
        """Put back what `state` gave out; refuses another rule's state, or another model's."""
        for kind, buffer in self.buffers.items():
            whole = torch.zeros(len(self.arena.values), dtype=buffer.dtype)
            for name, (_, shape) in self.arena.places.items():
                stored = state.get(f"{kind}/{name}")
                if stored is None or stored.shape != shape:
                    found = "none is there" if stored is None else f"it is {list(stored.shape)} there"
                    raise UserError(
                        f"the optimizer's state does not fit: {self.settings.name} wants {kind} of {name}, "
                        f"{list(shape)}, and {found}"
                    )
                self.arena.view(whole, name).copy_(stored)
            buffer.copy_(whole[self.span.start : self.span.stop])
        self.num_applied.fill_(num_applied)
