"""Pairs to rows of tokens with special tokens; and rows in files, where they exceed memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bertrain.data.formats.block import EXAMPLES_AT_ONCE, Block, Masks, Values, flat_ranges, offsets_of
from bertrain.data.formats.masking import Ints
from bertrain.data.prepare.examples import Pair


def block_of_pairs(tokens: Values, pairs: Sequence[Pair], start: int, separator: int) -> Block:
    """[CLS] A [SEP] B [SEP] of each pair, or [CLS] A [SEP] where there is no B."""
    table = np.array(pairs, dtype=np.int64).reshape(-1, 5)
    a_start, b_start = table[:, 0], table[:, 2]
    a_length, b_length = table[:, 1] - a_start, table[:, 3] - b_start
    lengths = a_length + 2 + np.where(b_length > 0, b_length + 1, 0)
    offsets = offsets_of(lengths)
    out = np.full(offsets[-1], separator, dtype=tokens.dtype)
    out[offsets[:-1]] = start
    for first in range(0, len(table), EXAMPLES_AT_ONCE):
        some = slice(first, first + EXAMPLES_AT_ONCE)
        begin = offsets[:-1][some]
        out[flat_ranges(begin + 1, a_length[some])] = tokens[flat_ranges(a_start[some], a_length[some])]
        after_a = begin + a_length[some] + 2
        out[flat_ranges(after_a, b_length[some])] = tokens[flat_ranges(b_start[some], b_length[some])]
    return Block(out, lengths, a_length + 2, table[:, 4].astype(np.bool_))


def spool(blocks: Iterable[Block], folder: Path) -> Block:
    """Masked blocks concatenated to one, its tokens in files of `folder` instead of memory."""
    lengths: list[Ints] = []
    counts: list[Ints] = []
    segment_b: list[Values] = []
    is_random: list[Values] = []
    dtype = np.dtype(np.uint16)
    with ExitStack() as open_files:
        names = ("tokens", "positions", "labels")
        tokens, positions, labels = (open_files.enter_context(open(folder / name, "xb")) for name in names)
        for block in blocks:
            assert block.masks is not None
            dtype = block.tokens.dtype
            tokens.write(block.tokens.data)
            positions.write(block.masks.positions.data)
            labels.write(block.masks.labels.data)
            lengths.append(block.lengths)
            counts.append(block.masks.counts)
            segment_b.append(block.segment_b)
            is_random.append(block.is_random)
    masks = Masks(
        np.concatenate(counts), np.memmap(folder / "positions", dtype, "r"), np.memmap(folder / "labels", dtype, "r")
    )
    return Block(
        np.memmap(folder / "tokens", dtype, "r"),
        np.concatenate(lengths),
        np.concatenate(segment_b),
        np.concatenate(is_random),
        masks,
    )
