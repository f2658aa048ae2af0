"""Examples of random words, for measuring: what they say does not matter, and their lengths are all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bertrain.config.settings import Settings
from bertrain.data.formats.shards import Shards
from bertrain.data.formats.write import Example, write_shards
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary

MOST_TOKENS = 1 << 18  # of the whole set, which is gone through again and again


def write_synthetic(folder: Path, settings: Settings) -> Shards:
    """Pairs of data.max_seq_length tokens each, of a vocabulary as large as the model's. The same for every rank."""
    vocabulary = synthetic_vocabulary(settings.model.vocab_size)
    count = max(16, MOST_TOKENS // settings.data.max_seq_length)
    examples = _examples(count, settings.data.max_seq_length, vocabulary)
    write_shards(folder, examples, vocabulary, preparation={"synthetic": True}, rows_per_shard=count)
    return Shards.open(folder, verify="size")


def synthetic_vocabulary(size: int) -> Vocabulary:
    """The special words, then words that mean nothing."""
    words = tuple(f"word{number}" for number in range(size - len(SPECIAL_WORDS)))
    return Vocabulary((*SPECIAL_WORDS, *words), lower_case=True)


def _examples(count: int, length: int, vocabulary: Vocabulary) -> Iterator[Example]:
    draw = np.random.default_rng(1)
    start, separator = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")
    middle = length // 2
    for number in range(count):
        tokens = draw.integers(len(SPECIAL_WORDS), len(vocabulary.words), length)
        tokens[[0, middle, -1]] = start, separator, separator
        yield Example(tokens.tolist(), middle + 1, is_random=number % 2 == 1)
