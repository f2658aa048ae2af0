"""Documents to examples: which ranges of the tokens make a row; and rows of these ranges with special tokens.

Pairs for next-sentence prediction are those of BERT's reference: sentences of a document are collected into a chunk of
about the target length (sometimes a shorter one), the chunk is split at a random sentence into A and B, and half the
time B is replaced by a range of another document, and its own sentences are used again. Full sentences, without
next-sentence prediction, are RoBERTa's: rows filled with consecutive sentences.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.seeds import derive
from bertrain.data.formats.block import Block, Values, join_segments

PAIR_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
SINGLE_SPECIAL_TOKENS = 2  # [CLS] A [SEP]


@dataclass(frozen=True)
class TokenText:
    """Tokens of many documents: sentence s is tokens[sentences[s] : sentences[s + 1]].

    Document d has the sentences documents[d] .. documents[d + 1] - 1. No sentence and no document is empty.
    """

    tokens: npt.NDArray[Any]
    sentences: array[int]
    documents: array[int]

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1


class Pair(NamedTuple):
    """Two ranges of the tokens. An empty B means that there is none."""

    a_start: int
    a_stop: int
    b_start: int
    b_stop: int
    is_random: bool


def draw_pairs(
    text: TokenText,
    *,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    num_documents: int | None = None,
    first_number: int = 0,
) -> Iterator[Pair]:
    """All pairs of the first `num_documents` documents; a random B may come from any document of `text`.

    Each document has its own random generator, seeded by its number (counted from `first_number`), so its pairs do not
    depend on other documents.
    """
    if text.num_documents < 2:
        why = "the input is a single document, so a random second segment cannot come from another one"
        raise UserError("single-document", f"{why}; put blank lines between documents, or use --full-sentences")
    for number in range(num_documents or text.num_documents):
        draw = random.Random(derive(seed, "pairs", first_number + number))
        another = partial(_any_other, text.num_documents, number, draw)
        yield from pairs_of_document(text, number, draw, another, max_seq_length, short_seq_prob)


def _any_other(num_documents: int, number: int, draw: random.Random) -> int:
    other = draw.randrange(num_documents - 1)
    return other + (other >= number)


def pairs_of_document(
    text: TokenText,
    number: int,
    draw: random.Random,
    another: Callable[[], int],
    max_seq_length: int,
    short_seq_prob: float,
) -> Iterator[Pair]:
    """Pairs of one document; `another` draws the document of a random B.

    The draws and their order are those of the reference, which masks each pair before it draws the next; a caller may
    do so too, from the same generator.
    """
    sentences = text.sentences
    longest = max_seq_length - PAIR_SPECIAL_TOKENS
    target = draw.randint(2, longest) if draw.random() < short_seq_prob else longest
    position, document_end = text.documents[number], text.documents[number + 1]
    while position < document_end:
        start = sentences[position]
        chunk_end = bisect_left(sentences, start + target, position + 1, document_end)
        count = chunk_end - position
        a_end = position + (draw.randint(1, count - 1) if count >= 2 else 1)
        a_stop = sentences[a_end]
        is_random = count == 1 or draw.random() < 0.5
        if is_random:
            other = another()
            first, last = text.documents[other], text.documents[other + 1]
            b_first = first + draw.randrange(last - first)
            b_start = sentences[b_first]
            b_stop = sentences[bisect_left(sentences, b_start + target - (a_stop - start), b_first + 1, last)]
            position = a_end
        else:
            b_start, b_stop = a_stop, sentences[chunk_end]
            position = chunk_end
        a_length, b_length = a_stop - start, b_stop - b_start
        while a_length + b_length > longest:  # remove tokens from the longer one, each at a random end
            at_front = draw.random() < 0.5
            if a_length > b_length:
                start += at_front
                a_length -= 1
            else:
                b_start += at_front
                b_length -= 1
        yield Pair(start, start + a_length, b_start, b_start + b_length, is_random)


def full_sentences(
    text: TokenText, separator: int, *, max_seq_length: int, seed: int
) -> tuple[npt.NDArray[Any], Iterator[Pair]]:
    """Rows of as many whole sentences as fit, continuing into the next document after a [SEP].

    Returns the tokens, documents shuffled by `seed`, and the rows as ranges of them. A sentence that is longer than a
    row is split over several.
    """
    order = list(range(text.num_documents))
    random.Random(seed).shuffle(order)
    pieces: list[npt.NDArray[Any]] = []
    between = np.array([separator], text.tokens.dtype)
    begins, ends = array("q"), array("q")  # where each sentence begins and ends in the new order
    position = 0
    for number in order:
        first, last = text.documents[number], text.documents[number + 1]
        start = text.sentences[first]
        pieces += [text.tokens[start : text.sentences[last]], between]
        begins.extend(position + edge - start for edge in text.sentences[first:last])
        ends.extend(position + edge - start for edge in text.sentences[first + 1 : last + 1])
        position = ends[-1] + 1
    return np.concatenate(pieces), _fill(begins, ends, max_seq_length - SINGLE_SPECIAL_TOKENS)


def _fill(begins: array[int], ends: array[int], longest: int) -> Iterator[Pair]:
    sentence = 0
    start = 0
    while sentence < len(ends):
        following = bisect_right(ends, start + longest, sentence)
        if following > sentence:
            stop, sentence = ends[following - 1], following
            yield Pair(start, stop, stop, stop, False)
            start = begins[sentence] if sentence < len(begins) else stop
        else:
            yield Pair(start, start + longest, start + longest, start + longest, False)
            start += longest


def block_of_pairs(tokens: Values, pairs: Sequence[Pair], start: int, separator: int) -> Block:
    """[CLS] A [SEP] B [SEP] of each pair, or [CLS] A [SEP] where there is no B."""
    a_start, a_stop, b_start, b_stop, is_random = np.array(pairs, dtype=np.int64).reshape(-1, 5).T
    b_length = np.where(b_stop > b_start, b_stop - b_start, -1)
    block = join_segments(start, separator, (tokens, a_start, a_stop - a_start), (tokens, b_start, b_length))
    return replace(block, is_random=is_random.astype(np.bool_))
