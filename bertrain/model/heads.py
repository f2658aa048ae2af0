"""The heads of pre-training and of fine-tuning, and their losses. Letters as in bert.py; L: longest sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertrain.config.settings import ModelSettings
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.dropout import dropout
from bertrain.model.sums import Sums

MASKED_SCORE = -1e30  # softmax makes it 0; finite, so that a row of nothing else is not NaN


class MaskedWordHead(nn.Module):
    """Transform, then logits by the word embeddings, which it shares with the encoder.

    Without `bias`, only the logits have one.
    """

    def __init__(self, settings: ModelSettings, *, bias: bool = True) -> None:
        super().__init__()
        self.vocab_size = settings.vocab_size
        self.transform = nn.Linear(settings.hidden_size, settings.hidden_size, bias=bias)
        self.norm = nn.LayerNorm(settings.hidden_size, settings.layer_norm_eps, bias=bias)
        self.bias = nn.Parameter(torch.zeros(settings.padded_vocab_size))

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:  # [P, E], [V, E] -> [P, vocab_size]
        x = self.norm(F.gelu(self.transform(x)))
        logits = F.linear(x, word_embeddings, self.bias)
        # The padding of the vocabulary is computed with the rest, then cut off: it gets no probability.
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]


class ReplacedWordHead(nn.Module):
    """A score per token: above 0, that it was replaced (ELECTRA's discriminator)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.transform = nn.Linear(settings.hidden_size, settings.hidden_size)
        self.score = nn.Linear(settings.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:  # [T, E] -> [T]
        return self.score(F.gelu(self.transform(x)))[:, 0]


class SentenceHead(nn.Module):
    """Pool [CLS], then classify. For next sentences, class 0: B follows A; class 1: B is random."""

    def __init__(self, settings: ModelSettings, num_outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.pool = nn.Linear(settings.hidden_size, settings.hidden_size)
        self.classify = nn.Linear(settings.hidden_size, num_outputs)
        self.dropout = dropout

    def forward(self, cls: Tensor) -> Tensor:  # [S, E] -> [S, num_outputs]
        return self.classify(dropout(torch.tanh(self.pool(cls)), self.dropout, self.training))


class SpanHead(nn.Module):
    """Two scores per token: that an answer starts, and that it ends there."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.score = nn.Linear(settings.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:  # [T, E] -> [T, 2]
        return self.score(x)


class TagHead(nn.Module):
    """A class for each labeled word, from its first token."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.classify = nn.Linear(settings.hidden_size, settings.num_labels)
        self.dropout = settings.head_dropout

    def forward(self, x: Tensor) -> Tensor:  # [P, E] -> [P, num_labels]
        return self.classify(dropout(x, self.dropout, self.training))


def answer_head(settings: ModelSettings) -> SentenceHead | SpanHead | TagHead | None:
    """The head for fine-tuning; None for pre-training, and for embeddings, which only pool."""
    match settings.head:
        case "classify" | "multilabel":
            return SentenceHead(settings, settings.num_labels, settings.head_dropout)
        case "regress":
            return SentenceHead(settings, 1, settings.head_dropout)
        case "span":
            return SpanHead(settings)
        case "tag":
            return TagHead(settings)
        case _:
            return None


def pretraining_sums(
    mlm_logits: Tensor, nsp_logits: Tensor | None, batch: Batch, rtd_logits: Tensor | None = None
) -> Sums:
    """Summed cross-entropies and counts of correct predictions; empty slots are ignored."""
    mlm_loss, mlm_correct = _cross_entropy(mlm_logits, batch.mlm_labels)
    nsp_loss = nsp_correct = torch.zeros_like(mlm_loss)
    if nsp_logits is not None:
        nsp_loss, nsp_correct = _cross_entropy(nsp_logits, batch.nsp_labels)
    replaced = (None, None, None) if rtd_logits is None else _replaced_sums(rtd_logits, batch)
    return Sums(mlm_loss, nsp_loss, mlm_correct, nsp_correct, *replaced)


def _replaced_sums(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, correct answers and tokens asked of replaced-token detection."""
    assert batch.replaced is not None
    is_asked, is_replaced = batch.replaced != IGNORED, batch.replaced == 1
    losses = F.binary_cross_entropy_with_logits(logits.float(), is_replaced.float(), reduction="none")
    correct = ((logits.detach() >= 0) == is_replaced) & is_asked
    return (losses * is_asked).sum(), correct.sum().float(), is_asked.sum().float()


def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if weights is None:
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    else:
        loss = (F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none") * weights).sum()
    correct = (logits.detach().argmax(-1) == labels).sum().float()
    return loss, correct


def answer_sums(logits: Tensor, batch: Batch, head: str) -> Sums:
    """Summed losses (cross-entropy, squared error, or mean over labels or a span's two ends) and correct answers."""
    zero = torch.zeros((), device=logits.device)
    if head == "tag":
        loss, correct = _cross_entropy(logits, batch.mlm_labels)
        return Sums(mlm_loss=loss, sequence_loss=zero, mlm_correct=correct, sequence_correct=zero)
    assert batch.answers is not None
    is_real = batch.is_real
    if head == "classify":
        weights = None if batch.answer_weights is None else batch.answer_weights[:, 0]
        loss, correct = _cross_entropy(logits, torch.where(is_real, batch.answers[:, 0], IGNORED), weights)
    elif head == "multilabel":
        losses = F.binary_cross_entropy_with_logits(
            logits.float(), batch.answers, batch.answer_weights, reduction="none"
        )
        loss = (losses.mean(1) * is_real).sum()
        correct = (((logits.detach() >= 0) == (batch.answers > 0)).all(1) & is_real).sum().float()
    elif head == "regress":
        loss = ((logits[:, 0].float() - batch.answers[:, 0]).square() * is_real).sum()
        correct = zero
    elif head == "embed":
        # The answers are gradients of the step's loss, which depends on other bins too: see contrastive_engine.py.
        loss = (torch.where(is_real[:, None], logits, 0.0) * batch.answers).sum()
        correct = zero
    else:
        scores = by_sequence(logits, batch).log_softmax(1)
        chosen = scores.gather(1, batch.answers[:, None, :])[:, 0]
        loss = -(chosen * is_real[:, None]).sum() / 2
        correct = ((scores.detach().argmax(1) == batch.answers).all(1) & is_real).sum().float()
    return Sums(mlm_loss=zero, sequence_loss=loss, mlm_correct=zero, sequence_correct=correct)


def by_sequence(logits: Tensor, batch: Batch) -> Tensor:
    """Scores of tokens [T, 2] by sequence [S, L, 2] in float32; padding gets `MASKED_SCORE`."""
    starts, stops = batch.cu_seqlens[:-1, None], batch.cu_seqlens[1:, None]
    rows = starts + torch.arange(batch.max_seqlen, device=starts.device)
    scores = logits.float()[rows.clamp(max=len(logits) - 1)]
    return torch.where((rows < stops)[:, :, None], scores, MASKED_SCORE)
