"""Gradients summed over the ranks, bucket by bucket, while the backward pass still goes on; and their clipping.

A bucket is a fixed range of the arena. The backward pass completes the arena from its end to its beginning, and so
buckets leave in one fixed order, the same on every rank and in every run; only the last bin of a step sends any. With a
sharded optimizer each part of a bucket goes to the one rank that will use it: together, a reduce-scatter of the arena.

Clipping, with c the limit, W the ranks, B the buckets, S the loss scale and g a rank's share of the step's gradient
times W, so that it is of the size of the whole:

    global    the sum, after it was made, to norm c
    local     each rank's share: g/W min(1, S c / |g|), then the sum
    bucket    each bucket of it, as it leaves: g_b/W min(1, S c / (sqrt(B) |g_b|)), then the sum

`local` and `bucket` spare the wait for the whole gradient's norm; by their nature they depend on the number of ranks.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bertrain.config.settings import Settings
from bertrain.model.arena import Arena
from bertrain.optim.clipping import clip_factor, norm
from bertrain.ranks.parallel import Ranks

MEGABYTE = 1 << 20


class Exchange:
    """Brings the gradients of all ranks together, and says how long the result is."""

    def __init__(self, arena: Arena, ranks: Ranks, settings: Settings) -> None:
        self._arena, self._ranks = arena, ranks
        self._clipping, self._limit = settings.optimizer.clipping, settings.optimizer.clip_norm
        self.is_sharded = settings.optimizer.sharded and ranks.is_connected
        shards = ranks.world if self.is_sharded else 1
        self.span = arena.shard(ranks.rank if self.is_sharded else 0, shards)
        """The stretch of the arena whose sum this rank gets."""
        size = settings.train.bucket_mb * MEGABYTE // arena.gradients.element_size()
        self.buckets = arena.buckets(size)
        self._frozen = arena.frozen
        self._shards = [arena.shard(number, shards) for number in range(shards)]
        self._members = {name: self._buckets_of(name) for name in arena.places}
        self._num_members = [0] * len(self.buckets)
        for number in chain.from_iterable(self._members.values()):
            self._num_members[number] += 1
        self.loss_scale = torch.ones((), device=arena.gradients.device)
        """What the gradients are multiplied by, and must be divided by in the end."""
        self._missing: list[int] = []
        self._works: list[Any] = []
        self._next = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do before the end: no other rank, no clipping on the way."""
        return not self._ranks.is_connected and self._clipping == "global"

    @property
    def sent_on_the_way(self) -> list[range]:
        """The buckets that may leave while the backward pass goes on, in their order."""
        return [] if self.is_idle or self._clipping == "local" else self.buckets

    def _buckets_of(self, name: str) -> list[int]:
        start, shape = self._arena.places[name]
        stop = start + shape.numel()
        return [i for i, bucket in enumerate(self.buckets) if bucket.start < stop and start < bucket.stop]

    def begin(self) -> None:
        """Before the backward pass of a step's last bin."""
        self._works, self._next = [], 0
        self._missing = list(self._num_members)

    def parameter_ready(self, name: str) -> None:
        """The gradient of this parameter is complete."""
        for number in self._members[name]:
            self._missing[number] -= 1
        while self._next < len(self.sent_on_the_way) and self._missing[self._next] == 0:
            self._send()

    def ready_from(self, start: int) -> None:
        """Every gradient from this place of the arena on is complete."""
        while self._next < len(self.sent_on_the_way) and self.buckets[self._next].start >= start:
            self._send()

    def finish(self) -> None:
        """The whole gradient is complete: send what is left, and wait (on a GPU, let the device wait) for the sums."""
        if self.is_idle:
            self._forget_frozen(range(len(self._arena.gradients)))
            return
        if self._clipping == "local" and self._limit:
            self._forget_frozen(range(len(self._arena.gradients)))
            self._clip(self._arena.gradients, 1)
        while self._next < len(self.buckets):
            self._send()
        for work in self._works:
            work.wait()

    def _send(self) -> None:
        bucket = self.buckets[self._next]
        gradients = self._arena.gradients[bucket.start : bucket.stop]
        self._forget_frozen(bucket)
        if self._clipping == "bucket" and self._limit:
            self._clip(gradients, len(self.buckets))
        if self.is_sharded:
            for owner, shard in enumerate(self._shards):
                part = self._arena.gradients[max(bucket.start, shard.start) : min(bucket.stop, shard.stop)]
                if len(part):
                    self._works.append(self._ranks.start_reduce(owner, part))
        elif self._ranks.is_connected:
            self._works.append(self._ranks.start_all_reduce(gradients))
        self._next += 1

    def _forget_frozen(self, stretch: range) -> None:
        """What is not trained has no say in how much the rest is clipped, nor in whether the step is finite."""
        for frozen in self._frozen:
            start, stop = max(stretch.start, frozen.start), min(stretch.stop, frozen.stop)
            if start < stop:
                self._arena.gradients[start:stop].zero_()

    def _clip(self, share: Tensor, parts: int) -> None:
        length = norm(share) * self._ranks.world
        share.mul_(clip_factor(length, self.loss_scale * (self._limit / parts**0.5)))

    def norm_and_factor(self) -> tuple[Tensor, Tensor]:
        """Norm of the gradient as the optimizer is to see it before it is clipped, and what to multiply it by."""
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
