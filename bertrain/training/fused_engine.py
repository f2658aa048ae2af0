"""How a step is computed: plainly under autograd, or on the kernels through CUDA graphs. The loop does not see which.

`choose` decides, and says why. Both add a bin's share of the gradient into the arena and apply one update to it; both
leave everything on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from bertrain.base import isa
from bertrain.base.errors import UserError
from bertrain.config.settings import Settings, TrainSettings
from bertrain.data.feed.batching import SHAPES
from bertrain.data.feed.loader import Step
from bertrain.kernels import backend, cpu
from bertrain.kernels.lamb import LambTable, Part, lamb_step
from bertrain.model.arena import Arena
from bertrain.model.batch import Batch
from bertrain.model.bert import Bert, Outputs, split_parts
from bertrain.model.fused import FusedBert
from bertrain.model.heads import Sums, answer_sums, pretraining_sums
from bertrain.optim.clipping import is_finite
from bertrain.optim.lamb import AdamW, Lamb
from bertrain.optim.optimizer import Optimizer
from bertrain.ranks.parallel import Ranks
from bertrain.run.loss_scale import LossScale
from bertrain.training.exchange import Exchange
from bertrain.training.precision import autocast, check_precision
from bertrain.training.recompute import recompute_layers

Predictor = Callable[[Batch], Outputs]
"""What a model says of a bin on its device, without dropout."""


class Compute(Protocol):
    """What the loop asks for."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside weights and moments."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave out, if anything, and weights that were changed from outside."""

    def begin(self, num_bins: int) -> None:
        """Before the bins of a step. A rank without one has nothing to add: its gradient is zero."""

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        """Add one bin's share of the step's gradient, sums of losses and right answers.

        As the last bin completes the gradient, it goes to the other ranks.
        """

    @property
    def sums(self) -> Tensor:
        """Sums [4] over the bins since `begin`: loss of masked words and of sentences, right answers of both."""

    @property
    def peaks(self) -> list[Tensor]:
        """Largest magnitudes since `begin`, of which `update` wants the largest over all ranks."""

    def outputs(self, batch: Batch) -> Outputs:
        """What the model says of a bin on its device: no dropout, and nothing of it is kept for training."""

    def forget(self) -> None:
        """Undo what bins leave behind when no update follows them."""

    def update(self, rate: float) -> Tensor:
        """Apply the gradient; returns its norm and 1 if the step was applied, 0 if it was not finite.

        Where the loss is scaled, the scale of this step comes third.
        """


class PlainCompute:
    """The specification: the model under autograd, in float32 or under autocast, on any device."""

    def __init__(
        self, model: Bert, arena: Arena, optimizer: Optimizer, exchange: Exchange, ranks: Ranks, settings: Settings
    ) -> None:
        self._model, self._arena, self._optimizer, self._settings = model, arena, optimizer, settings
        self._exchange, self._ranks = exchange, ranks
        self.sums = torch.zeros(4, dtype=torch.float64, device=arena.values.device)
        self.peaks: list[Tensor] = []
        self._loss_scale = LossScale(self.sums.device) if settings.train.precision == "fp16" else None
        recompute_layers(model, settings.train.activation_checkpointing)
        if self._loss_scale is not None:
            exchange.loss_scale = self._loss_scale.scale
        self._completes_gradient = False
        if not exchange.is_idle:
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._accumulated(name))

    def _accumulated(self, name: str) -> None:
        if self._completes_gradient:
            self._exchange.parameter_ready(name)

    def state(self) -> dict[str, Tensor]:
        return {} if self._loss_scale is None else self._loss_scale.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        if self._loss_scale is not None:
            self._loss_scale.load(state)

    def begin(self, num_bins: int) -> None:
        self._arena.gradients.zero_()
        self.sums.zero_()

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        # The loss is divided by the counts of the whole step, so the bins of all ranks add up to its exact mean.
        device = self.sums.device
        batch = batch.without_junk() if device.type == "cpu" else batch.to(device)
        torch.manual_seed(batch.dropout_seed)
        with autocast(self._settings.train, device):
            outputs = self._model(batch)
        sums = sums_of(outputs, batch, self._settings.model.head)
        loss = sums.mlm_loss / max(1, step.num_predictions) + sums.nsp_loss / step.num_sequences
        self._completes_gradient = is_last
        (loss if self._loss_scale is None else loss * self._loss_scale.scale).backward()
        self.sums += sums.stack()

    def outputs(self, batch: Batch) -> Outputs:
        return plain_outputs(self._model, batch, self._settings.train)

    def forget(self) -> None:
        pass  # `begin` clears all there is

    def update(self, rate: float) -> Tensor:
        norm, factor = self._exchange.norm_and_factor()
        apply = is_finite(self.sums.sum(), norm)
        self._optimizer.step(rate, factor, apply)
        if self._exchange.is_sharded:
            self._ranks.all_gather_shards(self._arena.values)
        if self._loss_scale is None:
            return torch.stack([norm, apply])
        scaled_by = self._loss_scale.scale.clone()
        self._loss_scale.update(apply)
        return torch.stack([norm, apply, scaled_by])


def sums_of(outputs: Outputs, batch: Batch, head: str) -> Sums:
    """Losses and right answers of what a model says of a bin."""
    if outputs.answers is not None:
        return answer_sums(outputs.answers, batch, head)
    assert outputs.mlm_logits is not None
    return pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch)


@torch.no_grad()
def plain_outputs(model: Bert, batch: Batch, settings: TrainSettings) -> Outputs:
    """What the model says under autograd's rules of precision, dropout off."""
    was_training = model.training
    with autocast(settings, batch.input_ids.device):
        outputs = model.eval()(batch)
    model.train(was_training)
    return outputs


