"""A Block in memory as a `DataSource`: examples with nothing masked, which the loader batches."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from bertrain.data.formats.block import Block, Masks
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.source import DataSource
from bertrain.data.text.vocabulary import Vocabulary

EMPTY = np.zeros(0, dtype=np.int64)


class TaskData(DataSource):
    """The examples of a task's split, or texts to embed."""

    layout = "task"
    max_predictions = 0
    num_files = 1

    def __init__(self, block: Block, folder: Path, vocabulary: Vocabulary, max_seq_length: int) -> None:
        self.block, self.folder, self.vocabulary, self.max_seq_length = block, folder, vocabulary, max_seq_length
        self.lengths = block.lengths.astype(np.int32)
        self.texts_per_example, self._is_random, masks = block.texts_per_example, block.is_random, block.masks
        self.predictions = np.zeros_like(self.lengths) if masks is None else masks.counts.astype(np.int32)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """SHA-256 of the vocabulary and all examples, in order."""
        digest, block = hashlib.sha256(self.vocabulary.hash.encode()), self.block
        labels = () if block.masks is None else (block.masks.counts, block.masks.positions, block.masks.labels)
        for values in (block.tokens, block.lengths, block.segment_b, block.answers, *labels):
            if values is not None:
                digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def read(self, rows: Ints) -> Block:
        """The examples of `rows`, in that order, with the labels of their words, or else with empty masks."""
        block = self.block.take(rows)
        return block if block.masks else replace(block, masks=Masks(np.zeros_like(block.lengths), EMPTY, EMPTY))
