"""The rows of MLPerf's reference preparation, draw for draw, masks included.

The reference (create_pretraining_data of mlcommons/training) uses one random generator throughout: it shuffles the
documents, makes and masks the pairs of each, `dupe_factor` times, and shuffles all rows. This module makes the same
draws in the same order. The rest is done on arrays: texts and rows are in files, so memory use is some dozens of bytes
per row.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bertrain.data.formats.block import EXAMPLES_AT_ONCE, Block, Masks, in_batches
from bertrain.data.prepare.examples import Pair, TokenText, block_of_pairs, pairs_of_document
from bertrain.data.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from bertrain.data.prepare.units import Preparation

OTHER_DOCUMENT_TRIALS = 10
KEPT = -1  # instead of a replacement: keep the token

Masked = tuple[Pair, list[int], list[int]]  # a pair, the positions to predict, and the replacement of each token


def reference_rows(text: TokenText, vocabulary: Vocabulary, folder: Path, plan: Preparation) -> Iterator[Block]:
    """All rows in the reference's order, a shard at a time; `folder` stores them until they are shuffled."""
    draw = random.Random(plan.seed)
    masked = _masked_pairs(text, vocabulary, draw, plan)
    start, separator = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")
    parts = (_apply(batch, text, start, separator) for batch in in_batches(masked, EXAMPLES_AT_ONCE))
    whole = spool(parts, folder)
    order = list(range(len(whole)))
    shuffle(order, draw)
    for numbers in in_batches(order, plan.rows_per_shard):
        yield whole.take(np.array(numbers))


def shuffle(items: list[int], draw: random.Random) -> None:
    """What draw.shuffle(items) does, to the last bit of the generator, in less than half the time."""
    bits = draw.getrandbits
    for width, stretch in _stretches(len(items) - 1):
        for index in stretch:
            while (other := bits(width)) > index:
                pass
            items[index], items[other] = items[other], items[index]


@lru_cache(maxsize=4096)
def _stretches(top: int) -> list[tuple[int, range]]:
    """The indices top .. 1 of a shuffle, in ranges for which the same number of bits is drawn."""
    widths = range((top + 1).bit_length(), 1, -1)
    return [(width, range(min(top, (1 << width) - 2), (1 << width - 1) - 2, -1)) for width in widths]


def _masked_pairs(text: TokenText, vocabulary: Vocabulary, draw: random.Random, plan: Preparation) -> Iterator[Masked]:
    """All pairs with their masks, drawn as in the reference: shuffle all positions, take the first."""
    uniform, mask_id, vocab_size = draw.random, vocabulary.id_of("[MASK]"), len(vocabulary.words)
    order = list(range(text.num_documents))
    shuffle(order, draw)
    for index, number in chain.from_iterable(enumerate(order) for _ in range(plan.dupe_factor)):
        another = partial(_mostly_another, order, index, draw)
        for pair in pairs_of_document(text, number, draw, another, plan.max_seq_length, plan.short_seq_prob):
            a_length, b_length = pair.a_stop - pair.a_start, pair.b_stop - pair.b_start
            positions = [*range(1, a_length + 1), *range(a_length + 2, a_length + b_length + 2)]
            shuffle(positions, draw)
            wanted = max(1, round((a_length + b_length + 3) * plan.masked_lm_prob))
            chosen = positions[: min(plan.max_predictions, wanted)]
            words = [
                mask_id if uniform() < 0.8 else KEPT if uniform() < 0.5 else draw.randrange(vocab_size) for _ in chosen
            ]
            yield pair, chosen, words


def _mostly_another(order: list[int], index: int, draw: random.Random) -> int:
    """The reference tries ten times to draw a document other than that at `index`, and then takes the last drawn."""
    for _ in range(OTHER_DOCUMENT_TRIALS):
        other = draw.randrange(len(order))
        if other != index:
            break
    return order[other]


def _apply(batch: list[Masked], text: TokenText, start: int, separator: int) -> Block:
    """The rows of some masked pairs, positions in ascending order."""
    rows = block_of_pairs(text.tokens, [pair for pair, _, _ in batch], start, separator)
    counts = np.array([len(positions) for _, positions, _ in batch])
    positions = np.fromiter(chain.from_iterable(positions for _, positions, _ in batch), np.int64)
    words = np.fromiter(chain.from_iterable(words for _, _, words in batch), np.int64)
    places = positions + np.repeat(rows.offsets[:-1], counts)
    ascending = np.argsort(places)
    positions, words, places = positions[ascending], words[ascending], places[ascending]
    labels = rows.tokens[places]
    tokens = rows.tokens.copy()
    tokens[places] = np.where(words == KEPT, labels, words)
    masks = Masks(counts, positions.astype(tokens.dtype), labels)
    return Block(tokens, rows.lengths, rows.segment_b, rows.is_random, masks)


def spool(blocks: Iterable[Block], folder: Path) -> Block:
    """Masked blocks concatenated to one, its tokens in files of `folder` instead of memory."""
    in_memory = []
    dtype = np.dtype(np.uint16)
    names = ("tokens", "positions", "labels")
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "xb")) for name in names]
        for block in blocks:
            assert block.masks is not None
            dtype = block.tokens.dtype
            for file, values in zip(files, (block.tokens, block.masks.positions, block.masks.labels), strict=True):
                file.write(values.data)
            in_memory.append((block.lengths, block.segment_b, block.is_random, block.masks.counts))
    lengths, segment_b, is_random, counts = map(np.concatenate, zip(*in_memory, strict=True))
    tokens, positions, labels = (np.memmap(folder / name, dtype, "r") for name in names)
    return Block(tokens, lengths, segment_b, is_random, Masks(counts, positions, labels))
