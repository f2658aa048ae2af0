"""The parts that all model families share: the heads on an encoder, and the rows of a bin that each of them reads.

A family (bert.py, modern.py) is an `EncoderModel` with its own embeddings, layers and heads; families.py chooses it.
Letters in shape comments: T tokens of a bin, S sequence slots, P prediction slots, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from bertrain.config.settings import ModelSettings
from bertrain.model.attention import AttentionPlan, RaggedPlan
from bertrain.model.batch import Batch
from bertrain.model.pooling import pool


@dataclass(frozen=True)
class Outputs:
    """Outputs of the heads for one bin. Rows of empty slots have no meaning."""

    mlm_logits: Tensor | None = None  # [P, vocab_size]; None after fine-tuning
    nsp_logits: Tensor | None = None  # [S, 2]; None without next-sentence prediction
    rtd_logits: Tensor | None = None  # [T]; only in training, for bins with replaced words
    answers: Tensor | None = None  # of a fine-tuning head: [S, labels], [S, 1], [T, 2], [P, labels] or [S, E]


class WordEmbeddings(nn.Module):
    """A family's embeddings; the head of masked words shares those of words."""

    words: nn.Embedding


class EncoderModel(nn.Module):
    """An encoder with the heads of pre-training, or one for fine-tuning. Each gets only the rows that it reads."""

    embeddings: WordEmbeddings
    layers: nn.ModuleList
    masked_words: nn.Module | None
    next_sentence: nn.Module | None
    replaced_words: nn.Module | None
    answer: nn.Module | None

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.plan_attention: Callable[[Batch], AttentionPlan] = RaggedPlan.of

    def encode(self, batch: Batch) -> Tensor:
        """The last layer's output for every token of the bin, [T, E]."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Outputs:
        x = self.encode(batch)
        if self.settings.head == "embed":
            return Outputs(answers=pool(x, batch, self.settings.pooling))
        if self.answer is None:
            assert self.masked_words is not None
            mlm_logits = self.masked_words(x[batch.mlm_positions], self.embeddings.words.weight)
            nsp_logits = self.next_sentence(x[batch.cls_positions]) if self.next_sentence is not None else None
            rtd_logits = None
            if self.replaced_words is not None and batch.replaced is not None:
                rtd_logits = self.replaced_words(x)
            return Outputs(mlm_logits, nsp_logits, rtd_logits)
        match self.settings.head:
            case "span":
                return Outputs(answers=self.answer(x))
            case "tag":
                return Outputs(answers=self.answer(x[batch.mlm_positions]))
            case _:
                return Outputs(answers=self.answer(self.sentences(x, batch)))

    def sentences(self, x: Tensor, batch: Batch) -> Tensor:
        """The vector of each sequence that a head for whole texts reads, [T, E] -> [S, E]."""
        return x[batch.cls_positions]


def split_parts(name: str) -> int:
    """Number of the reference's tensors that the parameter `name` stacks along its first axis.

    Query, key and value are one matrix here, so that one product computes them; LAMB, Muon and StableAdamW treat them
    as three tensors.
    """
    return 3 if name.endswith("qkv.weight") else 1
