"""Documents to examples: which stretches of the tokens make a row. Nothing is copied here.

Pairs for next-sentence prediction are those of BERT's reference: sentences of a document are gathered into a chunk
of about the target length (now and then a shorter one, so that short input is seen too), the chunk is cut at a random
sentence into A and B, and half the time B is replaced by a stretch of another document, whose unused sentences go
back. Full sentences, without next-sentence prediction, are RoBERTa's: rows filled with sentences in their order.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.seeds import derive

PAIR_SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
SINGLE_SPECIAL_TOKENS = 2  # [CLS] A [SEP]


@dataclass(frozen=True)
class TokenText:
    """Tokens of many documents one after another; sentence s is sentences[s] .. sentences[s + 1] of them.

    Document d is the sentences documents[d] .. documents[d + 1]. No sentence and no document is empty.
    """

    tokens: npt.NDArray[Any]
    sentences: array[int]
    documents: array[int]

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1


class Pair(NamedTuple):
    """Two stretches of the tokens; `is_random` says that B does not follow A. An empty B stands for none."""

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

    Each document draws from a generator of its own, seeded by its number (they count from `first_number`), so its
    pairs do not depend on how many pairs others made.
    """
    if text.num_documents < 2:
        raise UserError(
            "the input is a single document, so no pair can be drawn from another; put a blank line between documents"
        )
    for number in range(num_documents or text.num_documents):
        draw = random.Random(derive(seed, "pairs", first_number + number))
        yield from pairs_of_document(
            text, number, draw, _any_other(text.num_documents, number, draw), max_seq_length, short_seq_prob
        )


def _any_other(num_documents: int, number: int, draw: random.Random) -> Callable[[], int]:
    def another() -> int:
        other = draw.randrange(num_documents - 1)
        return other + (other >= number)

    return another


def pairs_of_document(
    text: TokenText,
    number: int,
    draw: random.Random,
    another: Callable[[], int],
    max_seq_length: int,
    short_seq_prob: float,
) -> Iterator[Pair]:
    """Pairs of one document; `another` draws the document of a random B.

    The draws, and their order, are those of the reference. It masks a pair before it draws the next one, and so may
    a caller that draws from the same generator.
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
        yield _truncate(start, a_stop, b_start, b_stop, is_random, longest, draw)


def _truncate(
    a_start: int, a_stop: int, b_start: int, b_stop: int, is_random: bool, longest: int, draw: random.Random
) -> Pair:
    """Take tokens off the longer of the two, at a random end each time, until both fit."""
    a_length, b_length = a_stop - a_start, b_stop - b_start
    while a_length + b_length > longest:
        at_front = draw.random() < 0.5
        if a_length > b_length:
            a_start += at_front
            a_length -= 1
        else:
            b_start += at_front
            b_length -= 1
    return Pair(a_start, a_start + a_length, b_start, b_start + b_length, is_random)


def full_sentences(
    text: TokenText, separator: int, *, max_seq_length: int, seed: int
) -> tuple[npt.NDArray[Any], Iterator[Pair]]:
    """Rows of whole sentences, as many as fit, on from one document to the next with a [SEP] between.

    Returns the tokens that the rows are stretches of, documents in an order drawn by `seed`. A sentence that is longer
    than a row fills rows of its own.
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
