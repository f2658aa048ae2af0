"""A model's forward and backward pass by hand, on the kernels: the results of `bert.py` and `modern.py`, several times
as fast.

These two under autograd are the specification. Autograd cannot express three things that make this path fast: products
write weight gradients in float32 directly into the arena, the next kernel adds the two gradients at each residual, and
the kernel that computes a tensor also writes its FP8 copy. Products read weights and biases from a 16-bit copy, which
the optimizer updates; so does the LayerNorm of the masked-word head. All other biases and LayerNorm parameters are read
in float32.

The last layer is computed only for the rows that heads read, the masked words and [CLS]: about a sixth of all rows. The
span head reads all of them, and so does pooling by mean or maximum; the tag head those of the words that it labels.

This file has the pass over a bin, for both families; their layers and embeddings are in fused_bert.py and
fused_modern.py.

Letters as in bert.py. The gradient of a tensor `x` is called `dx`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import torch
from torch import Tensor

from bertrain.kernels.arguments import Dropout
from bertrain.kernels.attention import plan_attention
from bertrain.kernels.fp8 import Scales
from bertrain.model.arena import Arena
from bertrain.model.batch import Batch
from bertrain.model.encoder import EncoderModel, Outputs
from bertrain.model.fused_heads import FusedHeads, HeadResult, ReplacedResult
from bertrain.model.fused_layer import FusedLayer, Recompute, pick
from bertrain.model.fused_operands import LayerMatrix, LayerTensor, ModelDropout, Operand, ParameterViews, PassContext
from bertrain.model.sums import Sums


class FusedModel:
    """One bin forward and backward: writes gradients into the arena, returns sums of losses and correct predictions."""

    LAYER: ClassVar[type[FusedLayer]]

    def __init__(
        self,
        model: EncoderModel,
        arena: Arena,
        *,
        fp8: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        recompute: Recompute = "none",
    ) -> None:
        self.settings, self.arena = model.settings, arena
        self.views = ParameterViews(arena, dtype)
        self.scales = self._scales(arena.values.device) if fp8 else None
        self.layers = [
            self.LAYER(self.settings, self.views, number, self.scales, recompute)
            for number in range(self.settings.num_layers)
        ]
        self.nsp = model.next_sentence is not None
        self._heads = FusedHeads(self.settings, self.views)

    @property
    def values16(self) -> Tensor:
        return self.views.values16

    def _scales(self, device: torch.device) -> Scales:
        of_layer = [torch.float8_e5m2 if tensor.is_gradient else torch.float8_e4m3fn for tensor in LayerTensor]
        of_matrices = [torch.float8_e4m3fn] * (self.settings.num_layers * len(LayerMatrix))
        return Scales(of_layer * self.settings.num_layers + of_matrices, device)

    def refresh(self) -> None:
        """Update the 16-bit and FP8 copies after the weights in the arena have changed."""
        self.values16.copy_(self.arena.values)
        self.requantize()

    def requantize(self) -> None:
        if self.scales is None:
            return
        for layer in self.layers:
            for matrix in layer.matrices.values():
                matrix.requantize()
        self.scales.collect()

    def first_offset(self, layer: int) -> int:
        """The arena offset above which a layer's backward pass completes the gradient, with those of later layers.

        A LayerNorm before the layer's first matrix belongs to the layer below, which completes its gradient.
        """
        return self.arena.places[f"layers.{layer}.qkv.weight"][0]

    # --- implemented by each family -----------------------------------------------------------------

    def _embed(self, batch: Batch, context: PassContext) -> tuple[Tensor, Tensor]:
        """The embedded rows [T, E], and their statistics for `_embed_backward`."""
        raise NotImplementedError

    def _embed_backward(
        self, dy: Tensor, second: Tensor, batch: Batch, statistics: Tensor, context: PassContext
    ) -> None:
        """Write the gradients of the embeddings, given dy + second."""
        raise NotImplementedError

    def _enter(self, embedded: Tensor) -> Any:
        """The input of the first layer."""
        return Operand(embedded)

    def _leave(self, x: Any) -> Tensor:
        """The rows that heads read, from the output of the last layer."""
        return x.in_16_bits

    # --- a pass over a bin --------------------------------------------------------------------------

    def _context(self, batch: Batch, seed: Tensor, *, accumulate: bool = False, predicts: bool = False) -> PassContext:
        """The context of a pass over a bin. Prediction has no dropout and, since it must not change scales, no FP8."""
        return PassContext(
            plan=plan_attention(batch.cu_seqlens, len(batch.input_ids)),
            positions=batch.position_ids,
            seed=seed,
            accumulate=accumulate,
            scales=None if predicts else self.scales,
            hidden_dropout=0.0 if predicts else self.settings.hidden_dropout,
            attention_dropout=0.0 if predicts else self.settings.attention_dropout,
        )

    def _embedding_dropout(self, context: PassContext) -> Dropout:
        return Dropout(context.hidden_dropout, context.seed, ModelDropout.EMBEDDINGS.site(self.settings.num_layers))

    def _encode(
        self, embedded: Tensor, context: PassContext, rows: Tensor | None, saved: list[Any] | None = None
    ) -> Tensor:
        """The layers on embedded rows; appends the tensors for their backward passes to `saved`."""
        x = self._enter(embedded)
        for layer in self.layers:
            x, of_layer = layer.forward(x, context, rows if layer.is_last else None)
            if saved is not None:
                saved.append(of_layer)
        return self._leave(x)

    def _rows_read(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        """The rows of the last layer that heads read (None: all), and how many are words, [CLS] and padding.

        Replaced-token detection reads all rows, beside these.
        """
        if self.settings.head == "span" or self._heads.pools_all_tokens:
            return None, [0, len(batch.input_ids), 0]
        reads_words = self.settings.head in ("pretrain", "tag")
        masked = batch.mlm_positions if reads_words else batch.mlm_positions[:0]
        cls = batch.cls_positions if self.nsp or not reads_words else batch.cls_positions[:0]
        # FP8 products need a multiple of 16 rows; the rows added here have no gradient.
        padding = cls.new_zeros(-(len(masked) + len(cls)) % 16)
        return torch.cat([masked, cls, padding]), [len(masked), len(cls), len(padding)]

    def embeddings(self, batch: Batch, seed: Tensor) -> Tensor:
        """The vectors [S, E] of the head `embed`, under the dropout that `forward_backward` draws from `seed`."""
        context, rows = self._context(batch, seed), self._rows_read(batch)[0]
        x = self._encode(self._embed(batch, context)[0], context, rows)
        return self._heads.embeddings(x[: None if rows is None else len(batch.is_real)], batch)

    def outputs(self, batch: Batch) -> Outputs:
        """The heads' outputs for a bin, without dropout, in 16 bits."""
        context = self._context(batch, torch.zeros(1, dtype=torch.int64, device=self.values16.device), predicts=True)
        rows, counts = self._rows_read(batch)
        masked, read, _ = self._encode(self._embed(batch, context)[0], context, rows).split(counts)
        match self.settings.head:
            case "span":
                return Outputs(answers=self._heads.span_logits(read))
            case "tag":
                return Outputs(answers=self._heads.tag_logits(masked.float()))
            case "embed":
                return Outputs(answers=self._heads.embeddings(read, batch))
            case "classify" | "regress" | "multilabel":
                return Outputs(answers=self._heads.sequence_logits("answer", read.float(), None)[2])
            case _:
                nsp_logits = self._heads.sequence_logits("next_sentence", read.float(), None)[2] if self.nsp else None
                return Outputs(self._heads.word_logits(masked)[-1][:, : self.settings.vocab_size], nsp_logits)

    def forward_backward(
        self,
        batch: Batch,
        seed: Tensor,
        word_scale: Tensor,
        sequence_scale: Tensor,
        accumulate: bool,
        pauses: frozenset[int] = frozenset(),
        token_scale: Tensor | None = None,
    ) -> Generator[int, None, Tensor]:
        """Compute one bin; returns its packed `Sums`.

        Writes the gradient of word_scale * mlm_loss + sequence_scale * sequence_loss, and of token_scale * rtd_loss if
        words were replaced, or adds it if `accumulate`. After the backward pass of each layer in `pauses`, yields the
        arena offset above which all gradients are complete.
        """
        context = self._context(batch, seed, accumulate=accumulate)
        embedded, statistics = self._embed(batch, context)

        # --- forward ---------------------------------------------------------------------------
        rows, counts = self._rows_read(batch)
        saved: list[Any] = []
        finds_replaced = batch.replaced is not None
        x = self._encode(embedded, context, None if finds_replaced else rows, saved)
        masked, read, padding = (pick(x, rows) if finds_replaced else x).split(counts)

        # --- heads, forward and backward -------------------------------------------------------
        zero = torch.zeros((), device=self.values16.device)
        words, sequences = HeadResult(zero, zero, masked), HeadResult(zero, zero, read)
        if self.settings.head == "pretrain":
            words = self._heads.masked_words(masked, batch.mlm_labels, word_scale, accumulate)
        elif not accumulate:
            self.views.gradient("embeddings.words.weight").zero_()  # which no head writes to
        if self.settings.head == "span":
            sequences = self._heads.spans(read, batch, sequence_scale, accumulate)
        elif self.settings.head == "tag":
            words = self._heads.tags(masked, batch.mlm_labels, context, word_scale)
        elif self.settings.head == "embed":
            sequences = self._heads.pooled(read, batch, sequence_scale)
        elif len(read):
            sequences = self._heads.sequences(read, batch, context, sequence_scale)
        dy = torch.cat([words.dx, sequences.dx, torch.zeros_like(padding)])
        replaced: ReplacedResult | None = None
        if batch.replaced is not None:
            assert rows is not None
            assert token_scale is not None
            replaced = self._heads.replaced_words(x, batch.replaced, token_scale, accumulate)
            # Rows that occur twice have a gradient only once, so the order of these additions does not matter.
            dy = replaced.dx.index_add_(0, rows, dy)

        # --- backward --------------------------------------------------------------------------
        second: Tensor | None = None
        for layer in reversed(self.layers):
            dy, second = layer.backward(dy, second, saved.pop(), context)
            if layer.number in pauses:
                yield self.first_offset(layer.number)
        assert second is not None
        self._embed_backward(dy, second, batch, statistics, context)
        return Sums(
            mlm_loss=words.loss / word_scale[0],
            sequence_loss=sequences.loss / sequence_scale[0],
            mlm_correct=words.correct,
            sequence_correct=sequences.correct,
            rtd_loss=None if replaced is None else replaced.loss,
            rtd_correct=None if replaced is None else replaced.correct,
            rtd_tokens=None if replaced is None else replaced.tokens,
        ).pack()
