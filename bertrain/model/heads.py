"""The two pre-training heads and their loss. Letters as in bert.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertrain.data.batch import IGNORED, Batch
from bertrain.settings import ModelSettings


class MaskedWordHead(nn.Module):
    """Transform, then scores against the word embeddings, which it shares with the encoder."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.vocab_size = settings.vocab_size
        self.transform = nn.Linear(settings.hidden_size, settings.hidden_size)
        self.norm = nn.LayerNorm(settings.hidden_size, settings.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(settings.padded_vocab_size))

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:  # [P, E], [V, E] -> [P, vocab_size]
        x = self.norm(F.gelu(self.transform(x)))
        logits = F.linear(x, word_embeddings, self.bias)
        # The padding of the vocabulary is computed with the rest, then cut off: no probability falls on it.
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]


class NextSentenceHead(nn.Module):
    """Pool [CLS], then decide: 0, B follows A; 1, B was drawn at random."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.pool = nn.Linear(settings.hidden_size, settings.hidden_size)
        self.classify = nn.Linear(settings.hidden_size, 2)

    def forward(self, cls: Tensor) -> Tensor:  # [S, E] -> [S, 2]
        return self.classify(torch.tanh(self.pool(cls)))


@dataclass(frozen=True)
class Sums:
    """Sums over one bin, on its device: losses, and right answers."""

    mlm_loss: Tensor
    nsp_loss: Tensor
    mlm_correct: Tensor
    nsp_correct: Tensor

    def stack(self) -> Tensor:
        return torch.stack([self.mlm_loss.detach(), self.nsp_loss.detach(), self.mlm_correct, self.nsp_correct])


def pretraining_sums(mlm_logits: Tensor, nsp_logits: Tensor | None, batch: Batch) -> Sums:
    """Summed cross-entropies and counts of right answers; empty slots count for nothing."""
    mlm_loss, mlm_correct = _cross_entropy(mlm_logits, batch.mlm_labels)
    if nsp_logits is None:
        return Sums(mlm_loss, torch.zeros_like(mlm_loss), mlm_correct, torch.zeros_like(mlm_correct))
    nsp_loss, nsp_correct = _cross_entropy(nsp_logits, batch.nsp_labels)
    return Sums(mlm_loss, nsp_loss, mlm_correct, nsp_correct)


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    correct = (logits.detach().argmax(-1) == labels).sum().float()
    return loss, correct
