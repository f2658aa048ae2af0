"""Tokenize texts, or pairs of texts, into a Block: [CLS] a [SEP], or [CLS] a [SEP] b [SEP].

Between a and b stand as many [SEP] as the tokenizer has there: two of RoBERTa's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bertrain.data.formats.block import Block, Values, concatenate, join_segments, offsets_of
from bertrain.data.formats.masking import Ints
from bertrain.data.text.tokenizer import AnyTokenizer, tokenizer_of
from bertrain.data.text.vocabulary import Vocabulary

CHUNK_ROWS = 16384  # tokenized together: the indices of their tokens take some 20 MB


def encode_texts(
    vocabulary: Vocabulary,
    first: Sequence[str],
    second: Sequence[str] | None,
    max_seq_length: int,
) -> tuple[Block, int]:
    """Encode the texts, and count those truncated to `max_seq_length` tokens.

    The longer text of a pair loses its last token until the pair fits; of two of equal length, the second.
    """
    tokenizer = tokenizer_of(vocabulary)
    blocks: list[Block] = []
    num_truncated = 0
    for start in range(0, max(len(first), 1), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        encoded = [_encode(tokenizer, texts[rows], max_seq_length) for texts in (first, second) if texts is not None]
        lengths = [counts for _, counts in encoded]
        if second is None:
            kept = [np.minimum(lengths[0], max_seq_length - 2)]
        else:
            kept = list(truncate_pairs(lengths[0], lengths[1], max_seq_length - 2 - tokenizer.separators))
        num_truncated += int((np.sum(kept, axis=0) < np.sum(lengths, axis=0)).sum())
        parts = zip(encoded, kept, strict=True)
        segments = [(words, offsets_of(counts)[:-1], keep) for (words, counts), keep in parts]
        ends = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")
        blocks.append(join_segments(*ends, *segments, separators=tokenizer.separators))
    return concatenate(blocks), num_truncated


def truncate_pairs(lengths_a: Ints, lengths_b: Ints, max_length: int) -> tuple[Ints, Ints]:
    """The lengths of both texts after shortening the longer one, token by token, to `max_length` together."""
    kept_a = np.minimum(lengths_a, np.maximum(max_length - lengths_b, (max_length + 1) // 2))
    kept_b = np.minimum(lengths_b, np.maximum(max_length - lengths_a, max_length // 2))
    return kept_a, kept_b


def _encode(tokenizer: AnyTokenizer, texts: Sequence[str], enough: int) -> tuple[Values, Ints]:
    """The tokens of all texts, concatenated, and the length of each text; of long texts at least `enough` tokens."""
    encoded = [tokenizer.encode_raw(text, enough) for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // tokenizer.dtype.itemsize
    return np.frombuffer(b"".join(encoded), tokenizer.dtype), lengths
