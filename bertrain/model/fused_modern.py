"""ModernBERT on the kernels, forward and backward by hand: its layer and its embeddings.

LayerNorm comes before a branch, and the sum of residual and branch after it: one kernel adds a branch and normalizes
the total for the next one. So a layer here ends with the LayerNorm of the layer above, or with the model's last. Its
input and its output are pairs: the residual, and its LayerNorm as an operand. In FP8, a LayerNorm has no 16-bit copy,
since only products read it.

Letters as in bert.py. The gradient of a tensor `x` is called `dx`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bertrain.config.settings import ModelSettings
from bertrain.kernels.arguments import EmbeddingIds, EmbeddingTables, Rotary
from bertrain.kernels.attention import ragged_attention_backward, ragged_attention_forward
from bertrain.kernels.embedding import embed_backward, embed_forward, word_gradient
from bertrain.kernels.fp8 import Scales
from bertrain.kernels.geglu import geglu_backward, geglu_forward
from bertrain.kernels.prenorm import add_layernorm_backward, add_layernorm_forward, layernorm_forward
from bertrain.kernels.reduction import column_sums
from bertrain.kernels.rotary import rotate
from bertrain.model.batch import Batch
from bertrain.model.fused import FusedModel
from bertrain.model.fused_layer import FusedLayer, Recompute, pick, scatter
from bertrain.model.fused_operands import (
    LayerDropout,
    LayerMatrix,
    LayerTensor,
    Matrix,
    Operand,
    ParameterViews,
    PassContext,
)
from bertrain.model.modern import waves_at


class Stream(NamedTuple):
    """The input and output of a layer: the residual in 16 bits, and its LayerNorm."""

    residual: Tensor
    normed: Operand


class Products(NamedTuple):
    """Results of a layer's products and of attention; the two totals of the residual with their statistics."""

    qkv: Tensor  # rotated
    attended: Tensor
    lse: Tensor
    middle_total: Tensor
    middle_statistics: Tensor
    expanded: Tensor
    output_total: Tensor
    output_statistics: Tensor


class Operands(NamedTuple):
    """The inputs of a layer's products, in their order."""

    normed: Operand
    picked: Operand  # attention's output for the rows that are computed
    middle: Operand
    activated: Operand


@dataclass
class Saved:
    """Tensors for the backward pass; under activation checkpointing without those that are recomputed."""

    residual: Tensor
    rows: Tensor | None
    products: Products | None  # None under `full`
    operands: Operands | None  # None under `selective` and `full`


@dataclass(frozen=True)
class BranchEnd:
    """The end of a branch: a product, then dropout, the sum with the residual, and the LayerNorm that comes next."""

    matrix: Matrix
    weight: Tensor  # of LayerNorm
    gradient: Tensor  # of `weight`
    dropout: LayerDropout
    normed: LayerTensor
    dproduct: LayerTensor


