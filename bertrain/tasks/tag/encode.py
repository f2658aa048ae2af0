"""Sentences to a Block: words split into pieces, long sentences in overlapping windows, a label at each first piece.

A word is labeled in one window only, that with the most context around its first piece, in training as in prediction.
So each word counts once, and the model's outputs are those of all words in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bertrain.data.formats.block import Block, Masks, Values, flat_ranges, join_segments, offsets_of
from bertrain.data.formats.masking import Ints
from bertrain.data.text.tokenizer import tokenizer_of
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.windows import cut_windows, has_most_context, overlapping_stride

SPECIAL_TOKENS = 2  # [CLS] and [SEP]


def encode_words(
    vocabulary: Vocabulary, sentences: Sequence[Sequence[str]], labels: Ints, max_seq_length: int, stride: int
) -> Block:
    """Encode sentences of words; `labels` are those of all words, one sentence after another."""
    tokens, pieces = _split_words(vocabulary, sentences)
    num_words = np.fromiter(map(len, sentences), np.int64, len(sentences))
    word_of_sentence = offsets_of(num_words)
    starts = offsets_of(pieces)[:-1]  # of each word in `tokens`
    bounds = np.append(starts, len(tokens))[word_of_sentence]  # of each sentence
    lengths, longest = np.diff(bounds), max_seq_length - SPECIAL_TOKENS
    stride = overlapping_stride(stride, max_seq_length)
    windows = cut_windows(lengths, np.full_like(lengths, longest), np.full_like(lengths, stride))

    is_first = np.zeros(len(tokens), bool)
    is_first[starts] = True
    place = flat_ranges(bounds[windows.text] + windows.first, windows.counts)  # of the windows' tokens in `tokens`
    is_labeled = has_most_context(windows, lengths) & is_first[place]
    window = np.repeat(np.arange(len(windows.counts)), windows.counts)
    position = flat_ranges(np.ones_like(windows.counts), windows.counts)  # in the example, after [CLS]
    word = np.searchsorted(starts, place[is_labeled])
    block = join_segments(
        vocabulary.id_of("[CLS]"),
        vocabulary.id_of("[SEP]"),
        (tokens, bounds[windows.text] + windows.first, windows.counts),
    )
    counts = np.bincount(window[is_labeled], minlength=len(windows.counts))
    block = replace(block, masks=Masks(counts, position[is_labeled], labels[word]))
    # A window within a word of very many pieces labels nothing.
    return block if counts.all() else block.take(np.flatnonzero(counts))


def _split_words(vocabulary: Vocabulary, sentences: Sequence[Sequence[str]]) -> tuple[Values, Ints]:
    """The pieces of all words and how many each has: one at least, [UNK] for a word of nothing that can be read."""
    tokenizer = tokenizer_of(vocabulary)
    unknown = np.array([vocabulary.id_of("[UNK]")], tokenizer.dtype).tobytes()
    encoded = [
        tokenizer.encode_raw(tokenizer.joint + word if number else word) or unknown
        for words in sentences
        for number, word in enumerate(words)
    ]
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded)) // tokenizer.dtype.itemsize
    return np.frombuffer(b"".join(encoded), tokenizer.dtype), counts