FP8_SCALE = "fp8/scale"
MOST_TOKENS = 8 * 65_535  # rows that a kernel reaches: CUDA counts so many blocks down, of eight rows in GELU
Shape = tuple[int, int, int, bool, bool]  # tokens, slots, predictions of a bin; adds to the gradient; completes it


@dataclass
class Captured:
    """A bin's shape: the buffers its batches are copied into, and its work as CUDA graphs once it has run once.

    Each graph comes with the place of the arena from which on gradients are complete after it.
    """

    batch: Batch
    is_warm: bool = False
    graphs: list[tuple[torch.cuda.CUDAGraph, int]] = field(default_factory=list)


class FusedCompute:
    """The kernels, in bf16 or FP8. Each shape of bin runs once as it is, then as CUDA graphs.

    Alone, a bin is one graph. Among ranks the last bin of a step is cut where buckets of its gradient are complete, and
    these leave between two graphs.
    """

    def __init__(
        self, model: Bert, arena: Arena, optimizer: Optimizer, exchange: Exchange, ranks: Ranks, settings: Settings
    ) -> None:
        how = settings.train
        self._model = FusedBert(model, arena, fp8=how.precision == "fp8", recompute=how.activation_checkpointing)
        self._arena, self._optimizer, self._settings = arena, optimizer, settings
        self._exchange, self._ranks = exchange, ranks
        device = arena.values.device
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._seed = torch.zeros(1, dtype=torch.int64, device=device)
        self._word_scale, self._sentence_scale = torch.zeros(1, device=device), torch.zeros(1, device=device)
        self._rate = torch.zeros(1, device=device)
        self._verdict = torch.zeros(2, device=device)
        self._table = lamb_table(optimizer)
        self._pauses = self._layers_to_pause_after()
        self._captured: dict[Shape, Captured] = {}
        self._update_graph: torch.cuda.CUDAGraph | None = None
        self._has_updated = False
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.uses_graphs = self._pool is not None
        """Set to false, kernels are launched one by one: a profiler then sees which operator launched which."""
        self._is_first_bin = True

    def _layers_to_pause_after(self) -> frozenset[int]:
        """The layers whose backward pass completes a bucket."""
        starts = [self._model.first_place(number) for number in range(len(self._model.layers))]
        sent = [bucket.start for bucket in self._exchange.sent_on_the_way if bucket.start >= starts[0]]
        return frozenset(max(number for number, place in enumerate(starts) if place <= start) for start in sent)

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

    def begin(self, num_bins: int) -> None:
        self._is_first_bin = True  # which writes the gradient; the others add to it
        self.sums.zero_()
        if num_bins == 0:
            self._arena.gradients.zero_()

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        accumulate, self._is_first_bin = not self._is_first_bin, False
        pauses = self._pauses if is_last else frozenset[int]()
        self._seed.fill_(batch.dropout_seed)
        self._word_scale.fill_(1 / max(1, step.num_predictions))
        self._sentence_scale.fill_(1 / step.num_sequences)
        if self._pool is None:  # without graphs there is no shape to repeat
            for complete_from in self._pieces(batch.without_junk(), accumulate, pauses):
                self._exchange.ready_from(complete_from)
            return
        shape = len(batch.input_ids), len(batch.nsp_labels), len(batch.mlm_labels), accumulate, bool(pauses)
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = Captured(batch.to(self.sums.device))
        else:
            _copy_into(captured.batch, batch)
        if not captured.graphs and captured.is_warm and self.uses_graphs:
            captured.graphs = self._capture_pieces(captured.batch, accumulate, pauses)
        if captured.graphs and self.uses_graphs:
            for graph, complete_from in captured.graphs:
                graph.replay()
                self._exchange.ready_from(complete_from)
        else:
            # FP8 measures its scales in the first step; what a graph repeats is the step after.
            captured.is_warm = self._model.scales is None or self._model.scales.ready
            for complete_from in self._pieces(captured.batch, accumulate, pauses):
                self._exchange.ready_from(complete_from)

    def _pieces(self, batch: Batch, accumulate: bool, pauses: frozenset[int]) -> Generator[int, None, None]:
        """A bin's work, piece by piece, each with the place from which on the gradient is complete after it."""
        self.sums += yield from self._model.forward_backward(
            batch, self._seed, self._word_scale, self._sentence_scale, accumulate, pauses
        )
        if self._model.scales is not None:
            self._model.scales.collect()
        yield len(self._arena.gradients)  # the end, which `Exchange.finish` knows of

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

    def forget(self) -> None:
        if self._model.scales is not None:
            self._model.scales.largest.zero_()
        self._model.refresh()

    def update(self, rate: float) -> Tensor:
        self._rate.fill_(rate)
        if self._table is None or self._exchange.is_sharded:  # it talks to other ranks, or has no kernels
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
        span = optimizer.span
        norm, factor = self._exchange.norm_and_factor()
        apply = is_finite(self.sums.sum(), norm)
        if self._table is None:
            optimizer.step(rate, factor, apply)
        else:
            optimizer.num_applied += apply
            lamb_step(
                optimizer.values, optimizer.gradients, optimizer.buffers["first_moment"],
                optimizer.buffers["second_moment"], self._table, self._rate, factor, apply,
                optimizer.num_applied.clamp(min=1).float(),
                weight_decay=settings.weight_decay, beta1=settings.beta1, beta2=settings.beta2, eps=settings.epsilon,
                copy=self._model.copy[span.start : span.stop], sum_over_ranks=optimizer.sum_over_ranks,
            )  # fmt: skip
        self._verdict.copy_(torch.stack([norm, apply]))
        if self._exchange.is_sharded:
            self._ranks.all_gather_shards(self._arena.values)
        if self._exchange.is_sharded or self._table is None:
            self._model.copy.copy_(self._arena.values)
        if self._model.scales is not None:
            self._model.scales.update()
            self._model.requantize()


