"""Texts, or pairs of them, to what the model reads: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bertrain.data.formats.block import Block, Values, concatenate, flat_ranges, offsets_of
from bertrain.data.formats.masking import Ints
from bertrain.data.text.tokenizer import Tokenizer
from bertrain.data.text.vocabulary import Vocabulary

ROWS_AT_ONCE = 16384  # tokenized together: the indices of their tokens take some 20 MB


def encode_texts(
    vocabulary: Vocabulary, first: Sequence[str], second: Sequence[str] | None, max_seq_length: int
) -> tuple[Block, int]:
    """A Block of the texts, and how many of them had to be cut to `max_seq_length` word pieces.

    The longer text of a pair loses its last word piece until the pair fits; of two that are equally long, the second.
    """
    tokenizer = Tokenizer(vocabulary)
    marks = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")
    blocks: list[Block] = []
    num_cut = 0
    for start in range(0, max(len(first), 1), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        tokens_a, lengths_a = _encode(tokenizer, first[rows])
        if second is None:
            kept_a = np.minimum(lengths_a, max_seq_length - 2)
            num_cut += int((kept_a < lengths_a).sum())
            blocks.append(_join(marks, [(tokens_a, lengths_a, kept_a)]))
        else:
            tokens_b, lengths_b = _encode(tokenizer, second[rows])
            kept_a, kept_b = cut_pairs(lengths_a, lengths_b, max_seq_length - 3)
            num_cut += int((kept_a + kept_b < lengths_a + lengths_b).sum())
            blocks.append(_join(marks, [(tokens_a, lengths_a, kept_a), (tokens_b, lengths_b, kept_b)]))
    return concatenate(blocks), num_cut


def cut_pairs(lengths_a: Ints, lengths_b: Ints, room: int) -> tuple[Ints, Ints]:
    """How much of each pair is kept if the longer one is cut, again and again, until both have room together."""
    kept_a = np.minimum(lengths_a, np.maximum(room - lengths_b, (room + 1) // 2))
    kept_b = np.minimum(lengths_b, np.maximum(room - lengths_a, room // 2))
    return kept_a, kept_b


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Values, Ints]:
    """The word pieces of all texts end to end, and how many each has."""
    encoded = [tokenizer.encode_raw(text) for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // tokenizer.dtype.itemsize
    return np.frombuffer(b"".join(encoded), tokenizer.dtype), lengths


def _join(marks: tuple[int, int], parts: list[tuple[Values, Ints, Ints]]) -> Block:
    """[CLS], then what is kept of each part, each followed by [SEP]."""
    cls, sep = marks
    lengths = np.sum([keep + 1 for _, _, keep in parts], axis=0) + 1
    offsets = offsets_of(lengths)
    tokens = np.empty(offsets[-1], parts[0][0].dtype)
    place = offsets[:-1]
    tokens[place] = cls
    place = place + 1
    for words, counts, keep in parts:
        tokens[flat_ranges(place, keep)] = words[flat_ranges(offsets_of(counts)[:-1], keep)]
        place = place + keep
        tokens[place] = sep
        place = place + 1
    segment_b = parts[0][2] + 2  # without a second text, this is the length
    return Block(tokens, lengths, segment_b, np.zeros(len(lengths), np.uint8))
