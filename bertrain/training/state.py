"""All that a step changes: weights, gradients, moments, counters; built here, and copied off for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Step
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert, split_parts
from bertrain.model.initialization import initialize
from bertrain.optim.optimizer import Optimizer
from bertrain.optim.registry import build_optimizer
from bertrain.ranks.parallel import Ranks
from bertrain.run.checkpoint import Progress, Snapshot, copy_to_host
from bertrain.training import fused_engine as compute
from bertrain.training.exchange import Exchange

WEIGHTS = "weights"


@dataclass
class TrainState:
    """A model in training, as one rank holds it."""

    model: Bert
    arena: Arena
    optimizer: Optimizer
    exchange: Exchange
    compute: compute.Compute
    ranks: Ranks
    progress: Progress
    _host: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def build(settings: Settings, ranks: Ranks, *, draws: bool = True) -> TrainState:
        """A fresh model and everything around it. Without `draws` the weights are zero, for whoever has others."""
        with torch.device("meta"):  # where PyTorch's own draw, which BERT has no use for, costs nothing
            model = Bert(settings.model)
        model.to_empty(device=ranks.device).train()
        for parameter in model.parameters():
            parameter.detach().zero_()
        if draws:
            initialize(model, settings.train.seed)
        rate_of = partial(rate_factor, settings=settings)
        arena = Arena(model, split_parts, rate_of, shards=ranks.world if settings.optimizer.sharded else 1)
        exchange = Exchange(arena, ranks, settings)
        sum_over_ranks = ranks.sum if exchange.is_sharded else _leave
        optimizer = build_optimizer(arena, settings.optimizer, span=exchange.span, sum_over_ranks=sum_over_ranks)
        work = compute.build(model, arena, optimizer, exchange, ranks, settings)
        return TrainState(model, arena, optimizer, exchange, work, ranks, Progress())

    def snapshot(self) -> Snapshot | None:
        """A copy off the device, which a checkpoint is written from: on the first rank, but all must ask for it.

        It lives in memory that the next snapshot uses again, so that one must have been written by then.
        """
        self.make_room_for_snapshots()
        for name, buffer in self._flat().items():
            if self.exchange.is_sharded and name != WEIGHTS:
                self.ranks.gather(buffer, self._host.get(name))
            elif self.ranks.is_first:
                self._host[name].copy_(buffer, non_blocking=True)
        if not self.ranks.is_first:
            return None
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        buffers = {name: self._host[name] for name in self.optimizer.buffers}
        return Snapshot(
            model=self.arena.named(self._host[WEIGHTS]),
            optimizer=self.optimizer.state(buffers) | copy_to_host(self.compute.state()),
            progress=replace(self.progress, updates=int(self.optimizer.num_applied.item())),
        )

    def make_room_for_snapshots(self) -> None:
        """Set host memory aside on the first rank; page-locked where a GPU copies into it, which takes a moment."""
        if self.ranks.is_first and not self._host:
            on_gpu, size = self.ranks.device.type == "cuda", len(self.arena.values)
            self._host = {name: torch.empty(size, pin_memory=on_gpu) for name in self._flat()}

    def _flat(self) -> dict[str, Tensor]:
        return {WEIGHTS: self.arena.values} | self.optimizer.buffers

    def warm_up(self, step: Step) -> None:
        """Two passes over a bin of `step` and its way through the other ranks; nothing of it is kept.

        Libraries load, kernels are built and connections made before the clock of the first step starts.
        """
        for _ in range(2):
            self.compute.begin(len(step.bins[:1]))
            self.exchange.begin()
            for batch in step.bins[:1]:
                self.compute.add_bin(batch, step, is_last=True)
            self.exchange.finish()
        self.compute.begin(0)
        self.compute.forget()
        self.ranks.sum(torch.zeros(1, device=self.ranks.device))


def rate_factor(name: str, settings: Settings) -> float:
    """What a parameter's learning rate is multiplied by: less with each layer further down, nothing where frozen."""
    num_layers, how = settings.model.num_layers, settings.optimizer
    layer = num_layers  # the heads
    if name.startswith("embeddings."):
        layer = -1
    elif name.startswith("layers."):
        layer = int(name.split(".")[1])
    return 0.0 if layer < how.frozen_layers and how.frozen_layers else how.layer_decay ** (num_layers - layer)


def _leave(tensor: Tensor) -> None:
    """A sum over one rank."""