def lamb_table(optimizer: Optimizer) -> LambTable | None:
    """What the kernels of LAMB and AdamW need to know of the tensors; None for rules that have no kernels."""
    if not isinstance(optimizer, AdamW):
        return None
    adapts, segments = isinstance(optimizer, Lamb), optimizer.segments
    # The padding behind a tensor is zero and stays so; with it, every range is a multiple of what loads like.
    stops = [*(segment.start for segment in segments[1:]), len(optimizer.values)]
    parts = [
        Part(segment.start, stop, segment.tensor, segment.is_adapted, segment.is_adapted and adapts, segment.rate)
        for segment, stop in zip(segments, stops, strict=True)
    ]
    return LambTable.build(parts, len(optimizer.arena.segments), optimizer.values.device)


def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[None]:
    """Record what this thread launches; the loader's thread may pin memory meanwhile."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


def _copy_into(buffers: Batch, batch: Batch) -> None:
    """Copy a batch's tensors into those of another of the same shape, without waiting."""
    for item in fields(batch):
        tensor = getattr(batch, item.name)
        if isinstance(tensor, Tensor):
            getattr(buffers, item.name).copy_(tensor, non_blocking=True)


def predictor(model: Bert, settings: Settings, device: torch.device) -> Predictor:
    """A model that is not to be trained, as what it says of a bin; on the kernels where `choose` would."""
    if choose(settings, device)[0]:
        fused = FusedBert(model, Arena(model, split_parts))
        return torch.no_grad()(fused.outputs)
    return lambda batch: plain_outputs(model, batch, settings.train)


