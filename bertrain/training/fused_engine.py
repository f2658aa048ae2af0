"""The fused engine: `model/fused.py` on the kernels, in bf16 or FP8, replayed through CUDA graphs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Step
from bertrain.kernels.arguments import LambBuffers, LambConstants, LambScalars
from bertrain.kernels.lamb import LambTable, Part, lamb_step
from bertrain.model.arena import Arena
from bertrain.model.batch import Batch
from bertrain.model.encoder import EncoderModel, Outputs
from bertrain.model.fused_families import new_fused
from bertrain.model.sums import packed_sums
from bertrain.optim.clipping import is_finite
from bertrain.optim.optimizer import Optimizer
from bertrain.optim.rules import AdamW, Lamb
from bertrain.optim.verdict import Verdict, not_computed
from bertrain.ranks.parallel import Ranks
from bertrain.training.exchange import Exchange

FP8_SCALE = "fp8/scale"


class Shape(NamedTuple):
    """Bins of the same shape share CUDA graphs."""

    tokens: int
    slots: int
    predictions: int
    accumulate: bool  # whether the bin adds to the gradient, or overwrites it
    pauses: bool  # whether buckets of the gradient leave during its backward pass


@dataclass
class Captured:
    """Bins of one shape: the buffers that batches are copied into, and after the first run, CUDA graphs."""

    batch: Batch
    is_warm: bool = False
    graphs: list[tuple[torch.cuda.CUDAGraph, int]] = field(default_factory=list)
    """Each with the arena offset above which all gradients are complete after it."""


class FusedEngine:
    """The kernels, in bf16 or FP8. Bins of each shape run once eagerly, then as CUDA graphs.

    On one rank, a bin is one graph. With several, the last bin of a step is split where buckets of its gradient are
    complete; they are sent between two graphs. See `engine.Engine` for the methods.
    """

    def __init__(
        self,
        model: EncoderModel,
        arena: Arena,
        optimizer: Optimizer,
        exchange: Exchange,
        ranks: Ranks,
        settings: Settings,
    ) -> None:
        train = settings.train
        self._model = new_fused(model, arena, fp8=train.precision == "fp8", recompute=train.activation_checkpointing)
        self._arena, self._optimizer, self._settings = arena, optimizer, settings
        self._exchange, self._ranks = exchange, ranks
        device = arena.values.device
        self.sums = packed_sums(device=device)
        self._seed = torch.zeros(1, dtype=torch.int64, device=device)
        self._word_scale, self._sequence_scale = torch.zeros(1, device=device), torch.zeros(1, device=device)
        self._token_scale = torch.zeros(1, device=device)
        self._rate = torch.zeros(1, device=device)
        self._verdict = not_computed().to(device)
        self._table = lamb_table(optimizer)
        self._pauses = self._layers_to_pause_after()
        self._captured: dict[Shape, Captured] = {}
        self._update_graph: torch.cuda.CUDAGraph | None = None
        self._has_updated = False
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.uses_graphs = self._pool is not None
        self._is_first_bin = True

    def _layers_to_pause_after(self) -> frozenset[int]:
        """The layers whose backward pass completes a bucket."""
        starts = [self._model.first_offset(number) for number in range(len(self._model.layers))]
        sent = [bucket.start for bucket in self._exchange.sent_during_backward if bucket.start >= starts[0]]
        return frozenset(max(number for number, first in enumerate(starts) if first <= start) for start in sent)

    @property
    def peaks(self) -> list[Tensor]:
        return [] if self._model.scales is None else [self._model.scales.largest]

    def state(self) -> dict[str, Tensor]:
        scales = self._model.scales
        return {} if scales is None or not scales.ready else {FP8_SCALE: scales.scale}

    def restore(self, state: dict[str, Tensor]) -> None:
        if self._model.scales is not None and FP8_SCALE in state:
            self._model.scales.load(state[FP8_SCALE])
        self._model.refresh()

    def begin(self, step: Step) -> None:
        self._is_first_bin = True  # the first bin overwrites the gradient; the others add to it
        self.sums.zero_()
        if not step.bins:
            self._arena.gradients.zero_()

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        accumulate, self._is_first_bin = not self._is_first_bin, False
        pauses = self._pauses if is_last else frozenset[int]()
        self._seed.fill_(batch.dropout_seed)
        self._word_scale.fill_(1 / max(1, step.num_predictions))
        self._sequence_scale.fill_(1 / step.num_sequences)
        self._token_scale.fill_(self._settings.model.rtd / step.num_tokens)
        if self._pool is None:  # without graphs, shapes need not repeat
            self._run_pieces(batch.without_padding(), accumulate, pauses)
            return
        shape = Shape(len(batch.input_ids), len(batch.is_real), len(batch.mlm_labels), accumulate, bool(pauses))
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = Captured(batch.to(self.sums.device))
        else:
            captured.batch.copy_(batch)
        if not captured.graphs and captured.is_warm and self.uses_graphs:
            captured.graphs = self._capture_pieces(captured.batch, accumulate, pauses)
        if captured.graphs and self.uses_graphs:
            for graph, complete_from in captured.graphs:
                graph.replay()
                self._exchange.ready_from(complete_from)
        else:
            # FP8 measures its scales in the first step; graphs capture the second, which uses them.
            captured.is_warm = self._model.scales is None or self._model.scales.ready
            self._run_pieces(captured.batch, accumulate, pauses)

    @torch.no_grad()
    def embeddings(self, batch: Batch) -> Tensor:
        self._seed.fill_(batch.dropout_seed)
        batch = batch.without_padding() if self._pool is None else batch.to(self.sums.device)
        return self._model.embeddings(batch, self._seed)[batch.is_real]

    def _run_pieces(self, batch: Batch, accumulate: bool, pauses: frozenset[int]) -> None:
        for complete_from in self._pieces(batch, accumulate, pauses):
            self._exchange.ready_from(complete_from)

    def _pieces(self, batch: Batch, accumulate: bool, pauses: frozenset[int]) -> Generator[int, None, None]:
        """Compute a bin in pieces; yields after each the arena offset above which all gradients are complete."""
        self.sums += yield from self._model.forward_backward(
            batch, self._seed, self._word_scale, self._sequence_scale, accumulate, pauses, self._token_scale
        )
        if self._model.scales is not None:
            self._model.scales.collect()
        yield len(self._arena.gradients)  # nothing to send here: `Exchange.finish` sends the rest

    def _capture_pieces(
        self, batch: Batch, accumulate: bool, pauses: frozenset[int]
    ) -> list[tuple[torch.cuda.CUDAGraph, int]]:
        graphs, pieces = [], self._pieces(batch, accumulate, pauses)
        for _ in range(len(pauses) + 1):
            graph = torch.cuda.CUDAGraph()
            with _capture(graph, self._pool):
                complete_from = next(pieces)
            graphs.append((graph, complete_from))
        pieces.close()
        return graphs

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Outputs:
        return self._model.outputs(batch)

    def discard_bins(self) -> None:
        if self._model.scales is not None:
            self._model.scales.largest.zero_()
        self._model.refresh()

    def update(self, rate: float) -> Tensor:
        self._rate.fill_(rate)
        if self._table is None or self._exchange.is_sharded:  # no kernels, or it communicates with other ranks
            self._update(rate)
        elif self._update_graph is not None and self.uses_graphs:
            self._update_graph.replay()
        elif self._has_updated and self.uses_graphs:
            self._update_graph = torch.cuda.CUDAGraph()
            with _capture(self._update_graph, self._pool):
                self._update(rate)
            self._update_graph.replay()
        else:
            self._update(rate)
            self._has_updated = True
        return self._verdict.clone()

    def _update(self, rate: float) -> None:
        settings, optimizer = self._settings.optimizer, self._optimizer
        norm, factor = self._exchange.norm_and_factor()
        apply = is_finite(self.sums.sum(), norm)
        if self._table is None:
            optimizer.step(rate, factor, apply)
        else:
            optimizer.num_applied += apply
            moments = optimizer.buffers["first_moment"], optimizer.buffers["second_moment"]
            lamb_step(
                LambBuffers(optimizer.values, optimizer.gradients, *moments),
                self._table,
                LambScalars(self._rate, factor, apply, optimizer.num_applied.clamp(min=1).float()),
                LambConstants(settings.weight_decay, settings.beta1, settings.beta2, settings.epsilon),
                copy=self._model.values16[optimizer.span.start : optimizer.span.stop],
                sum_over_ranks=optimizer.sum_over_ranks,
            )
        self._verdict.copy_(Verdict.pack(norm, apply))
        if self._exchange.is_sharded:
            self._ranks.all_gather_shards(self._arena.values)
        if self._exchange.is_sharded or self._table is None:
            self._model.values16.copy_(self._arena.values)
        if self._model.scales is not None:
            self._model.scales.update()
            self._model.requantize()


def lamb_table(optimizer: Optimizer) -> LambTable | None:
    """The tensors as the kernels of LAMB and AdamW need them; None for optimizers without kernels."""
    if not isinstance(optimizer, AdamW):
        return None
    adapts, segments = isinstance(optimizer, Lamb), optimizer.segments
    # The padding after a tensor is zero and stays zero; with it, every range ends where wide loads may.
    stops = [*(segment.start for segment in segments[1:]), len(optimizer.values)]
    parts = [
        Part(segment.start, stop, segment.tensor, segment.is_adapted, segment.is_adapted and adapts, segment.rate)
        for segment, stop in zip(segments, stops, strict=True)
    ]
    return LambTable.build(parts, len(optimizer.arena.segments), optimizer.values.device)


def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[None]:
    """Capture the launches of this thread; the loader's thread may pin memory meanwhile."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
