"""Documents to examples: pairs of segments for next-sentence prediction, unmasked.

The pairing is that of BERT's reference: sentences of a document are gathered into a chunk of about the target
length (now and then a shorter one, so that short input is seen too), the chunk is cut at a random sentence
into A and B, and half the time B is replaced by a stretch of another document, whose unused sentences go back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bertrain.errors import UserError
from bertrain.seeds import derive

Sentence = list[int]
TokenDocument = list[Sentence]

SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]


@dataclass(frozen=True)
class Pair:
    """Two segments of word-piece numbers; `is_random` says that B does not follow A."""

    a: list[int]
    b: list[int]
    is_random: bool


def pairs_of_documents(
    documents: Iterable[TokenDocument],
    *,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    block_size: int = 2048,
) -> Iterator[Pair]:
    """All pairs of a stream of documents, holding two blocks of documents in memory at the most.

    A random B comes from the same block. Each document draws from its own generator, seeded by its number,
    so a document's pairs do not depend on how many pairs others made.
    """
    first = 0
    for block in _blocks(documents, block_size):
        if len(block) == 1:
            raise UserError(
                "the input is a single document, so no pair can be drawn from another; "
                "put a blank line between documents"
            )
        for offset, document in enumerate(block):
            draw = random.Random(derive(seed, "pairs", first + offset))
            yield from _pairs_of_document(document, offset, block, draw, max_seq_length, short_seq_prob)
        first += len(block)


def _blocks(documents: Iterable[TokenDocument], size: int) -> Iterator[list[TokenDocument]]:
    """Blocks of `size` documents; the last takes up the remainder, so that no block is too small to draw from."""
    waiting: list[TokenDocument] = []
    for document in documents:
        waiting.append(document)
        if len(waiting) == 2 * size:
            yield waiting[:size]
            waiting = waiting[size:]
    if waiting:
        yield waiting


def _pairs_of_document(
    document: TokenDocument,
    number: int,
    block: list[TokenDocument],
    draw: random.Random,
    max_seq_length: int,
    short_seq_prob: float,
) -> Iterator[Pair]:
    longest = max_seq_length - SPECIAL_TOKENS
    target = draw.randint(2, longest) if draw.random() < short_seq_prob else longest
    chunk: list[Sentence] = []
    chunk_length = 0
    position = 0
    while position < len(document):
        chunk.append(document[position])
        chunk_length += len(document[position])
        position += 1
        if position < len(document) and chunk_length < target:
            continue
        a_end = draw.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
        a = [token for sentence in chunk[:a_end] for token in sentence]
        is_random = len(chunk) == 1 or draw.random() < 0.5
        if is_random:
            b = _stretch(_another(block, number, draw), target - len(a), draw)
            position -= len(chunk) - a_end
        else:
            b = [token for sentence in chunk[a_end:] for token in sentence]
        a, b = _truncate(a, b, longest, draw)
        if a and b:
            yield Pair(a, b, is_random)
        chunk, chunk_length = [], 0


def _another(block: list[TokenDocument], number: int, draw: random.Random) -> TokenDocument:
    """A document of the block other than `number`."""
    other = draw.randrange(len(block) - 1)
    return block[other + (other >= number)]


def _stretch(document: TokenDocument, length: int, draw: random.Random) -> list[int]:
    """Tokens from a random sentence of `document` on, until there are `length` of them."""
    tokens: list[int] = []
    for sentence in document[draw.randrange(len(document)) :]:
        tokens += sentence
        if len(tokens) >= length:
            break
    return tokens


def _truncate(a: list[int], b: list[int], longest: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """Take tokens off the longer of the two, at a random end each time, until both fit."""
    a_start, a_stop, b_start, b_stop = 0, len(a), 0, len(b)
    while (a_stop - a_start) + (b_stop - b_start) > longest:
        from_front = draw.random() < 0.5
        if a_stop - a_start > b_stop - b_start:
            a_start, a_stop = (a_start + 1, a_stop) if from_front else (a_start, a_stop - 1)
        else:
            b_start, b_stop = (b_start + 1, b_stop) if from_front else (b_start, b_stop - 1)
    return a[a_start:a_stop], b[b_start:b_stop]