def why_unfit(settings: Settings, device: torch.device) -> str:
    """What of these settings the kernels cannot compute; nothing where they can."""
    head_size, precision = settings.model.head_size, settings.train.precision
    if device.type == "cpu" and settings.model.intermediate_size % 16:
        return f"model.intermediate_size {settings.model.intermediate_size} is not a multiple of 16"
    if device.type == "cuda" and settings.batch.token_budget > MOST_TOKENS:
        return f"batch.token_budget {settings.batch.token_budget:,} is more than the {MOST_TOKENS:,} of one launch"
    if head_size not in (16, 32, 64, 128):
        return f"heads of {head_size} are not 16, 32, 64 or 128 wide"
    if precision == "fp8":
        # 8-bit products want whole sixteens on every side; the smallest bin is a quarter of the budget.
        sizes = {
            "batch.token_budget": (settings.batch.token_budget, 16 * SHAPES),
            "model.intermediate_size": (settings.model.intermediate_size, 16),
        }
        for name, (size, factor) in sizes.items():
            if size % factor:
                return f"{name} {size} is not a multiple of {factor}"
    return ""


def choose(settings: Settings, device: torch.device) -> tuple[bool, str]:
    """Whether to compute on the kernels, and why (not)."""
    precision = settings.train.precision
    check_precision(settings.train, device)
    on_cpu = device.type == "cpu" and not backend.INTERPRETED
    formats = ("bf16",) if on_cpu else ("bf16", "fp8")
    if settings.train.kernels == "plain":
        usable, reason = False, "asked for"
    elif precision not in formats:
        usable, reason = False, f"the kernels work in {' or '.join(formats)}, not in {precision}"
    elif on_cpu and isa.usable(settings.train.isa) != "amx":
        usable, reason = False, "the kernels for CPUs need AMX"
    else:
        usable, reason = cpu.available() if on_cpu else backend.available(device)
    if usable and why_unfit(settings, device):
        usable, reason = False, why_unfit(settings, device)
    elif usable and precision == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        usable, reason = False, f"{torch.cuda.get_device_name(device)} has no FP8"
    if precision == "fp8" and not usable:
        raise UserError(f"train.precision fp8 is not possible here ({reason}); use --train.precision bf16")
    instructions = f"; {isa.describe(settings.train.isa, precision)}" if device.type == "cpu" else ""
    return usable, f"{'fused kernels' if usable else 'plain PyTorch'}, {precision} ({reason}){instructions}"


def build(
    model: Bert, arena: Arena, optimizer: Optimizer, exchange: Exchange, ranks: Ranks, settings: Settings
) -> PlainCompute | FusedCompute:
    """What `choose` chose."""
    is_fused, _ = choose(settings, arena.values.device)
    return (FusedCompute if is_fused else PlainCompute)(model, arena, optimizer, exchange, ranks, settings)
