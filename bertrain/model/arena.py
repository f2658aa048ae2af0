"""The arena: one flat buffer for all parameters and another for their gradients.

Every parameter of the model becomes a view into one buffer, its gradient a view into the other. Zeroing, norms,
moments, sums over ranks (a bucket is a range) and a sharded optimizer (a shard is a range) are then operations on one
buffer whose layout never changes. DistributedDataParallel rebuilds its buckets after the first backward pass, so that a
resumed run would sum in another order than an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements: each tensor starts on a 256-byte boundary, for vector instructions


@dataclass(frozen=True)
class Segment:
    """A range of a flat buffer that the optimizer treats as one tensor, or the part of a tensor in a shard."""

    start: int
    stop: int
    is_adapted: bool  # whether weight decay and LAMB's trust ratio apply: to matrices, not to biases and LayerNorm
    tensor: int  # number of the tensor, the same in every shard
    rate: float = 1.0  # factor on the learning rate


class Arena:
    """The flat parameters and gradients of a model; replaces the model's tensors by views of them."""

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
        """The ranges whose learning rate is zero; adjacent segments form one range."""
        groups = groupby(self.segments, key=lambda segment: segment.rate == 0)
        frozen = [list(segments) for is_frozen, segments in groups if is_frozen]
        return [range(segments[0].start, segments[-1].stop) for segments in frozen]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Parameter `name` in a flat buffer of this layout, in its shape."""
        start, shape = self.places[name]
        return flat[start : start + shape.numel()].view(shape)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat buffer of this layout, by parameter name."""
        return {name: self.view(flat, name) for name in self.places}

    def load(self, flat: Tensor, named: dict[str, Tensor]) -> None:
        for name in self.places:
            self.view(flat, name).copy_(named[name])

    def shard(self, number: int, shards: int) -> range:
        size = len(self.values) // shards
        return range(number * size, (number + 1) * size)

    def segments_in(self, span: range) -> list[Segment]:
        """The segments, or their parts, in a range, with offsets from its start."""
        found = []
        for segment in self.segments:
            start, stop = max(segment.start, span.start), min(segment.stop, span.stop)
            if start < stop:
                found.append(replace(segment, start=start - span.start, stop=stop - span.start))
        return found

    def buckets(self, size: int) -> list[range]:
        """Ranges of at least `size` elements, from the arena's end to its start, as a backward pass completes them.

        Each holds whole parameters. The padding for shards does not change where buckets start.
        """
        found, stop = [], len(self.values)
        for start in sorted((start for start, _ in self.places.values()), reverse=True):
            if start == 0 or min(stop, self._used) - start >= size:
                found.append(range(start, stop))
                stop = start
        return found


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
