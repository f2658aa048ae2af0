"""Packing: sequences of many lengths into rows of one length, decided from the histogram of lengths alone.

A **strategy** is the content of a row as a tuple of lengths, with the number of rows that have it. The packers know
lengths and counts only, so 157 million sequences take them as long as a thousand:

    lpfhp    longest pack first: each sequence, longest first, into the fullest row that still holds it
    spfhp    shortest pack first: into the emptiest
    nnlshp   a mixture of exactly filled rows by non-negative least squares (nnls.py), what it leaves by lpfhp

Sequences get their places by a counting sort: beside the lengths, a packing keeps one number of four bytes for each
sequence, as much as the lengths themselves, and works rows out when they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.seeds import derive, permute
from bertrain.config.choices import MAX_PER_ROW, PACKING, Algorithm
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.nnls import fill_rows

NNLSHP_PER_ROW = 3  # its work grows with the ways to fill a row
CHUNK = 1 << 20  # sequences handled at once
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Strategy:
    """`rows` rows that each hold sequences of these lengths, longest first."""

    lengths: tuple[int, ...]
    rows: int


# --- histograms to strategies -------------------------------------------------------------------------


def pack_histogram(
    histogram: Ints, *, row_length: int, algorithm: Algorithm = PACKING, max_per_row: int = MAX_PER_ROW
) -> list[Strategy]:
    """Pack histogram[n] sequences of each length n into rows of `row_length`, `max_per_row` to a row at the most.

    With `max_per_row` 0, lpfhp and spfhp put as many to a row as it holds, and nnlshp three.
    """
    if max_per_row < 0:
        raise UserError(f"--max-per-row is {max_per_row}; it must be at least 1, or 0 for the algorithm's own")
    present = np.flatnonzero(histogram)
    if not len(present):
        raise UserError("there is no sequence to pack")
    if present[0] == 0:
        raise UserError(f"{histogram[0]} sequences have no token; leave them out")
    if present[-1] > row_length:
        raise UserError(f"a sequence of {present[-1]} tokens does not fit into a row of {row_length}")
    counts = np.zeros(row_length + 1, dtype=np.int64)
    counts[: present[-1] + 1] = histogram[: present[-1] + 1]
    if algorithm == "nnlshp":
        max_per_row = max_per_row or NNLSHP_PER_ROW
        begun = _fill(fill_rows(counts, row_length, max_per_row), counts)
    else:
        max_per_row = max_per_row or row_length
        begun = []
    packed = Counter[tuple[int, ...]]()
    for lengths, rows in _place(counts, begun, row_length, max_per_row, into_fullest=algorithm != "spfhp"):
        packed[lengths] += rows
    return [Strategy(lengths, rows) for lengths, rows in sorted(packed.items(), reverse=True)]


def count_rows(strategies: Iterable[Strategy]) -> int:
    return sum(strategy.rows for strategy in strategies)


def efficiency(strategies: Iterable[Strategy], row_length: int) -> float:
    """The share of all places in the rows that sequences take."""
    tokens = rows = 0
    for strategy in strategies:
        tokens += strategy.rows * sum(strategy.lengths)
        rows += strategy.rows
    return tokens / (rows * row_length)


def _fill(fillings: list[tuple[tuple[int, ...], int]], counts: Ints) -> list[tuple[tuple[int, ...], int]]:
    """Rows of these fillings as far as `counts` goes, which is used up; where a length runs out, its place is empty."""
    filled = []
    for lengths, rows in fillings:
        begun: list[tuple[tuple[int, ...], int]] = [((), rows)]
        for length in lengths:
            parted = []
            for content, number in begun:
                given = min(number, int(counts[length]))
                counts[length] -= given
                parted += [((*content, length), given), (content, number - given)]
            begun = [(content, number) for content, number in parted if number]
        filled += [(content, number) for content, number in begun if content]
    return filled


def _place(
    counts: Ints,
    begun: list[tuple[tuple[int, ...], int]],
    row_length: int,
    max_per_row: int,
    *,
    into_fullest: bool,
) -> list[tuple[tuple[int, ...], int]]:
    """Sequences, longest first, into the fullest or the emptiest row that holds them, or into a new one.

    The rows are those that placing one sequence after another would give; equal rows are handled together. Of rows
    with the same space left, the one with the most sequences comes first.
    """
    spaces: dict[int, dict[int, list[tuple[tuple[int, ...], int]]]] = {}  # by space left, then by number of sequences
    has_space = 0  # bit n: there are rows with n tokens of space
    closed = []

    def put(content: tuple[int, ...], number: int) -> None:
        nonlocal has_space
        space = row_length - sum(content)
        if space == 0 or len(content) == max_per_row:
            closed.append((content, number))
        else:
            spaces.setdefault(space, {}).setdefault(len(content), []).append((content, number))
            has_space |= 1 << space

    def take(space: int) -> tuple[tuple[int, ...], int]:
        nonlocal has_space
        by_size = spaces[space]
        fullest = max(by_size)
        taken = by_size[fullest].pop()
        if not by_size[fullest]:
            del by_size[fullest]
        if not by_size:
            del spaces[space]
            has_space ^= 1 << space
        return taken

    for content, number in begun:
        put(content, number)
    for length in range(row_length, 0, -1):
        left = int(counts[length])
        while left:
            fitting = has_space >> length
            if not fitting:
                content, number, space = (), left, row_length
            else:
                space = length + ((fitting & -fitting).bit_length() if into_fullest else fitting.bit_length()) - 1
                content, number = take(space)
            # The row just filled is the fullest, and a new row the emptiest, so it gets the next sequence too.
            stays_first = into_fullest or not fitting
            copies = min(space // length, max_per_row - len(content)) if stays_first else 1
            copies = min(copies, left)
            filled = min(number, left // copies)
            put(content + (length,) * copies, filled)
            if content and filled < number:
                put(content, number - filled)
            left -= filled * copies
    for by_size in spaces.values():
        for rows in by_size.values():
            closed += rows
    return closed


# --- strategies to rows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """Which sequences lie in which row, worked out for any stretch of rows."""

    order: npt.NDArray[Any]
    """The sequences by length, and by chance within a length: four bytes for each."""
    row_starts: Ints
    """The rows that each strategy begins with, before they are shuffled, and the number of all rows."""
    slots: Ints
    """[strategies, most sequences in a row]: where in `order` the sequences for this place begin; -1: no sequence."""
    key: int

    def __len__(self) -> int:
        return int(self.row_starts[-1])

    def rows(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """Sequences of the rows first .. stop - 1, and offsets: row r holds indices[offsets[r] : offsets[r + 1]]."""
        numbers = permute(np.arange(first, stop), len(self), self.key)
        strategies = np.searchsorted(self.row_starts, numbers, side="right") - 1
        slots = self.slots[strategies]
        is_taken = slots >= 0
        places = slots + (numbers - self.row_starts[strategies])[:, None]
        offsets = np.concatenate([[0], np.cumsum(is_taken.sum(axis=1))])
        return self.order[places[is_taken]].astype(np.int64), offsets


def plan_packing(
    lengths: npt.NDArray[np.integer],
    *,
    row_length: int,
    algorithm: Algorithm = PACKING,
    max_per_row: int = MAX_PER_ROW,
    seed: int = 1,
) -> Packing:
    """Pack sequences of these lengths; `seed` decides which sequence of a length goes where, and the order of rows."""
    histogram = count_lengths(lengths)
    strategies = pack_histogram(histogram, row_length=row_length, algorithm=algorithm, max_per_row=max_per_row)
    taken = np.cumsum(histogram) - histogram  # where each length's sequences begin in the order
    slots = np.full((len(strategies), max(len(strategy.lengths) for strategy in strategies)), -1, dtype=np.int64)
    for number, strategy in enumerate(strategies):
        for place, length in enumerate(strategy.lengths):
            slots[number, place] = taken[length]
            taken[length] += strategy.rows
    row_starts = np.concatenate([[0], np.cumsum([strategy.rows for strategy in strategies])])
    order = sort_by_length(lengths, histogram, derive(seed, "sequences"))
    return Packing(order, row_starts, slots, derive(seed, "rows"))


def pack_lengths(
    lengths: npt.NDArray[np.integer],
    *,
    row_length: int,
    algorithm: Algorithm = PACKING,
    max_per_row: int = MAX_PER_ROW,
    seed: int = 1,
) -> tuple[Ints, Ints]:
    """All rows of a packing at once: row r holds the sequences indices[offsets[r] : offsets[r + 1]]."""
    packing = plan_packing(lengths, row_length=row_length, algorithm=algorithm, max_per_row=max_per_row, seed=seed)
    indices, offsets = np.empty(len(lengths), dtype=np.int64), np.zeros(len(packing) + 1, dtype=np.int64)
    for first in range(0, len(packing), ROWS_AT_ONCE):
        stop = min(first + ROWS_AT_ONCE, len(packing))
        members, ends = packing.rows(first, stop)
        begin = offsets[first]
        indices[begin : begin + len(members)] = members
        offsets[first + 1 : stop + 1] = begin + ends[1:]
    return indices, offsets


def count_lengths(lengths: npt.NDArray[np.integer]) -> Ints:
    """How many sequences have each length, from 0 to the longest; a part at a time, in little memory."""
    histogram = np.zeros(int(lengths.max(initial=0)) + 1, dtype=np.int64)
    for first in range(0, len(lengths), CHUNK):
        histogram += np.bincount(lengths[first : first + CHUNK], minlength=len(histogram))
    return histogram


def sort_by_length(lengths: npt.NDArray[np.integer], histogram: Ints, key: int) -> npt.NDArray[Any]:
    """The numbers of the sequences, shortest first, and in an order drawn by `key` within a length."""
    order = np.empty(len(lengths), dtype=np.uint32 if len(lengths) < 1 << 32 else np.int64)
    next_place = np.cumsum(histogram) - histogram
    for first in range(0, len(lengths), CHUNK):
        members = permute(np.arange(first, min(first + CHUNK, len(lengths))), len(lengths), key)
        here = lengths[members]
        members = members[np.argsort(here, kind="stable")]
        counts = np.bincount(here, minlength=len(histogram))
        begins = np.repeat(next_place - (np.cumsum(counts) - counts), counts)
        order[begins + np.arange(len(members))] = members
        next_place += counts
    return order
