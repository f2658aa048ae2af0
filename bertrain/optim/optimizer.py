"""The base of all optimizers: flat buffers, the number of applied steps, and state by parameter name.

A subclass names its buffers and implements `update`. It gets one range of the arena, the whole or a rank's shard; a
segment may be part of a tensor, so it sums values of whole tensors (LAMB's norms) over the ranks. Everything runs on
the device: whether a step is applied (`apply`, 0 or 1) is a tensor, and the host does not wait for it. A step that is
not applied leaves weights, buffers and the number of steps unchanged.
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
    """An optimizer over the range `span` of an arena; by default, over all of it."""

    BUFFERS: ClassVar[tuple[str, ...]]
    """Names of its state: one flat buffer each, initially zero unless `begin` sets it."""
    TEMPORARY_BYTES: ClassVar[int] = 8
    """Bytes per parameter that `step` allocates while it computes, including the gradient for `update`."""

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

    def begin(self) -> None:  # noqa: B027 - most optimizers have nothing to set
        """Set buffers that do not start as zero; called again if weights are loaded before the first step."""

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: Tensor, apply: Tensor) -> None:
        """Update by `gradient_scale` times the gradients if `apply` is 1; change nothing if it is 0."""
        apply = apply.to(self.values.dtype)
        self.num_applied += apply
        # A gradient that is not finite must not reach the buffers, not even multiplied by zero.
        gradient = (self.gradients * gradient_scale).masked_fill_(apply == 0, 0.0)
        self.update(gradient, learning_rate, apply)

    @abstractmethod
    def update(self, gradient: Tensor, learning_rate: float, apply: Tensor) -> None:
        """Update weights and buffers by `gradient`; change nothing if `apply` is 0. May overwrite `gradient`."""

    def slices(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer to which weight decay and trust ratios apply."""
        return [flat[segment.start : segment.stop] for segment in self.adapted]

    def state(self, whole: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Buffers by parameter name, for a checkpoint that is independent of layout and world size.

        With a sharded optimizer, `whole` holds the buffers gathered from all shards.
        """
        return {
            f"{kind}/{name}": tensor
            for kind, buffer in (whole or self.buffers).items()
            for name, tensor in self.arena.named(buffer).items()
        }

    def load(self, state: dict[str, Tensor], num_applied: int) -> None:
        """Load the result of `state`; refuses the state of another optimizer or model."""
        for kind, buffer in self.buffers.items():
            whole = torch.zeros(len(self.arena.values), dtype=buffer.dtype)
            for name, (_, shape) in self.arena.places.items():
                stored = state.get(f"{kind}/{name}")
                if stored is None or stored.shape != shape:
                    found = "has none" if stored is None else f"has {list(stored.shape)}"
                    raise UserError(
                        "optimizer-state-mismatch",
                        f"the checkpoint's optimizer state does not fit: {self.settings.name} needs {kind} of {name} "
                        f"of shape {list(shape)}, and the checkpoint {found}; use the optimizer and model of the run",
                    )
                self.arena.view(whole, name).copy_(stored)
            buffer.copy_(whole[self.span.start : self.span.stop])
        self.num_applied.fill_(num_applied)
