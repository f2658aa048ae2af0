"""Losses that compare the embeddings of a whole step, as sums over its examples.

`vectors` is [N, texts of an example, E] in float32. Both are those of sentence-transformers, times N.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scored_loss(vectors: Tensor, scores: Tensor) -> Tensor:
    """Squared error of the cosine of each pair against its score in [0, 1], [N] (CosineSimilarityLoss)."""
    return (F.cosine_similarity(vectors[:, 0], vectors[:, 1]) - scores).square().sum()


def ranking_loss(vectors: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of choosing each anchor's positive among all positives and negatives of the step, by cosine
    (MultipleNegativesRankingLoss, whose scale is 1 / temperature)."""
    anchors = F.normalize(vectors[:, 0], dim=-1)
    candidates = F.normalize(vectors[:, 1:].transpose(0, 1).flatten(0, 1), dim=-1)  # all positives, then all negatives
    logits = anchors @ candidates.t() / temperature
    return F.cross_entropy(logits, torch.arange(len(anchors), device=logits.device), reduction="sum")
