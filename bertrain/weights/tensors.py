"""What every format of weights is read into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bertrain.data.tokenizer import Vocabulary
from bertrain.settings import ModelSettings

PADDED_BY_VOCABULARY = ("embeddings.words.weight", "masked_words.bias")
"""Tensors with a row for each word, which may have rows of padding after them."""

POSITIONS = "embeddings.positions.weight"
"""The tensor with a row for each position of a sequence."""


@dataclass(frozen=True)
class Weights:
    """Tensors under our names, the model they belong to, and the words they speak of."""

    origin: str
    fingerprint: str
    """SHA-256 of the file they were read from."""
    tensors: dict[str, Tensor]
    settings: ModelSettings
    vocabulary: Vocabulary | None
    left_over: tuple[str, ...] = ()
    """Tensors of the source that have no place in our model."""
