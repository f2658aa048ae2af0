"""Sums over ranks whose parts travel in 16 bits (train.exchange_precision).

An all-reduce in 16 bits would round after every addition. Here every rank receives one chunk from each other rank
(all-to-all), adds them in fp32 in the order of the ranks, and rounds the sum once for its way back (all-gather). A sum
does not depend on timing, and is the same on all ranks. With a sharded optimizer the owner keeps its sum in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bertrain.ranks.parallel import Ranks, all_gather_flat

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfSum:
    """The sum of one bucket, started at once. On a GPU all of it runs beside the backward pass, in a stream of its own;
    on a CPU only the first half does, and `wait` the second."""

    def __init__(
        self,
        bucket: Tensor,
        ranks: Ranks,
        form: torch.dtype,
        stream: torch.cuda.Stream | None,
        shards: Sequence[int] | None = None,
    ) -> None:
        """`shards` has the length of each rank's part of the bucket, if only its owner needs the sum."""
        self._bucket, self._ranks, self._form, self._stream = bucket, ranks, form, stream
        self._is_sharded = shards is not None
        chunk = -(-len(bucket) // ranks.world)
        self._lengths = list(shards) if shards is not None else [chunk] * ranks.world
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            place = torch.device("cpu") if ranks.copies_through_host else bucket.device
            sent = torch.zeros(sum(self._lengths), dtype=form, device=place)
            sent[: len(bucket)].copy_(bucket)
            self._received = sent.new_empty(ranks.world * self._lengths[ranks.rank])
            size = form.itemsize  # bytes travel, since no backend knows every format
            self._work = dist.all_to_all_single(
                self._received.view(torch.uint8),
                sent.view(torch.uint8),
                [size * self._lengths[ranks.rank]] * ranks.world,
                [size * length for length in self._lengths],
                async_op=True,
            )
            if stream is not None:
                self._complete()

    def wait(self) -> None:
        if self._stream is None:
            self._complete()
        else:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _complete(self) -> None:
        assert self._work is not None
        self._work.wait()
        total = self._received.view(self._ranks.world, self._lengths[self._ranks.rank]).sum(0, dtype=torch.float32)
        if self._is_sharded:
            first = sum(self._lengths[: self._ranks.rank])
            self._bucket[first : first + len(total)].copy_(total)
            return
        whole = self._received.new_empty(sum(self._lengths))
        all_gather_flat(whole.view(torch.uint8), total.to(self._form).view(torch.uint8))
        self._bucket.copy_(whole[: len(self._bucket)])
