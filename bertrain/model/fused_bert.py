"""BERT on the kernels, forward and backward by hand: its layer and its embeddings.

Letters as in bert.py. The gradient of a tensor `x` is called `dx`; `x8` is `x` in FP8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from bertrain.config.settings import ModelSettings
from bertrain.kernels.arguments import EmbeddingIds, EmbeddingTables, Fp8Rows, NormParameters
from bertrain.kernels.attention import ragged_attention_backward, ragged_attention_forward
from bertrain.kernels.embedding import embed_backward, embed_forward, position_gradient, word_gradient
from bertrain.kernels.fp8 import Scales
from bertrain.kernels.gelu import bias_gelu_backward, bias_gelu_forward
from bertrain.kernels.layernorm import dropout_add_layernorm_backward, dropout_add_layernorm_forward
from bertrain.kernels.reduction import column_sums
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


class Products(NamedTuple):
    """Results of a layer's products and of attention, and two numbers per row of its output."""

    qkv: Tensor
    attended: Tensor
    lse: Tensor
    projected: Tensor
    expanded: Tensor
    contracted: Tensor
    output_statistics: Tensor


@dataclass
class SavedSome:
    """Tensors saved under activation checkpointing: the input in 16 bits, which the layer cannot recompute."""

    x: Tensor
    rows: Tensor | None
    products: Products | None  # None under `full`


@dataclass
class SavedAll:
    """Tensors saved without activation checkpointing; the backward pass needs all of them."""

    x: Operand
    rows: Tensor | None
    products: Products
    residual: Tensor
    picked: Operand  # attention's output for the rows that are computed
    middle: Operand
    middle_statistics: Tensor
    activated: Operand


Saved = SavedSome | SavedAll


@dataclass(frozen=True)
class BlockEnd:
    """The end of a block of the layer: a product, then dropout, the residual sum and LayerNorm."""

    matrix: Matrix
    norm: NormParameters
    gradients: list[Tensor]  # of `norm`
    dropout: LayerDropout
    dproduct: LayerTensor


