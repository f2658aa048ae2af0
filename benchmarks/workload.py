"""What benchmarks train on: random words in Wikipedia's lengths, and the same batch as Transformers wants it."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertrain.data.formats.block import Block
from bertrain.data.formats.write import write_blocks
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED, Batch

HERE = Path(__file__).parent
HIDDEN, HEADS, HEAD_DIM, FFN = 1024, 16, 64, 4096  # BERT-Large's


def wikipedia_lengths(count: int, seed: int, max_seq_length: int = 512) -> np.ndarray[Any, Any]:
    """Lengths drawn from a histogram; the few under five cannot hold a pair.

    Those for 128 and 512 tokens are published; those for 1,024, 2,048 and 8,192 are of 106 MB of English Wikipedia
    (2015) by `bertrain data prepare`, rounded up to multiples of 4, 8 and 32.
    """
    with open(HERE / f"wikipedia-{max_seq_length}.csv") as file:
        rows = [(int(row["length"]), int(row["sequences"])) for row in csv.DictReader(file)]
    lengths, weights = np.array([row for row in rows if row[0] >= 5], dtype=np.float64).T
    return np.random.default_rng(seed).choice(lengths.astype(np.int64), count, p=weights / weights.sum())


class Example(NamedTuple):
    """An unmasked row: tokens including special ones, where segment B begins, and the next-sentence label."""

    tokens: list[int]
    segment_b: int
    is_random: bool


def write_folder(folder: Path, examples: Iterable[Example], vocabulary: Vocabulary) -> None:
    """Write a prepared folder of one file."""
    tokens, segment_b, is_random = zip(*examples, strict=True)
    lengths = np.array([len(row) for row in tokens])
    block = Block(np.concatenate(tokens), lengths, np.array(segment_b), np.array(is_random))
    write_blocks(folder, [block], vocabulary, preparation={})


def random_examples(count: int, vocabulary: Vocabulary, max_seq_length: int = 512) -> Iterator[Example]:
    draw = np.random.default_rng(1)
    start, separator = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")
    for length in wikipedia_lengths(count, seed=0, max_seq_length=max_seq_length).tolist():
        tokens = draw.integers(1000, len(vocabulary.words), length)
        middle = int(draw.integers(2, length - 2))
        tokens[[0, middle, -1]] = start, separator, separator
        yield Example(tokens.tolist(), middle + 1, bool(draw.random() < 0.5))


def padded_inputs(batch: Batch, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A bin of the policy `padded` under the names that Transformers' BertForPreTraining knows."""
    slots = rows * columns
    labels = torch.full((slots,), IGNORED)
    real = batch.mlm_labels != IGNORED
    labels[batch.mlm_positions[real]] = batch.mlm_labels[real]
    ids = batch.input_ids[:slots].view(rows, columns)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "token_type_ids": batch.segment_ids[:slots].view(rows, columns),
        "labels": labels.view(rows, columns),
        "next_sentence_label": batch.nsp_labels[batch.nsp_labels != IGNORED],
    }
