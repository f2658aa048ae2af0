"""All that a step changes: weights, gradients, moments, counters; built here, and copied off for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertrain.data.loader import Step
from bertrain.model.bert import Bert, split_parts
from bertrain.model.initial import initialise
from bertrain.optim.arena import Arena
from bertrain.optim.optimizer import Optimizer
from bertrain.optim.rules import build_optimizer
from bertrain.settings import Settings
from bertrain.train import compute
from bertrain.train.checkpoint import Progress, Snapshot, copy_to_host
from bertrain.train.exchange import Exchange
from bertrain.train.parallel import Ranks


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

    @staticmethod
    def build(settings: Settings, ranks: Ranks) -> TrainState:
        """A fresh model and everything around it."""
        model = Bert(settings.model)
        initialise(model, settings.train.seed)
        model.to(ranks.device).train()
        arena = Arena(model, split_parts, shards=ranks.world if settings.optimizer.sharded else 1)
        exchange = Exchange(arena, ranks, settings)
        sum_over_ranks = ranks.sum if exchange.is_sharded else _leave
        optimizer = build_optimizer(arena, settings.optimizer, span=exchange.span, sum_over_ranks=sum_over_ranks)
        work = compute.build(model, arena, optimizer, exchange, ranks, settings)
        return TrainState(model, arena, optimizer, exchange, work, ranks, Progress())

    def snapshot(self) -> Snapshot | None:
        """A copy off the device, which a checkpoint is written from: on the first rank, but all must ask for it."""
        gathered = self.ranks.gather if self.exchange.is_sharded else _as_it_is
        whole = {name: gathered(buffer) for name, buffer in self.optimizer.buffers.items()}
        if not self.ranks.is_first:
            return None
        return Snapshot(
            model=copy_to_host(self.arena.named(self.arena.values)),
            optimizer=copy_to_host(self.optimizer.state(whole) | self.compute.state()),
            progress=replace(self.progress, updates=int(self.optimizer.num_applied.item())),
        )

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


def _leave(tensor: Tensor) -> None:
    """A sum over one rank."""


def _as_it_is(buffer: Tensor) -> Tensor:
    return buffer
