"""Sums gradients over the ranks, bucket by bucket, during the backward pass; and clips them.

A bucket is a fixed range of the arena. The backward pass completes the arena from its end to its start, so buckets are
sent in one fixed order, the same on every rank and in every run. Only the last bin of a step sends any. With a sharded
optimizer, each part of a bucket goes to the rank that owns it: together, a reduce-scatter of the arena. half_sum.py
does the same in 16 bits.

Clipping, with c the limit, W the number of ranks, B the number of buckets, S the loss scale and g a rank's part of the
step's gradient times W, so that it has the size of the whole:

    global    the sum, to norm c
    local     each rank's part before the sum: g/W min(1, S c / |g|)
    bucket    each bucket before it is sent: g_b/W min(1, S c / (sqrt(B) |g_b|))

`local` and `bucket` do not wait for the norm of the whole gradient; their results depend on the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from bertrain.config.settings import Settings
from bertrain.model.arena import Arena
from bertrain.optim.clipping import clip_factor, norm
from bertrain.ranks.parallel import Ranks
from bertrain.training.half_sum import FORMATS, HalfSum

MEGABYTE = 1 << 20


class Exchange:
    """Sums the gradients of all ranks, and computes the norm of the result."""

    def __init__(self, arena: Arena, ranks: Ranks, settings: Settings) -> None:
        self._arena, self._ranks = arena, ranks
        self._clipping, self._limit = settings.optimizer.clipping, settings.optimizer.clip_norm
        self.is_sharded = settings.optimizer.sharded and ranks.is_connected
        shards = ranks.world if self.is_sharded else 1
        self.span = arena.shard(ranks.rank if self.is_sharded else 0, shards)
        """The range of the arena whose sum this rank receives."""
        size = settings.train.bucket_mb * MEGABYTE // arena.gradients.element_size()
        self.buckets = arena.buckets(size)
        self._frozen = arena.frozen
        self._shards = [arena.shard(number, shards) for number in range(shards)]
        # A bucket holds whole parameters.
        self._bucket_of = {
            name: next(i for i, bucket in enumerate(self.buckets) if start in bucket)
            for name, (start, _) in arena.places.items()
        }
        self._num_members = Counter(self._bucket_of.values())
        self.loss_scale = torch.ones((), device=arena.gradients.device)
        """Factor on the gradients, by which `norm_and_factor` divides."""
        self._missing = Counter[int]()
        self._works: list[Any] = []
        self._next = 0
        self._half = FORMATS.get(settings.train.exchange_precision)
        by_stream = self._half and arena.gradients.device.type == "cuda" and not ranks.copies_through_host
        self._stream = torch.cuda.Stream() if by_stream else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens during the backward pass: there is no other rank and no clipping by bucket."""
        return not self._ranks.is_connected and self._clipping == "global"

    @property
    def sent_during_backward(self) -> list[range]:
        """The buckets that are sent during the backward pass, in their order."""
        return [] if self.is_idle or self._clipping == "local" else self.buckets

    def begin(self) -> None:
        """Start a step; called before the backward pass of its last bin."""
        self._works, self._next = [], 0
        self._missing = self._num_members.copy()

    def parameter_ready(self, name: str) -> None:
        self._missing[self._bucket_of[name]] -= 1
        while self._next < len(self.sent_during_backward) and self._missing[self._next] == 0:
            self._send()

    def ready_from(self, start: int) -> None:
        while self._next < len(self.sent_during_backward) and self.buckets[self._next].start >= start:
            self._send()

    def finish(self) -> None:
        """Report that the whole gradient is complete: send the rest and wait for the sums (on a GPU, on the stream)."""
        if self.is_idle:
            self._zero_frozen(range(len(self._arena.gradients)))
            return
        if self._clipping == "local" and self._limit:
            self._zero_frozen(range(len(self._arena.gradients)))
            self._clip(self._arena.gradients, 1)
        while self._next < len(self.buckets):
            self._send()
        for work in self._works:
            work.wait()

    def _send(self) -> None:
        bucket = self.buckets[self._next]
        gradients = self._arena.gradients[bucket.start : bucket.stop]
        self._zero_frozen(bucket)
        if self._clipping == "bucket" and self._limit:
            self._clip(gradients, len(self.buckets))
        if self._half and self._ranks.is_connected:
            inside = [max(0, min(bucket.stop, one.stop) - max(bucket.start, one.start)) for one in self._shards]
            shards = inside if self.is_sharded else None
            self._works.append(HalfSum(gradients, self._ranks, self._half, self._stream, shards))
        elif self.is_sharded:
            for owner, shard in enumerate(self._shards):
                part = self._arena.gradients[max(bucket.start, shard.start) : min(bucket.stop, shard.stop)]
                if len(part):
                    self._works.append(self._ranks.start_reduce(part, owner))
        elif self._ranks.is_connected:
            self._works.append(self._ranks.start_reduce(gradients))
        self._next += 1

    def _zero_frozen(self, span: range) -> None:
        """Zero gradients of frozen parameters, so that they affect neither clipping nor the finite check."""
        for frozen in self._frozen:
            start, stop = max(span.start, frozen.start), min(span.stop, frozen.stop)
            if start < stop:
                self._arena.gradients[start:stop].zero_()

    def _clip(self, gradients: Tensor, num_parts: int) -> None:
        length = norm(gradients) * self._ranks.world
        gradients.mul_(clip_factor(length, self.loss_scale * (self._limit / num_parts**0.5)))

    def norm_and_factor(self) -> tuple[Tensor, Tensor]:
        """Norm of the unscaled gradient before clipping, and the factor that unscales and clips it."""
        own = self._arena.gradients[self.span.start : self.span.stop]
        length = norm(own)
        if self.is_sharded:
            squares = length.square()
            self._ranks.all_reduce_sum(squares)
            length = squares.sqrt()
        length = length / self.loss_scale
        if self._clipping != "global" or self._limit == 0:
            return length, 1 / self.loss_scale
        return length, clip_factor(length, self._limit) / self.loss_scale