class BertLayer(FusedLayer):
    """Self-attention and a feed-forward network, each followed by dropout, residual and LayerNorm."""

    def __init__(
        self, settings: ModelSettings, views: ParameterViews, number: int, scales: Scales | None, recompute: Recompute
    ) -> None:
        super().__init__(settings, views, number, scales, recompute)
        prefix = self.prefix
        self.qkv_bias = views.value16(f"{prefix}qkv.bias")  # the product adds it, in 16 bits
        self.qkv_bias_gradient = views.gradient(f"{prefix}qkv.bias")
        self.expand_bias = views.value(f"{prefix}expand.bias")
        self.expand_bias_gradient = views.gradient(f"{prefix}expand.bias")

        def end(which: LayerMatrix, norm: str, dropout: LayerDropout, dproduct: LayerTensor) -> BlockEnd:
            names = [f"{prefix}{name}" for name in (f"{which.name.lower()}.bias", f"{norm}.weight", f"{norm}.bias")]
            values, gradients = NormParameters(*map(views.value, names)), list(map(views.gradient, names))
            return BlockEnd(self.matrices[which], values, gradients, dropout, dproduct)

        self.middle = end(LayerMatrix.ATTENTION_OUT, "attention_norm", LayerDropout.MIDDLE, LayerTensor.DPROJECTED)
        self.output = end(LayerMatrix.CONTRACT, "output_norm", LayerDropout.OUTPUT, LayerTensor.DCONTRACTED)

    def _rate(self, context: PassContext, which: LayerDropout) -> float:
        return context.attention_dropout if which is LayerDropout.ATTENTION else context.hidden_dropout

    def forward(self, x: Operand, context: PassContext, rows: Tensor | None = None) -> tuple[Operand, Saved]:
        output, output8, saved = self._forward(x, context, rows)
        is_last = rows is not None
        operand = Operand(output) if is_last else self._operand(context, LayerTensor.OUTPUT, output, output8)
        return operand, self._reduce(saved)

    def _forward(
        self, x: Operand, context: PassContext, rows: Tensor | None
    ) -> tuple[Tensor, Fp8Rows | None, SavedAll]:
        qkv = self.qkv.product(x, self.qkv_bias).unflatten(-1, (3, self.heads, self.head_size))
        is_last = rows is not None
        dropout = self._dropout(context, LayerDropout.ATTENTION)
        cast = None if is_last else self._cast(context, LayerTensor.ATTENDED)
        attended, lse, attended8 = ragged_attention_forward(qkv, context.plan, dropout, cast)
        residual = pick(x.in_16_bits, rows)
        picked = self._operand(context, LayerTensor.ATTENDED, pick(attended.flatten(1), rows), attended8)
        projected = self.middle.matrix.product(picked)
        middle, middle_statistics = self._norm_middle(projected, residual, context)
        expanded = self.expand.product(middle)
        activated = self._activate(expanded, context)
        contracted = self.output.matrix.product(activated)
        dropout = self._dropout(context, LayerDropout.OUTPUT)
        cast = None if is_last else self._cast(context, LayerTensor.OUTPUT)
        output, statistics, output8 = dropout_add_layernorm_forward(
            contracted, middle.in_16_bits, self.output.norm, dropout, self.eps, cast
        )
        products = Products(qkv, attended, lse, projected, expanded, contracted, statistics)
        saved = SavedAll(x, rows, products, residual, picked, middle, middle_statistics, activated)
        return output, output8, saved

    def _norm_middle(self, projected: Tensor, residual: Tensor, context: PassContext) -> tuple[Operand, Tensor]:
        dropout, cast = self._dropout(context, LayerDropout.MIDDLE), self._cast(context, LayerTensor.MIDDLE)
        middle, statistics, middle8 = dropout_add_layernorm_forward(
            projected, residual, self.middle.norm, dropout, self.eps, cast
        )
        return self._operand(context, LayerTensor.MIDDLE, middle, middle8), statistics

    def _activate(self, expanded: Tensor, context: PassContext) -> Operand:
        full, cast = not context.uses_fp8, self._cast(context, LayerTensor.ACTIVATED)
        activated, activated8 = bias_gelu_forward(expanded, self.expand_bias, cast, full=full)
        return self._operand(context, LayerTensor.ACTIVATED, activated if full else None, activated8)

    def _reduce(self, saved: SavedAll) -> Saved:
        """The tensors that stay in memory until the backward pass; only forward products read FP8 rows."""
        if self.recompute != "none":
            return SavedSome(saved.x.in_16_bits, saved.rows, saved.products if self.recompute == "selective" else None)
        return replace(
            saved,
            x=saved.x.without_rows8,
            picked=saved.picked.without_rows8,
            middle=saved.middle.without_rows8,
            activated=saved.activated.without_rows8,
        )

    def _restore(self, saved: Saved, context: PassContext) -> SavedAll:
        """Recompute the tensors that were not saved, bit for bit: masks and scales are the same within a step."""
        if isinstance(saved, SavedAll):
            return saved
        if self.number == 0:  # the embeddings have no FP8 copy
            x = Operand(saved.x)
        else:
            x = self._operand(context, LayerTensor.OUTPUT, saved.x, layer=self.number - 1)
        products, rows = saved.products, saved.rows
        if products is None:
            return self._forward(x, context, rows)[2]
        residual = pick(saved.x, rows)
        picked = self._operand(context, LayerTensor.ATTENDED, pick(products.attended.flatten(1), rows))
        middle, middle_statistics = self._norm_middle(products.projected, residual, context)
        activated = self._activate(products.expanded, context)
        return SavedAll(x, rows, products, residual, picked, middle, middle_statistics, activated)

    def backward(self, dy: Tensor, second: Tensor | None, saved: Saved, context: PassContext) -> tuple[Tensor, Tensor]:
        """Write the parameters' gradients, given dy + second; return two gradients of the input, also to be added."""
        kept = self._restore(saved, context)
        products, accumulate, full = kept.products, context.accumulate, not context.uses_fp8
        dactivated, dmiddle_residual = self._end_backward(
            self.output, dy, second, products.contracted, kept.middle.in_16_bits, products.output_statistics,
            kept.activated, context,
        )  # fmt: skip

        dexpanded, dexpanded8, sums = bias_gelu_backward(
            dactivated, products.expanded, self.expand_bias, self._cast(context, LayerTensor.DEXPANDED), full=full
        )
        column_sums(sums, [self.expand_bias_gradient], accumulate=accumulate)
        operand = self._operand(context, LayerTensor.DEXPANDED, dexpanded if full else None, dexpanded8)
        self.expand.weight_gradient(operand, kept.middle, accumulate)
        dmiddle = self.expand.input_gradient(operand)

        dattended, dresidual = self._end_backward(
            self.middle, dmiddle, dmiddle_residual, products.projected, kept.residual, kept.middle_statistics,
            kept.picked, context,
        )  # fmt: skip
        if kept.rows is not None:  # the other rows have no gradient
            dattended = scatter(dattended, kept.rows, len(products.qkv))
            dresidual = scatter(dresidual, kept.rows, len(products.qkv))

        full = full or kept.x.columns8 is None  # the first layer's input has no FP8 copy: a product in 16 bits
        qkv, attended, lse = products[:3]
        dropout, cast = self._dropout(context, LayerDropout.ATTENTION), self._cast(context, LayerTensor.DQKV)
        dqkv, bias_sums, dqkv8 = ragged_attention_backward(
            qkv, attended, lse, dattended.view_as(attended), context.plan, dropout, cast, full=full
        )
        assert bias_sums is not None
        dquery_bias, dkey_bias, dvalue_bias = self.qkv_bias_gradient.chunk(3)
        column_sums(bias_sums, [dquery_bias, dvalue_bias], accumulate=accumulate)
        if not accumulate:
            dkey_bias.zero_()  # the softmax ignores this bias
        operand = self._operand(context, LayerTensor.DQKV, dqkv.flatten(1) if full else None, dqkv8)
        self.qkv.weight_gradient(operand, kept.x, accumulate)
        return self.qkv.input_gradient(operand), dresidual

    def _end_backward(
        self, end: BlockEnd, dy: Tensor, second: Tensor | None, product: Tensor, residual: Tensor, statistics: Tensor,
        x: Operand, context: PassContext,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of the product's input `x` and of the residual."""
        full = not context.uses_fp8
        dropout, cast = self._dropout(context, end.dropout), self._cast(context, end.dproduct)
        dproduct, dresidual, sums, dproduct8 = dropout_add_layernorm_backward(
            dy, second, product, residual, end.norm, statistics, dropout, cast, full=full
        )
        column_sums(sums, end.gradients, accumulate=context.accumulate)
        operand = self._operand(context, end.dproduct, dproduct if full else None, dproduct8)
        end.matrix.weight_gradient(operand, x, context.accumulate)
        return end.matrix.input_gradient(operand), dresidual


class FusedBert(FusedModel):
    """BERT: a layer's input is both its residual and the operand of its first product."""

    LAYER = BertLayer

    def _embed(self, batch: Batch, context: PassContext) -> tuple[Tensor, Tensor]:
        weight, bias = self.views.value("embeddings.norm.weight"), self.views.value("embeddings.norm.bias")
        eps = self.settings.layer_norm_eps
        return embed_forward(self._tables(), _ids(batch), weight, bias, self._embedding_dropout(context), eps)

    def _tables(self) -> EmbeddingTables:
        return EmbeddingTables(
            words=self.views.value16("embeddings.words.weight"),
            positions=self.views.value("embeddings.positions.weight"),
            segments=self.views.value("embeddings.segments.weight"),
        )

    def _embed_backward(
        self, dy: Tensor, second: Tensor, batch: Batch, statistics: Tensor, context: PassContext
    ) -> None:
        gradient, accumulate = self.views.gradient, context.accumulate
        weight, dropout = self.views.value("embeddings.norm.weight"), self._embedding_dropout(context)
        dsum, sums = embed_backward(dy, second, self._tables(), _ids(batch), weight, statistics, dropout)
        segments = gradient("embeddings.segments.weight")
        norm = gradient("embeddings.norm.weight"), gradient("embeddings.norm.bias")
        of_second = segments[1] if len(segments) > 1 else segments.new_empty(segments.shape[1])  # RoBERTa has one
        column_sums(sums, [*norm, segments[0], of_second], accumulate=accumulate)
        if not accumulate:
            segments[2:].zero_()  # no token has a third segment
        position_gradient(dsum, batch.cu_seqlens, gradient("embeddings.positions.weight"), accumulate=accumulate)
        # Always adds: the masked-word head, which shares this matrix, has written to it.
        word_gradient(dsum, batch.input_ids, gradient("embeddings.words.weight"))


def _ids(batch: Batch) -> EmbeddingIds:
    return EmbeddingIds(words=batch.input_ids, positions=batch.position_ids, segments=batch.segment_ids)
