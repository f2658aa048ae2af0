"""The heads by hand, forward and backward: masked words on the kernels; sentences and spans, which are few rows or few
columns, in float32 and without ceremony.

Letters as in bert.py. A tensor's gradient is called d and its name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.config.settings import ModelSettings
from bertrain.kernels.cross_entropy import cross_entropy
from bertrain.kernels.random import rows_keep_mask
from bertrain.kernels.reduction import row_sum
from bertrain.model.arena import Arena
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.fused_layer import Matrix, Operand, Run, add
from bertrain.model.heads import by_sequence

aten = torch.ops.aten
Judged = tuple[tuple[Tensor, Tensor], Tensor]
"""Scaled loss and right answers of some rows; the gradient of the rows."""


class FusedHeads:
    """What is asked of the last layer's rows. Gradients of parameters go into the arena."""

    def __init__(self, settings: ModelSettings, arena: Arena, copy: Tensor, dropout_site: int) -> None:
        self.settings, self.arena, self.copy, self._dropout_site = settings, arena, copy, dropout_site

    def _value(self, name: str) -> Tensor:
        return self.arena.view(self.arena.values, name)

    def _copy(self, name: str) -> Tensor:
        return self.arena.view(self.copy, name)

    def _gradient(self, name: str) -> Tensor:
        return self.arena.view(self.arena.gradients, name)

    # --- masked words ------------------------------------------------------------------------------------

    def _word_matrices(self) -> tuple[Matrix, Matrix]:
        transform, words = "masked_words.transform.weight", "embeddings.words.weight"
        return (
            Matrix(self._copy(transform), self._gradient(transform)),
            Matrix(self._copy(words), self._gradient(words)),
        )

    def word_logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the transform, GELU and LayerNorm (with its two statistics) make of the rows to predict; the logits."""
        transform, words = self._word_matrices()
        hidden = transform.product(Operand(x), self._copy("masked_words.transform.bias"))
        activated = aten.gelu(hidden)
        normed, mean, rstd = aten.native_layer_norm(
            activated,
            [x.shape[1]],
            self._copy("masked_words.norm.weight"),
            self._copy("masked_words.norm.bias"),
            self.settings.layer_norm_eps,
        )
        return hidden, activated, normed, mean, rstd, words.product(Operand(normed), self._copy("masked_words.bias"))

    def masked_words(self, x: Tensor, labels: Tensor, scale: Tensor, accumulate: bool) -> Judged:
        """Scaled loss and right answers; gradient of the rows to predict."""
        name, width = "masked_words", [x.shape[1]]
        transform, words = self._word_matrices()
        hidden, activated, normed, mean, rstd, logits = self.word_logits(x)
        loss, correct = cross_entropy(logits, labels, self.settings.vocab_size, scale)

        dlogits = Operand(logits)  # turned into their gradient in place
        add(self._gradient(f"{name}.bias"), row_sum(logits), accumulate)
        words.weight_gradient(dlogits, Operand(normed), accumulate)
        dnormed = words.input_gradient(dlogits)
        norm = self._copy(f"{name}.norm.weight"), self._copy(f"{name}.norm.bias")
        dactivated, dweight, dbias = aten.native_layer_norm_backward(
            dnormed, activated, width, mean, rstd, *norm, [True, True, True]
        )
        add(self._gradient(f"{name}.norm.weight"), dweight, accumulate)
        add(self._gradient(f"{name}.norm.bias"), dbias, accumulate)
        dhidden = aten.gelu_backward(dactivated, hidden)
        add(self._gradient(f"{name}.transform.bias"), row_sum(dhidden), accumulate)
        dhidden_operand = Operand(dhidden)
        transform.weight_gradient(dhidden_operand, Operand(x), accumulate)
        return (loss, correct), transform.input_gradient(dhidden_operand)

    # --- sentences and spans -------------------------------------------------------------------------------

    def sentence_logits(self, name: str, cls: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[CLS] pooled, what dropout leaves of that, and the logits."""
        pooled = torch.tanh(torch.addmm(self._value(f"{name}.pool.bias"), cls, self._value(f"{name}.pool.weight").t()))
        dropped = pooled if keep is None else pooled * keep
        weight, bias = self._value(f"{name}.classify.weight"), self._value(f"{name}.classify.bias")
        return pooled, dropped, torch.addmm(bias, dropped, weight.t())

    def sentences(self, cls: Tensor, batch: Batch, run: Run, scale: Tensor) -> Judged:
        """Scaled loss and right answers of next sentences, or of classes or numbers; gradient of [CLS]."""
        name, keep, accumulate = "next_sentence", None, run.accumulate
        if self.settings.head != "pretrain":
            name, rate = "answer", self.settings.head_dropout
            if rate > 0:
                keep = rows_keep_mask(run.seed, self._dropout_site, cls.shape[0], cls.shape[1], rate) / (1 - rate)
        cls = cls.float()
        pooled, dropped, logits = self.sentence_logits(name, cls, keep)
        loss, correct, dlogits = _judge(logits, batch, self.settings.head)
        dlogits *= scale[0]

        add(self._gradient(f"{name}.classify.weight"), dlogits.t() @ dropped, accumulate)
        add(self._gradient(f"{name}.classify.bias"), dlogits.sum(0), accumulate)
        ddropped = dlogits @ self._value(f"{name}.classify.weight")
        dpool = (ddropped if keep is None else ddropped * keep) * (1 - pooled * pooled)
        add(self._gradient(f"{name}.pool.weight"), dpool.t() @ cls, accumulate)
        add(self._gradient(f"{name}.pool.bias"), dpool.sum(0), accumulate)
        dcls = (dpool @ self._value(f"{name}.pool.weight")).to(self.copy.dtype)
        return (loss * scale[0], correct), dcls

    def span_logits(self, x: Tensor) -> Tensor:
        return torch.addmm(self._value("answer.score.bias"), x.float(), self._value("answer.score.weight").t())

    def spans(self, x: Tensor, batch: Batch, scale: Tensor, accumulate: bool) -> Judged:
        """Scaled loss and right answers of spans; gradient of every row."""
        assert batch.answers is not None
        scores = by_sequence(self.span_logits(x), batch).log_softmax(1)  # [S, L, 2]
        is_real = (batch.nsp_labels != IGNORED).float()
        answers = batch.answers[:, None, :]
        loss = -(scores.gather(1, answers)[:, 0].sum(1) * is_real).sum() / 2
        correct = ((scores.argmax(1) == batch.answers).all(1) * is_real).sum()

        is_answer = torch.arange(scores.shape[1], device=x.device)[None, :, None] == answers
        dscores = (scores.exp() - is_answer.float()) * (is_real * (scale[0] / 2))[:, None, None]
        tokens = torch.arange(len(x), dtype=batch.cu_seqlens.dtype, device=x.device)
        dlogits = dscores[torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True), batch.position_ids]
        add(self._gradient("answer.score.weight"), dlogits.t() @ x.float(), accumulate)
        add(self._gradient("answer.score.bias"), dlogits.sum(0), accumulate)
        return (loss * scale[0], correct), (dlogits @ self._value("answer.score.weight")).to(self.copy.dtype)


def _judge(logits: Tensor, batch: Batch, head: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and right answers of the sentences of a bin, and the gradient of the logits."""
    is_real = batch.nsp_labels != IGNORED
    if head == "regress":
        assert batch.answers is not None
        error = (logits - batch.answers) * is_real[:, None]
        return error.square().sum(), torch.zeros((), device=logits.device), 2 * error
    labels = batch.nsp_labels
    if head == "classify":
        assert batch.answers is not None
        labels = batch.answers[:, 0]
    log_probabilities = logits.log_softmax(-1)
    answer = torch.where(is_real, labels, 0)[:, None]
    loss = -(log_probabilities.gather(1, answer)[:, 0] * is_real).sum()
    correct = ((logits.argmax(-1) == labels) & is_real).sum().float()
    one_hot = torch.zeros_like(logits).scatter_(1, answer, 1.0)
    return loss, correct, (log_probabilities.exp() - one_hot) * is_real[:, None]
