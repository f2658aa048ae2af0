"""RoBERTa's tensors as BERT's, and back: other names, and rows before the first position (config/roberta.py)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bertrain.config import roberta
from bertrain.weights.names import ROBERTA, ROBERTA_CLASSIFIER
from bertrain.weights.tensors import POSITIONS, StoredTensor, Weights

POSITION_ROWS = "roberta.embeddings.position_embeddings.weight"


def drop_reserved(stored: StoredTensor, count: int) -> StoredTensor:
    """The tensor without its first rows if it is that of positions."""
    if stored.place is None or stored.place.parameter != POSITIONS or not stored.shape:
        return stored
    rows, *width = stored.shape
    return replace(stored, shape=(max(0, rows - count), *width), read=lambda: stored.read()[count:])


def as_roberta(tensors: dict[str, Tensor], weights: Weights) -> dict[str, Tensor]:
    """Tensors under BERT's names of Hugging Face as RoBERTa's."""
    pairs = ROBERTA_CLASSIFIER + ROBERTA if weights.settings.head in ("classify", "multilabel", "regress") else ROBERTA
    renamed = {}
    for name, tensor in tensors.items():
        ours, theirs = next((pair for pair in pairs if name.startswith(pair[0])), ("", ""))
        renamed[theirs + name.removeprefix(ours)] = tensor
    positions = renamed[POSITION_ROWS]
    reserved = positions.new_zeros(pad_id(weights) + 1, positions.shape[1])
    return renamed | {POSITION_ROWS: torch.cat([reserved, positions])}


def pad_id(weights: Weights) -> int:
    return roberta.PAD_ID if weights.vocabulary is None else weights.vocabulary.id_of("[PAD]")
