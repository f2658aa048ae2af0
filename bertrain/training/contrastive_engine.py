"""The engine of the task `similarity`, whose loss compares texts of all bins and all ranks of a step.

A bin's gradient depends on the embeddings of every other bin, so a step has two passes, as in GradCache (Gao et al.,
2021). `begin` computes the embeddings of this rank's bins without keeping activations, sums them over the ranks into
one table, [texts of the step, E], and differentiates the loss with respect to the table: the same numbers on every
rank. `add_bin` computes its bin again, with the same dropout, and backpropagates the gradient of its embeddings.

So the result depends neither on the number of ranks nor on the token budget (which changes the dropout masks), memory
is that of one bin, and the price is a second forward pass. The loop and the engines below know nothing of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Step
from bertrain.model.batch import Batch
from bertrain.model.encoder import Outputs
from bertrain.model.sums import Sums, packed_sums
from bertrain.ranks.parallel import Ranks


class EmbeddingEngine(Protocol):
    """An engine of bins, see `engine.Engine`, that also computes embeddings as its training does."""

    uses_graphs: bool
    sums: Tensor

    @property
    def peaks(self) -> list[Tensor]: ...
    def state(self) -> dict[str, Tensor]: ...
    def restore(self, state: dict[str, Tensor]) -> None: ...
    def begin(self, step: Step) -> None: ...
    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None: ...
    def outputs(self, batch: Batch) -> Outputs: ...
    def discard_bins(self) -> None: ...
    def update(self, rate: float) -> Tensor: ...
    def embeddings(self, batch: Batch) -> Tensor:
        """The vectors of a bin's examples, under the dropout that `add_bin` draws for the bin."""


class ContrastiveEngine:
    """Computes a step in two passes over an engine; see `engine.Engine` for the methods."""

    def __init__(self, engine: EmbeddingEngine, ranks: Ranks, settings: Settings) -> None:
        self._engine, self._ranks = engine, ranks
        self._width, self._task = settings.model.hidden_size, settings.task
        self.sums = packed_sums(device=engine.sums.device)
        self._gradient = torch.zeros(0, self._width, device=engine.sums.device)
        self._places: list[Tensor] = []  # of the bins that are still to be added

    @property
    def uses_graphs(self) -> bool:
        return self._engine.uses_graphs

    @uses_graphs.setter
    def uses_graphs(self, value: bool) -> None:
        self._engine.uses_graphs = value

    @property
    def peaks(self) -> list[Tensor]:
        return self._engine.peaks

    def state(self) -> dict[str, Tensor]:
        return self._engine.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self._engine.restore(state)

    def begin(self, step: Step) -> None:
        device, width = self.sums.device, self._width
        self._engine.begin(step)
        self._places = [torch.from_numpy(places).to(device) for places in step.places]
        table = torch.zeros(step.num_texts, width + 1, device=device)
        for batch, places in zip(step.bins, self._places, strict=True):
            assert batch.answers is not None
            scores = batch.answers[batch.is_real].to(device)
            table[places] = torch.cat([self._engine.embeddings(batch), scores.float()], dim=1)
        self._ranks.all_reduce_sum(table)  # every text is in one bin: zero and its vector on the other ranks
        vectors, scores = table[:, :width].clone().requires_grad_(), table[:, width]
        loss = self._loss(vectors.unflatten(0, (step.num_sequences, -1)), scores.view(step.num_sequences, -1)[:, 0])
        (self._gradient,) = torch.autograd.grad(loss, vectors)
        # The loop adds the sums of all ranks, so one of them has the loss of the whole step.
        zero = torch.zeros((), device=device)
        self.sums.copy_(Sums(zero, loss if self._ranks.is_first else zero, zero, zero).pack())

    def _loss(self, vectors: Tensor, scores: Tensor) -> Tensor:
        if self._task.loss == "cosine":
            return scored_loss(vectors, scores)
        return ranking_loss(vectors, self._task.temperature)

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        gradient = torch.zeros(len(batch.is_real), self._width, device=self.sums.device)
        gradient[batch.is_real.to(gradient.device)] = self._gradient[self._places.pop(0)]
        self._engine.add_bin(replace(batch, answers=gradient), step, is_last=is_last)

    def outputs(self, batch: Batch) -> Outputs:
        return self._engine.outputs(batch)

    def discard_bins(self) -> None:
        self._engine.discard_bins()

    def update(self, rate: float) -> Tensor:
        # Whether the step is finite must be decided alike on all ranks: by the loss, not by this rank's bins.
        self._engine.sums.copy_(self.sums)
        return self._engine.update(rate)


# Losses of the embeddings of a whole step, as sums over its examples; `vectors` is [N, texts of an example, E] in
# float32. Both are those of sentence-transformers, times N.


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
