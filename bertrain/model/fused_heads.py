"""The heads by hand, forward and backward: masked words on the kernels; sequence, span and tag heads, which have few
rows or columns, in plain float32.

Letters as in bert.py. The gradient of a tensor `x` is called `dx`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bertrain.config.settings import ModelSettings
from bertrain.kernels.cross_entropy import cross_entropy
from bertrain.kernels.random import rows_keep_mask
from bertrain.kernels.reduction import row_sum, write_gradient
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.fused_operands import Matrix, ModelDropout, Operand, ParameterViews, PassContext
from bertrain.model.heads import by_sequence
from bertrain.model.pooling import pool, sequence_of_token

aten = torch.ops.aten


class HeadResult(NamedTuple):
    """Scaled loss and number of correct predictions of some rows, and the gradient of the rows."""

    loss: Tensor
    correct: Tensor
    dx: Tensor


class ReplacedResult(NamedTuple):
    """Loss, correct answers and tokens asked of replaced-token detection, and the scaled gradient of all rows."""

    loss: Tensor
    correct: Tensor
    tokens: Tensor
    dx: Tensor


class FusedHeads:
    """The heads on rows of the last layer. They write the gradients of their parameters into the arena."""

    def __init__(self, settings: ModelSettings, views: ParameterViews) -> None:
        self.settings, self.views = settings, views

    def _write(self, name: str, gradient: Tensor, accumulate: bool) -> None:
        write_gradient(self.views.gradient(name), gradient, accumulate)

    def _word_matrices(self) -> tuple[Matrix, Matrix]:
        return Matrix(self.views, "masked_words.transform.weight"), Matrix(self.views, "embeddings.words.weight")

    def word_logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Results of the transform, GELU and LayerNorm (with its two statistics) on the masked rows; the logits."""
        transform, words = self._word_matrices()
        value16 = self.views.value16
        hidden = transform.product(Operand(x), self.views.bias16("masked_words.transform.bias"))
        activated = aten.gelu(hidden)
        norm = value16("masked_words.norm.weight"), self.views.bias16("masked_words.norm.bias")
        normed, mean, rstd = aten.native_layer_norm(activated, [x.shape[1]], *norm, self.settings.layer_norm_eps)
        return hidden, activated, normed, mean, rstd, words.product(Operand(normed), value16("masked_words.bias"))

    def masked_words(self, x: Tensor, labels: Tensor, scale: Tensor, accumulate: bool) -> HeadResult:
        name, value16 = "masked_words", self.views.value16
        transform, words = self._word_matrices()
        hidden, activated, normed, mean, rstd, logits = self.word_logits(x)
        loss, correct = cross_entropy(logits, labels, self.settings.vocab_size, scale)

        dlogits = Operand(logits)  # cross_entropy has overwritten them
        self._write(f"{name}.bias", row_sum(logits), accumulate)
        words.weight_gradient(dlogits, Operand(normed), accumulate)
        dnormed = words.input_gradient(dlogits)
        weight, bias = value16(f"{name}.norm.weight"), self.views.bias16(f"{name}.norm.bias")
        has_bias = bias is not None
        dactivated, dweight, dbias = aten.native_layer_norm_backward(
            dnormed, activated, [x.shape[1]], mean, rstd, weight, bias, [True, True, has_bias]
        )
        self._write(f"{name}.norm.weight", dweight, accumulate)
        dhidden = aten.gelu_backward(dactivated, hidden)
        if has_bias:
            self._write(f"{name}.norm.bias", dbias, accumulate)
            self._write(f"{name}.transform.bias", row_sum(dhidden), accumulate)
        dhidden_operand = Operand(dhidden)
        transform.weight_gradient(dhidden_operand, Operand(x), accumulate)
        return HeadResult(loss, correct, transform.input_gradient(dhidden_operand))

    def replaced_words(self, x: Tensor, replaced: Tensor, scale: Tensor, accumulate: bool) -> ReplacedResult:
        name, views = "replaced_words", self.views
        transform, rows = Matrix(views, f"{name}.transform.weight"), Operand(x)
        hidden = transform.product(rows, views.value16(f"{name}.transform.bias"))
        activated = aten.gelu(hidden)
        weight = views.value16(f"{name}.score.weight")  # [1, E]
        logits = torch.mv(activated, weight[0]).float() + views.value(f"{name}.score.bias")
        is_asked, answer = replaced != IGNORED, (replaced == 1).float()
        losses = (logits.clamp(min=0) - logits * answer + torch.log1p(torch.exp(-logits.abs()))) * is_asked
        correct = (((logits >= 0) == (answer > 0)) & is_asked).sum().float()

        dlogits = (logits.sigmoid() - answer) * is_asked * scale[0]  # [T]
        self._write(f"{name}.score.weight", (dlogits[None] @ activated.float()), accumulate)
        self._write(f"{name}.score.bias", dlogits.sum()[None], accumulate)
        dactivated = dlogits.to(weight.dtype)[:, None] * weight
        dhidden = aten.gelu_backward(dactivated, hidden)
        self._write(f"{name}.transform.bias", row_sum(dhidden), accumulate)
        dhidden_operand = Operand(dhidden)
        transform.weight_gradient(dhidden_operand, rows, accumulate)
        return ReplacedResult(losses.sum(), correct, is_asked.sum().float(), transform.input_gradient(dhidden_operand))

    def _keep_mask(self, x: Tensor, context: PassContext) -> Tensor | None:
        """The factors of a head's dropout on its input; None without dropout."""
        rate, site = self.settings.head_dropout, ModelDropout.HEAD.site(self.settings.num_layers)
        return rows_keep_mask(context.seed, site, x.shape[0], x.shape[1], rate) / (1 - rate) if rate > 0 else None

    def sequence_logits(self, name: str, cls: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The pooled [CLS] rows, the same after dropout, and the logits."""
        value = self.views.value
        pooled = torch.tanh(torch.addmm(value(f"{name}.pool.bias"), cls, value(f"{name}.pool.weight").t()))
        dropped = pooled if keep is None else pooled * keep
        logits = torch.addmm(value(f"{name}.classify.bias"), dropped, value(f"{name}.classify.weight").t())
        return pooled, dropped, logits

    def sequences(self, cls: Tensor, batch: Batch, context: PassContext, scale: Tensor) -> HeadResult:
        """Loss of next sentences, of classes or of numbers, and gradient of [CLS]."""
        name, keep, accumulate = "next_sentence", None, context.accumulate
        if self.settings.head != "pretrain":
            name, keep = "answer", self._keep_mask(cls, context)
        cls = cls.float()
        pooled, dropped, logits = self.sequence_logits(name, cls, keep)
        loss, correct, dlogits = _sequence_loss(logits, batch, self.settings.head)
        dlogits *= scale[0]

        self._write(f"{name}.classify.weight", dlogits.t() @ dropped, accumulate)
        self._write(f"{name}.classify.bias", dlogits.sum(0), accumulate)
        ddropped = dlogits @ self.views.value(f"{name}.classify.weight")
        dpool = (ddropped if keep is None else ddropped * keep) * (1 - pooled * pooled)
        self._write(f"{name}.pool.weight", dpool.t() @ cls, accumulate)
        self._write(f"{name}.pool.bias", dpool.sum(0), accumulate)
        dcls = (dpool @ self.views.value(f"{name}.pool.weight")).to(self.views.values16.dtype)
        return HeadResult(loss * scale[0], correct, dcls)

    def span_logits(self, x: Tensor) -> Tensor:
        value = self.views.value
        return torch.addmm(value("answer.score.bias"), x.float(), value("answer.score.weight").t())

    def spans(self, x: Tensor, batch: Batch, scale: Tensor, accumulate: bool) -> HeadResult:
        assert batch.answers is not None
        scores = by_sequence(self.span_logits(x), batch).log_softmax(1)  # [S, L, 2]
        is_real = batch.is_real.float()
        answers = batch.answers[:, None, :]
        loss = -(scores.gather(1, answers)[:, 0].sum(1) * is_real).sum() / 2
        correct = ((scores.argmax(1) == batch.answers).all(1) * is_real).sum()

        is_answer = torch.arange(scores.shape[1], device=x.device)[None, :, None] == answers
        dscores = (scores.exp() - is_answer.float()) * (is_real * (scale[0] / 2))[:, None, None]
        tokens = torch.arange(len(x), dtype=batch.cu_seqlens.dtype, device=x.device)
        dlogits = dscores[torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True), batch.position_ids]
        self._write("answer.score.weight", dlogits.t() @ x.float(), accumulate)
        self._write("answer.score.bias", dlogits.sum(0), accumulate)
        dx = (dlogits @ self.views.value("answer.score.weight")).to(self.views.values16.dtype)
        return HeadResult(loss * scale[0], correct, dx)

    def tag_logits(self, x: Tensor) -> Tensor:
        value = self.views.value
        return torch.addmm(value("answer.classify.bias"), x, value("answer.classify.weight").t())

    def tags(self, x: Tensor, labels: Tensor, context: PassContext, scale: Tensor) -> HeadResult:
        """Loss of the classes of words, and gradient of the rows that they are predicted from."""
        keep, dropped = self._keep_mask(x, context), x.float()
        if keep is not None:
            dropped = dropped * keep
        loss, correct, dlogits = _class_loss(self.tag_logits(dropped), labels, labels != IGNORED)
        dlogits *= scale[0]
        self._write("answer.classify.weight", dlogits.t() @ dropped, context.accumulate)
        self._write("answer.classify.bias", dlogits.sum(0), context.accumulate)
        dx = dlogits @ self.views.value("answer.classify.weight")
        return HeadResult(loss * scale[0], correct, (dx if keep is None else dx * keep).to(self.views.values16.dtype))

    @property
    def pools_all_tokens(self) -> bool:
        return self.settings.head == "embed" and self.settings.pooling != "cls"

    def embeddings(self, x: Tensor, batch: Batch) -> Tensor:
        """Pooled vectors [S, E] in float32; `x` holds all rows, or those of [CLS] if only these are read."""
        return pool(x, batch, self.settings.pooling) if self.pools_all_tokens else x.float()

    def pooled(self, x: Tensor, batch: Batch, scale: Tensor) -> HeadResult:
        """Backpropagates `batch.answers`, the gradient of each embedding; see `heads.answer_sums`."""
        assert batch.answers is not None
        vectors = self.embeddings(x, batch)
        gradient = batch.answers * batch.is_real[:, None]
        loss = (torch.where(batch.is_real[:, None], vectors, 0.0) * gradient).sum()
        dvectors = gradient * scale[0]
        if self.pools_all_tokens:
            sequence = sequence_of_token(batch)
            if self.settings.pooling == "max":  # tokens of the same value share the gradient
                is_largest = (x.float() == vectors[sequence]).float()
                ties = torch.zeros_like(vectors).index_add(0, sequence, is_largest).clamp(min=1)
                dx = is_largest * (dvectors / ties)[sequence]
            else:
                dx = (dvectors / batch.cu_seqlens.diff().clamp(min=1)[:, None])[sequence]
        else:
            dx = dvectors
        return HeadResult(loss * scale[0], torch.zeros((), device=x.device), dx.to(self.views.values16.dtype))


def _sequence_loss(logits: Tensor, batch: Batch, head: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and number of correct predictions of the sequences of a bin, and the gradient of the logits."""
    is_real = batch.is_real
    if head == "regress":
        assert batch.answers is not None
        error = (logits - batch.answers) * is_real[:, None]
        return error.square().sum(), torch.zeros((), device=logits.device), 2 * error
    if head == "multilabel":
        return _label_set_loss(logits, batch)
    labels = batch.nsp_labels
    if head == "classify":
        assert batch.answers is not None
        labels = batch.answers[:, 0]
    weights = None if batch.answer_weights is None else batch.answer_weights[:, 0]
    return _class_loss(logits, labels, is_real, weights)


def _class_loss(
    logits: Tensor, labels: Tensor, is_real: Tensor, answer_weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy and number of correct predictions of the real rows, and the gradient of the logits."""
    weights = is_real if answer_weights is None else is_real * answer_weights
    log_probabilities = logits.log_softmax(-1)
    answer = torch.where(is_real, labels, 0)[:, None]
    loss = -(log_probabilities.gather(1, answer)[:, 0] * weights).sum()
    correct = ((logits.argmax(-1) == labels) & is_real).sum().float()
    one_hot = torch.zeros_like(logits).scatter_(1, answer, 1.0)
    return loss, correct, (log_probabilities.exp() - one_hot) * weights[:, None]


def _label_set_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """`_sequence_loss` of several labels: binary cross-entropy, whose mean over labels is an example's loss."""
    assert batch.answers is not None
    answers, is_real = batch.answers, batch.is_real
    weights = is_real[:, None].float() if batch.answer_weights is None else is_real[:, None] * batch.answer_weights
    weights = weights / logits.shape[1]
    losses = logits.clamp(min=0) - logits * answers + torch.log1p(torch.exp(-logits.abs()))
    correct = (((logits >= 0) == (answers > 0)).all(1) & is_real).sum().float()
    return (losses * weights).sum(), correct, (logits.sigmoid() - answers) * weights
