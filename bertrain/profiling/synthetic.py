"""Random examples of equal length, for measurements in which the content does not matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bertrain.config.settings import DataSettings, ModelSettings, Settings
from bertrain.data.formats.block import Block
from bertrain.data.formats.shards import Shards
from bertrain.data.formats.write import write_blocks
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary

MAX_TOKENS = 1 << 18  # in all examples, which are repeated


def write_synthetic(folder: Path, settings: Settings) -> Shards:
    """Write sentence pairs of data.max_seq_length random tokens of the model's vocabulary; the same on every rank."""
    size = settings.model.vocab_size or ModelSettings.vocab_size
    made_up = (f"word{number}" for number in range(size - len(SPECIAL_WORDS)))
    vocabulary = Vocabulary((*SPECIAL_WORDS, *made_up), lower_case=True)
    length = settings.data.max_seq_length or DataSettings.max_seq_length
    count = max(16, MAX_TOKENS // length)
    middle = length // 2
    tokens = np.random.default_rng(1).integers(len(SPECIAL_WORDS), size, (count, length))
    tokens[:, 0] = vocabulary.id_of("[CLS]")
    tokens[:, [middle, -1]] = vocabulary.id_of("[SEP]")
    block = Block(tokens.ravel(), np.full(count, length), np.full(count, middle + 1), np.arange(count) % 2 == 1)
    write_blocks(folder, [block], vocabulary, preparation={"synthetic": True})
    return Shards.open(folder, verify="size")
