"""How often each word of the vocabulary is one to predict, counted in a sample of the training data."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bertrain.data.formats.block import EXAMPLES_AT_ONCE
from bertrain.data.formats.masking import special_ids
from bertrain.data.formats.source import DataSource

SAMPLED_TOKENS = 1 << 21  # words that the sample lacks are too rare to matter early in training


def word_shares(data: DataSource, part: range) -> npt.NDArray[np.float64]:
    """The share of each word among the words to predict in the rows of `part`; positive, with a sum of 1.

    The sample is evenly spaced over these rows, so every rank counts the same. Each word counts once more than it
    occurs, so that none is impossible.
    """
    num_rows = min(len(part), max(1, int(SAMPLED_TOKENS / data.lengths[part.start : part.stop].mean())))
    rows = np.linspace(part.start, part.stop - 1, num_rows).astype(np.int64)
    num_words = len(data.vocabulary.words)
    counts = np.zeros(num_words, np.int64)
    for first in range(0, num_rows, EXAMPLES_AT_ONCE):
        block = data.read(rows[first : first + EXAMPLES_AT_ONCE])
        if block.masks is not None:
            words = block.masks.labels
        else:
            words = block.tokens[~np.isin(block.tokens, special_ids(data.vocabulary))]
        counts += np.bincount(words, minlength=num_words)
    return (counts + 1) / (counts.sum() + num_words)