class ModernLayer(FusedLayer):
    """Self-attention and a gated feed-forward network, each added to the residual; LayerNorm before each."""

    def __init__(
        self, settings: ModelSettings, views: ParameterViews, number: int, scales: Scales | None, recompute: Recompute
    ) -> None:
        super().__init__(settings, views, number, scales, recompute)
        self.window = settings.windows[number] or 0  # positions on each side; 0: all
        self.rotary: Rotary  # set by `FusedModern`; layers with the same theta share it
        self.input_weight = views.value(f"{self.prefix}attention_norm.weight") if number else None

        def norm(name: str) -> tuple[Tensor, Tensor]:
            return views.value(f"{name}.weight"), views.gradient(f"{name}.weight")

        self.middle = BranchEnd(
            self.matrices[LayerMatrix.ATTENTION_OUT], *norm(f"{self.prefix}expand_norm"), LayerDropout.MIDDLE,
            LayerTensor.MIDDLE, LayerTensor.DPROJECTED,
        )  # fmt: skip
        above = "final_norm" if self.is_last else f"layers.{number + 1}.attention_norm"
        self.output = BranchEnd(
            self.matrices[LayerMatrix.CONTRACT], *norm(above), LayerDropout.OUTPUT,
            LayerTensor.OUTPUT, LayerTensor.DCONTRACTED,
        )  # fmt: skip

    def _rate(self, context: PassContext, which: LayerDropout) -> float:
        if which is LayerDropout.OUTPUT:
            return 0.0
        return context.hidden_dropout if which is LayerDropout.ACTIVATED else context.attention_dropout

    def forward(self, x: Stream, context: PassContext, rows: Tensor | None = None) -> tuple[Stream, Saved]:
        output, saved = self._forward(x, context, rows)
        if self.recompute != "none":
            products = saved.products if self.recompute == "selective" else None
            return output, replace(saved, products=products, operands=None)
        assert saved.operands is not None
        kept = Operands(*(operand.without_rows8 for operand in saved.operands))  # only forward products read them
        return output, replace(saved, operands=kept)

    def _forward(self, x: Stream, context: PassContext, rows: Tensor | None) -> tuple[Stream, Saved]:
        qkv = self.qkv.product(x.normed).unflatten(-1, (3, self.heads, self.head_size))
        rotate(qkv, context.positions, self.rotary)
        dropout = self._dropout(context, LayerDropout.ATTENTION)
        cast = None if rows is not None else self._cast(context, LayerTensor.ATTENDED)
        attended, lse, attended8 = ragged_attention_forward(qkv, context.plan, dropout, cast, window=self.window)
        picked = self._operand(context, LayerTensor.ATTENDED, pick(attended.flatten(1), rows), attended8)
        residual = pick(x.residual, rows)
        middle_total, middle, middle_statistics = self._end_forward(self.middle, picked, residual, context)
        expanded = self.expand.product(middle)
        activated = self._activate(expanded, context)
        output_total, normed, output_statistics = self._end_forward(self.output, activated, middle_total, context)
        totals = middle_total, middle_statistics, expanded, output_total, output_statistics
        operands = Operands(x.normed, picked, middle, activated)
        saved = Saved(x.residual, rows, Products(qkv, attended, lse, *totals), operands)
        return Stream(output_total, normed), saved

    def _end_forward(
        self, end: BranchEnd, x: Operand, residual: Tensor, context: PassContext
    ) -> tuple[Tensor, Operand, Tensor]:
        """The new residual, its LayerNorm, and the statistics of that."""
        is_output = end is self.output and self.is_last  # the heads read it in 16 bits
        cast = None if is_output else self._cast(context, end.normed)
        full = is_output or not context.uses_fp8
        dropout = self._dropout(context, end.dropout)
        total, normed, statistics, normed8 = add_layernorm_forward(
            end.matrix.product(x), residual, end.weight, dropout, self.eps, cast, full=full
        )
        if is_output:
            return total, Operand(normed), statistics
        return total, self._operand(context, end.normed, normed if full else None, normed8), statistics

    def _norm_again(
        self, total: Tensor, weight: Tensor, context: PassContext, tensor: LayerTensor, layer: int
    ) -> Operand:
        """The LayerNorm of a residual, which is `tensor` of `layer`, computed again."""
        cast = None if context.scales is None else context.scales.cast(tensor.scale(layer))
        full = not context.uses_fp8
        normed, normed8 = layernorm_forward(total, weight, self.eps, cast, full=full)
        return self._operand(context, tensor, normed if full else None, normed8, layer=layer)

    def _activate(self, expanded: Tensor, context: PassContext) -> Operand:
        full, cast = not context.uses_fp8, self._cast(context, LayerTensor.ACTIVATED)
        dropout = self._dropout(context, LayerDropout.ACTIVATED)
        activated, activated8 = geglu_forward(expanded, dropout, cast, full=full)
        return self._operand(context, LayerTensor.ACTIVATED, activated if full else None, activated8)

    def _restore(self, saved: Saved, context: PassContext) -> tuple[Products, Operands]:
        """Recompute the tensors that were not saved, bit for bit: masks and scales are the same within a step."""
        if saved.products is not None and saved.operands is not None:
            return saved.products, saved.operands
        normed = Operand(saved.residual)  # the embeddings have a LayerNorm of their own, and no FP8 copy
        if self.input_weight is not None:
            below = self.number - 1
            normed = self._norm_again(saved.residual, self.input_weight, context, LayerTensor.OUTPUT, below)
        if saved.products is None:
            again = self._forward(Stream(saved.residual, normed), context, saved.rows)[1]
            assert again.products is not None
            assert again.operands is not None
            return again.products, again.operands
        products = saved.products
        picked = self._operand(context, LayerTensor.ATTENDED, pick(products.attended.flatten(1), saved.rows))
        weight, total = self.middle.weight, products.middle_total
        middle = self._norm_again(total, weight, context, LayerTensor.MIDDLE, self.number)
        return products, Operands(normed, picked, middle, self._activate(products.expanded, context))

    def backward(self, dy: Tensor, second: Tensor | None, saved: Saved, context: PassContext) -> tuple[Tensor, Tensor]:
        """Write the parameters' gradients, given those of the output's LayerNorm and residual (`second`; None above the
        last layer); return the same two of the input."""
        products, operands = self._restore(saved, context)
        accumulate, full = context.accumulate, not context.uses_fp8
        dactivated, dmiddle_total = self._end_backward(
            self.output, dy, second, products.output_total, products.output_statistics, operands.activated, context
        )
        dropout, cast = self._dropout(context, LayerDropout.ACTIVATED), self._cast(context, LayerTensor.DEXPANDED)
        dexpanded, dexpanded8 = geglu_backward(dactivated, products.expanded, dropout, cast, full=full)
        operand = self._operand(context, LayerTensor.DEXPANDED, dexpanded if full else None, dexpanded8)
        self.expand.weight_gradient(operand, operands.middle, accumulate)
        dmiddle = self.expand.input_gradient(operand)

        dattended, dresidual = self._end_backward(
            self.middle, dmiddle, dmiddle_total, products.middle_total, products.middle_statistics, operands.picked,
            context,
        )  # fmt: skip
        if saved.rows is not None:  # the other rows have no gradient
            dattended = scatter(dattended, saved.rows, len(products.qkv))
            dresidual = scatter(dresidual, saved.rows, len(products.qkv))

        full = full or operands.normed.columns8 is None  # the first layer's input has no FP8 copy
        qkv, attended, lse = products[:3]
        dropout, cast = self._dropout(context, LayerDropout.ATTENTION), self._cast(context, LayerTensor.DQKV)
        dqkv, _, dqkv8 = ragged_attention_backward(
            qkv, attended, lse, dattended.view_as(attended), context.plan, dropout, cast,
            full=full, window=self.window, rotary=self.rotary,
        )  # fmt: skip
        operand = self._operand(context, LayerTensor.DQKV, dqkv.flatten(1) if full else None, dqkv8)
        self.qkv.weight_gradient(operand, operands.normed, accumulate)
        return self.qkv.input_gradient(operand), dresidual

    def _end_backward(
        self, end: BranchEnd, dy: Tensor, along: Tensor | None, total: Tensor, statistics: Tensor, x: Operand,
        context: PassContext,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of the product's input `x` and of the residual."""
        full = not context.uses_fp8
        dropout, cast = self._dropout(context, end.dropout), self._cast(context, end.dproduct)
        dresidual, dproduct, sums, dproduct8 = add_layernorm_backward(
            dy, along, total, end.weight, statistics, dropout, cast, full=full
        )
        column_sums(sums, [end.gradient], accumulate=context.accumulate)
        operand = self._operand(context, end.dproduct, dproduct if full else None, dproduct8)
        end.matrix.weight_gradient(operand, x, context.accumulate)
        return end.matrix.input_gradient(operand), dresidual


class FusedModern(FusedModel):
    """ModernBERT: the embeddings end with LayerNorm, so the first layer has none before its attention."""

    LAYER = ModernLayer

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        settings, device = self.settings, self.values16.device
        positions = torch.arange(settings.max_positions, device=device)
        tables = {
            theta: Rotary(*(wave.flatten(1) for wave in waves_at(positions, settings.head_size, theta)))
            for theta in (settings.global_theta, settings.local_theta)
        }
        for layer in self.layers:
            assert isinstance(layer, ModernLayer)
            layer.rotary = tables[settings.local_theta if layer.window else settings.global_theta]

    def _enter(self, embedded: Tensor) -> Stream:
        return Stream(embedded, Operand(embedded))

    def _leave(self, x: Stream) -> Tensor:
        return x.normed.in_16_bits

    def _embed(self, batch: Batch, context: PassContext) -> tuple[Tensor, Tensor]:
        weight, eps = self.views.value("embeddings.norm.weight"), self.settings.layer_norm_eps
        dropout = self._embedding_dropout(context)
        return embed_forward(self._words(), EmbeddingIds(batch.input_ids), weight, None, dropout, eps)

    def _words(self) -> EmbeddingTables:
        return EmbeddingTables(self.views.value16("embeddings.words.weight"))

    def _embed_backward(
        self, dy: Tensor, second: Tensor, batch: Batch, statistics: Tensor, context: PassContext
    ) -> None:
        weight, dropout = self.views.value("embeddings.norm.weight"), self._embedding_dropout(context)
        ids = EmbeddingIds(batch.input_ids)
        dsum, sums = embed_backward(dy, second, self._words(), ids, weight, statistics, dropout)
        column_sums(sums, [self.views.gradient("embeddings.norm.weight")], accumulate=context.accumulate)
        # Always adds: the masked-word head, which shares this matrix, has written to it.
        word_gradient(dsum, batch.input_ids, self.views.gradient("embeddings.words.weight"))
