"""Random examples of equal length, for measurements in which the content does not matter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bertrain.config.settings import DataSettings, ModelSettings, Settings
from bertrain.data.formats.shards import Shards
from bertrain.data.formats.write import Example, write_shards
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary

MAX_TOKENS = 1 << 18  # in all examples, which are repeated


def write_synthetic(folder: Path, settings: Settings) -> Shards:
    """Write sentence pairs of data.max_seq_length random tokens of the model's vocabulary; the same on every rank."""
    size = settings.model.vocab_size or ModelSettings.vocab_size
    made_up = (f"word{number}" for number in range(size - len(SPECIAL_WORDS)))
    vocabulary = Vocabulary((*SPECIAL_WORDS, *made_up), lower_case=True)
    length = settings.data.max_seq_length or DataSettings.max_seq_length
    count = max(16, MAX_TOKENS // length)
    write_shards(
        folder, _examples(count, length, vocabulary), vocabulary, preparation={"synthetic": True}, rows_per_shard=count
    )
    return Shards.open(folder, verify="size")


def _examples(count: int, length: int, vocabulary: Vocabulary) -> Iterator[Example]:
    draw = np.random.default_rng(1)
    start, separator = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")
    middle = length // 2
    for number in range(count):
        tokens = draw.integers(len(SPECIAL_WORDS), len(vocabulary.words), length)
        tokens[[0, middle, -1]] = start, separator, separator
        yield Example(tokens.tolist(), middle + 1, is_random=number % 2 == 1)
