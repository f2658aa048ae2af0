"""One flat home for all parameters and another for their gradients.

Every tensor of the model becomes a view into one buffer, its gradient a view into another. What is done to all of them
alike is then one operation on one buffer whose layout never changes: zeroing, norms, moments, sums over ranks (a bucket
is a range), a sharded optimizer (a shard is a range). That is why this is used rather than DistributedDataParallel,
which rebuilds its buckets after the first backward pass and so makes a resumed run add up in another order than an
undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements: each tensor starts on a 256-byte boundary, where vector instructions like it


@dataclass(frozen=True)
class Segment:
    """A stretch of a flat buffer that the optimizer treats as one tensor, or the part of one that lies in a shard."""

    start: int
    stop: int
    is_adapted: bool
    """Whether weight decay and layer-wise rates apply: to matrices, not to biases and LayerNorm."""
    tensor: int
    """Number of the tensor, the same in every shard."""
    rate: float = 1.0
    """What the learning rate is multiplied by."""


class Arena:
    """The flat parameters and gradients of a model, whose tensors it turns into views of them."""

    def __init__(
        self,
        model: nn.Module,
        split_parts: Callable[[str], int] = lambda name: 1,
        rate_of: Callable[[str], float] = lambda name: 1.0,
        *,
        shards: int = 1,
    ) -> None:
        parameters = dict(model.named_parameters())
        first = next(iter(parameters.values()))
        self.places: dict[str, tuple[int, torch.Size]] = {}
        self.segments: list[Segment] = []
        size = 0
        for name, parameter in parameters.items():
            self.places[name] = size, parameter.shape
            part = parameter.numel() // split_parts(name)
            for start in range(size, size + parameter.numel(), part):
                number = len(self.segments)
                self.segments.append(Segment(start, start + part, parameter.ndim > 1, number, rate_of(name)))
            size = _round_up(size + parameter.numel(), ALIGNMENT)
        self._used = size
        size = _round_up(size, ALIGNMENT * shards)
        self.values = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.values)
        for name, parameter in parameters.items():
            value = self.view(self.values, name)
            value.copy_(parameter.detach())
            parameter.data = value
            parameter.grad = self.view(self.gradients, name)

    @property
    def frozen(self) -> list[range]:
        """The stretches whose learning rate is zero, each as long as can be."""
        stretches: list[range] = []
        previous = None
        for segment in self.segments:
            if segment.rate == 0:
                begins = stretches.pop().start if previous is not None and previous.rate == 0 else segment.start
                stretches.append(range(begins, segment.stop))
            previous = segment
        return stretches

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat buffer of this layout that belongs to parameter `name`, in its shape."""
        start, shape = self.places[name]
        return flat[start : start + shape.numel()].view(shape)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat buffer of this layout, by parameter name; the tensors are views."""
        return {name: self.view(flat, name) for name in self.places}

    def load(self, flat: Tensor, named: dict[str, Tensor]) -> None:
        """Copy tensors by name into a flat buffer of this layout."""
        for name in self.places:
            self.view(flat, name).copy_(named[name])

    def shard(self, number: int, shards: int) -> range:
        """The stretch of the flat buffers that belongs to one of several equal shards."""
        size = len(self.values) // shards
        return range(number * size, (number + 1) * size)

    def segments_in(self, span: range) -> list[Segment]:
        """The tensors, or their parts, that lie in a stretch, counted from its beginning."""
        return [
            replace(
                segment,
                start=max(segment.start, span.start) - span.start,
                stop=min(segment.stop, span.stop) - span.start,
            )
            for segment in self.segments
            if segment.start < span.stop and span.start < segment.stop
        ]

    def buckets(self, size: int) -> list[range]:
        """Stretches of at least `size` elements, the last of the arena first, as a backward pass completes them.

        Each holds whole parameters; what pads the arena for its shards makes no difference to where they begin.
        """
        found, stop = [], len(self.values)
        for start in sorted((start for start, _ in self.places.values()), reverse=True):
            if start == 0 or min(stop, self._used) - start >= size:
                found.append(range(start, stop))
                stop = start
        return found


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
