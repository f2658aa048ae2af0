"""BERT's forward and backward pass by hand, on the kernels: the same numbers as `bert.py`, several times as fast.

`bert.py` under autograd is the specification; here the order of events is written out, because three things cannot be
said to autograd: gradients of matrices are written as float32 straight into the arena by the product that makes them,
the two gradients that meet at each residual are added inside the next kernel, and tensors travel with an 8-bit copy
made where they are made. Matrices are read from a 16-bit copy that the optimizer keeps current; biases and LayerNorm's
parameters are read as they are, in float32.

The last layer is computed for the rows that somebody reads, the masked words and [CLS]: about a sixth of them, or
where spans are asked for, all.

Letters as in bert.py. A tensor's gradient is called d and its name.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from bertrain.kernels.attention import plan_attention
from bertrain.kernels.embedding import embed_backward, embed_forward, position_gradient, word_gradient
from bertrain.kernels.fp8 import Scales
from bertrain.kernels.reduction import column_sums
from bertrain.model.arena import Arena
from bertrain.model.batch import Batch
from bertrain.model.bert import Bert, Outputs
from bertrain.model.fused_heads import FusedHeads
from bertrain.model.fused_layer import FusedLayer, Kept, Operand, Recompute, Run


class FusedBert:
    """One bin forward and backward; gradients go into the arena, sums of losses and right answers come back."""

    def __init__(
        self,
        model: Bert,
        arena: Arena,
        *,
        fp8: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        recompute: Recompute = "none",
    ) -> None:
        self.settings, self.arena = model.settings, arena
        self.copy = arena.values.to(
            dtype, copy=True
        )  # float32 is for tests: it shows that nothing but rounding differs
        self.scales = self._scales(arena.values.device) if fp8 else None
        self.layers = [
            FusedLayer(model, arena, self.copy, number, self.scales, recompute)
            for number in range(self.settings.num_layers)
        ]
        self.nsp = model.next_sentence is not None
        self._heads = FusedHeads(self.settings, arena, self.copy, dropout_site=self._site(1))

    def _scales(self, device: torch.device) -> Scales:
        of_layer = [torch.float8_e4m3fn] * 4 + [torch.float8_e5m2] * 4
        of_matrices = [torch.float8_e4m3fn] * (self.settings.num_layers * len(FusedLayer.MATRICES))
        return Scales(of_layer * self.settings.num_layers + of_matrices, device)

    def refresh(self) -> None:
        """Bring the copies up to date with weights that were changed from outside."""
        self.copy.copy_(self.arena.values)
        self.requantize()

    def requantize(self) -> None:
        """Make the 8-bit copies of the matrices from the 16-bit ones."""
        if self.scales is None:
            return
        for layer in self.layers:
            for matrix in (layer.qkv, layer.attention_out, layer.expand, layer.contract):
                matrix.requantize()
        self.scales.collect()

    def _value(self, name: str) -> Tensor:
        return self.arena.view(self.arena.values, name)

    def _copy(self, name: str) -> Tensor:
        return self.arena.view(self.copy, name)

    def _gradient(self, name: str) -> Tensor:
        return self.arena.view(self.arena.gradients, name)

    def first_place(self, layer: int) -> int:
        """Where a layer's parameters begin in the arena; those of later layers and of the heads lie behind them."""
        return min(place for name, (place, _) in self.arena.places.items() if name.startswith(f"layers.{layer}."))

    def _begin(self, batch: Batch, seed: Tensor, *, accumulate: bool = False, predicts: bool = False) -> Run:
        """A pass over a bin. To predict there is no dropout and, since nothing may be learnt of scales, no FP8."""
        settings = self.settings
        return Run(
            plan_attention(batch.cu_seqlens, len(batch.input_ids)),
            seed,
            accumulate,
            None if predicts else self.scales,
            hidden_dropout=0.0 if predicts else settings.hidden_dropout,
            attention_dropout=0.0 if predicts else settings.attention_dropout,
        )

    def _embed(self, batch: Batch, run: Run) -> tuple[Tensor, Tensor]:
        norm = self._value("embeddings.norm.weight"), self._value("embeddings.norm.bias")
        return embed_forward(
            self._tables(), _ids(batch), *norm, run.hidden_dropout, run.seed, self._site(0),
            self.settings.layer_norm_eps,
        )  # fmt: skip

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._copy("embeddings.words.weight"),
            self._value("embeddings.positions.weight"),
            self._value("embeddings.segments.weight"),
        )

    def _site(self, place: int) -> int:
        """Dropout outside of the layers: 0 of the embeddings, 1 of a head."""
        return len(self.layers) * FusedLayer.SITES + place

    def _rows_read(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        """The rows that heads read of the last layer (None: all), and how many are masked words, [CLS] and junk."""
        if self.settings.head == "span":
            return None, [0, len(batch.input_ids), 0]
        predicted = batch.mlm_positions if self.settings.head == "pretrain" else batch.mlm_positions[:0]
        cls = batch.cls_positions if self.nsp or self.settings.head != "pretrain" else batch.cls_positions[:0]
        # 8-bit products want whole sixteens of rows; those added here are junk, and have no gradient.
        junk = cls.new_zeros(-(len(predicted) + len(cls)) % 16)
        return torch.cat([predicted, cls, junk]), [len(predicted), len(cls), len(junk)]

    def outputs(self, batch: Batch) -> Outputs:
        """What the heads say of a bin, without dropout, in 16 bits."""
        run = self._begin(batch, torch.zeros(1, dtype=torch.int64, device=self.copy.device), predicts=True)
        rows, counts = self._rows_read(batch)
        x = Operand(self._embed(batch, run)[0])
        for layer in self.layers:
            x, _ = layer.forward(x, run, rows if layer is self.layers[-1] else None)
        predicted, read, _ = x.whole.split(counts)
        match self.settings.head:
            case "span":
                return Outputs(answers=self._heads.span_logits(read))
            case "classify" | "regress":
                return Outputs(answers=self._heads.sentence_logits("answer", read.float(), None)[2])
            case _:
                nsp_logits = self._heads.sentence_logits("next_sentence", read.float(), None)[2] if self.nsp else None
                return Outputs(self._heads.word_logits(predicted)[-1][:, : self.settings.vocab_size], nsp_logits)

    def forward_backward(
        self,
        batch: Batch,
        seed: Tensor,
        word_scale: Tensor,
        sentence_scale: Tensor,
        accumulate: bool,
        pauses: frozenset[int] = frozenset(),
    ) -> Generator[int, None, Tensor]:
        """Sums [4] of one bin: loss of masked words and of sentences (or spans), right answers of both.

        The gradient is that of word_scale * (the first) + sentence_scale * (the second); `accumulate` adds it to what
        is there. After the backward pass of each layer in `pauses`, work stops with the place of the arena from which
        on every gradient is complete.
        """
        run = self._begin(batch, seed, accumulate=accumulate)
        embedded, statistics = self._embed(batch, run)

        # --- forward ---------------------------------------------------------------------------
        rows, counts = self._rows_read(batch)
        x = Operand(embedded)
        saved: list[Kept] = []
        for layer in self.layers:
            x, kept = layer.forward(x, run, rows if layer is self.layers[-1] else None)
            saved.append(kept)
        predicted, read, junk = x.whole.split(counts)

        # --- heads, both ways ------------------------------------------------------------------
        none = torch.zeros((), device=self.copy.device)
        words, dpredicted = (none, none), predicted
        if self.settings.head == "pretrain":
            words, dpredicted = self._heads.masked_words(predicted, batch.mlm_labels, word_scale, accumulate)
        elif not accumulate:
            self._gradient("embeddings.words.weight").zero_()  # which no head has written to
        sentences, dread = (none, none), read
        if self.settings.head == "span":
            sentences, dread = self._heads.spans(read, batch, sentence_scale, accumulate)
        elif len(read):
            sentences, dread = self._heads.sentences(read, batch, run, sentence_scale)
        dy = torch.cat([dpredicted, dread, torch.zeros_like(junk)])

        # --- backward --------------------------------------------------------------------------
        second: Tensor | None = None
        for layer in reversed(self.layers):
            dy, second = layer.backward(dy, second, saved.pop(), run)
            if layer.number in pauses:
                yield self.first_place(layer.number)
        assert second is not None
        dsum, sums = embed_backward(
            dy, second, self._tables(), _ids(batch), self._value("embeddings.norm.weight"), statistics,
            run.hidden_dropout, seed, self._site(0),
        )  # fmt: skip
        segments = self._gradient("embeddings.segments.weight")
        column_sums(
            sums,
            [
                self._gradient("embeddings.norm.weight"),
                self._gradient("embeddings.norm.bias"),
                segments[0],
                segments[1],
            ],
            accumulate=accumulate,
        )
        if not accumulate:
            segments[2:].zero_()  # no token is of a third segment
        positions = self._gradient("embeddings.positions.weight")
        position_gradient(dsum, batch.cu_seqlens, positions, accumulate=accumulate)
        words_gradient = self._gradient("embeddings.words.weight")  # a masked-word head has written to it already
        word_gradient(dsum, batch.input_ids, words_gradient)
        return torch.stack([words[0] / word_scale[0], sentences[0] / sentence_scale[0], words[1], sentences[1]])


def _ids(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.input_ids, batch.position_ids, batch.segment_ids
