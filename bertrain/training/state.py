"""The training state: weights, gradients, moments, counters. Builds it, and copies it to the host for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Step
from bertrain.model.arena import Arena
from bertrain.model.encoder import EncoderModel, split_parts
from bertrain.model.initialization import initialize, uninitialized
from bertrain.optim.optimizer import Optimizer
from bertrain.optim.registry import build_optimizer
from bertrain.ranks.parallel import Ranks
from bertrain.run.checkpoint import Progress, Snapshot
from bertrain.training import engine
from bertrain.training.exchange import Exchange

WEIGHTS = "weights"


@dataclass
class TrainState:
    """One rank's state of a model in training."""

    model: EncoderModel
    arena: Arena
    optimizer: Optimizer
    exchange: Exchange
    engine: engine.Engine
    ranks: Ranks
    progress: Progress
    _host: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def build(settings: Settings, ranks: Ranks, *, draws: bool = True) -> TrainState:
        """A new model with optimizer and engine. Without `draws`, weights are zero, to be loaded afterwards."""
        model = uninitialized(settings.model, ranks.device).train()
        for parameter in model.parameters():
            parameter.detach().zero_()
        if draws:
            initialize(model, settings.train.seed)
        rate_of = partial(rate_factor, settings=settings)
        arena = Arena(model, split_parts, rate_of, shards=ranks.world if settings.optimizer.sharded else 1)
        exchange = Exchange(arena, ranks, settings)
        sum_over_ranks = ranks.all_reduce_sum if exchange.is_sharded else lambda *tensors: None
        optimizer = build_optimizer(arena, settings.optimizer, span=exchange.span, sum_over_ranks=sum_over_ranks)
        built = engine.build(model, arena, optimizer, exchange, ranks, settings)
        return TrainState(model, arena, optimizer, exchange, built, ranks, Progress())

    def snapshot(self) -> Snapshot | None:
        """A copy on the host for a checkpoint: on the first rank only, but all ranks must call this.

        The next snapshot reuses its memory, so this one must be written before.
        """
        self.allocate_snapshots()
        for name, buffer in self._flat().items():
            if self.exchange.is_sharded and name != WEIGHTS:
                self.ranks.gather(buffer, self._host.get(name))
            elif self.ranks.is_first:
                self._host[name].copy_(buffer, non_blocking=True)
        if not self.ranks.is_first:
            return None
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        buffers, extra = {name: self._host[name] for name in self.optimizer.buffers}, self.engine.state()
        moments = self.optimizer.state(buffers) | {name: tensor.to("cpu", copy=True) for name, tensor in extra.items()}
        progress = replace(self.progress, updates=int(self.optimizer.num_applied.item()))
        return Snapshot(self.arena.named(self._host[WEIGHTS]), moments, progress)

    def allocate_snapshots(self) -> None:
        """Allocate host memory on the first rank, pinned if a GPU copies into it; pinning takes a moment."""
        if self.ranks.is_first and not self._host:
            on_gpu, size = self.ranks.device.type == "cuda", len(self.arena.values)
            self._host = {name: torch.empty(size, pin_memory=on_gpu) for name in self._flat()}

    def _flat(self) -> dict[str, Tensor]:
        return {WEIGHTS: self.arena.values} | self.optimizer.buffers

    def warm_up(self, step: Step) -> tuple[float, float]:
        """Compute a bin of `step` twice and discard it: libraries load, kernels compile, and ranks connect.

        Returns how long the host took the second time: to compute, and then to exchange gradients.
        """
        one_bin = replace(step, bins=step.bins[:1], places=step.places[:1])
        for _ in range(2):
            begin = perf_counter()
            self.engine.begin(one_bin)
            self.exchange.begin()
            for batch in one_bin.bins:
                self.engine.add_bin(batch, step, is_last=True)
            computed = perf_counter()
            self.exchange.finish()
            end = perf_counter()
        self.engine.begin(replace(step, bins=[], places=[]))
        self.engine.discard_bins()
        self.ranks.all_reduce_sum(torch.zeros(1, device=self.ranks.device))
        return computed - begin, end - computed


def rate_factor(name: str, settings: Settings) -> float:
    """Factor on a parameter's learning rate: `layer_decay` for each layer above it, 0 if frozen."""
    num_layers, optimizer = settings.model.num_layers, settings.optimizer
    layer = -1 if name.startswith("embeddings.") else num_layers  # of the heads
    if name.startswith("layers."):
        layer = int(name.split(".")[1])
    if optimizer.frozen_layers and layer < optimizer.frozen_layers:
        return 0.0
    return optimizer.layer_decay ** (num_layers - layer)
