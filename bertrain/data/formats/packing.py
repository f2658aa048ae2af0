"""Packing: sequences of many lengths into rows of one length, decided from the histogram of lengths alone.

A **strategy** is the content of a row as a tuple of lengths, with the number of rows that have it. The packers see
lengths and counts only, so their time hardly depends on the number of sequences:

    lpfhp    longest pack first: each sequence, longest first, into the fullest row that still holds it
    spfhp    shortest pack first: into the emptiest
    nnlshp   a mixture of exactly filled rows by non-negative least squares, the rest by lpfhp

A counting sort assigns sequences to rows: a packing stores four bytes for each sequence and computes rows on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.base.seeds import derive, permute
from bertrain.config.choices import MAX_PER_ROW, PACKING, Algorithm
from bertrain.data.formats.masking import Ints

NNLSHP_PER_ROW = 3  # its work grows with the number of ways to fill a row
CHUNK = 1 << 20  # sequences processed together
MAX_FILLINGS = 100_000  # 512 tokens have 22,102 fillings of up to three sequences, and almost a million of up to four
PADDING_LENGTH = 8  # rows may ask for more sequences this short than there are: the missing ones become padding
PADDING_WEIGHT = 0.1  # of the residuals of these lengths
TOLERANCE = 1e-9  # relative to the largest count
COLUMNS_PER_ROUND = 500


@dataclass(frozen=True)
class Strategy:
    """`rows` rows of sequences of these lengths, longest first."""

    lengths: tuple[int, ...]
    rows: int


def pack_histogram(
    histogram: Ints, *, row_length: int, algorithm: Algorithm = PACKING, max_per_row: int = MAX_PER_ROW
) -> list[Strategy]:
    """Pack histogram[n] sequences of each length n into rows of `row_length` with at most `max_per_row` sequences.

    With `max_per_row` 0, lpfhp and spfhp have no limit, and nnlshp has 3.
    """
    if max_per_row < 0:
        raise UserError("option-out-of-range", f"--max-per-row is {max_per_row}; it must not be negative")
    present = np.flatnonzero(histogram)
    if not len(present):
        raise UserError("empty-data", "there is no sequence to pack")
    if present[0] == 0:
        raise UserError("empty-sequence", f"{histogram[0]} sequences have no token; leave them out")
    if present[-1] > row_length:
        raise UserError(
            "example-too-long", f"a sequence of {present[-1]} tokens does not fit into a row of {row_length}"
        )
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


def efficiency(strategies: Sequence[Strategy], row_length: int) -> float:
    tokens = sum(strategy.rows * sum(strategy.lengths) for strategy in strategies)
    return tokens / (sum(strategy.rows for strategy in strategies) * row_length)


def fill_rows(histogram: Ints, row_length: int, max_per_row: int) -> list[tuple[tuple[int, ...], int]]:
    """Exactly filled rows, as lengths and the number of such rows, whose sequences come close to the histogram.

    NNLSHP of Krell and others, "Efficient Sequence Packing without Cross-contamination", 2021. Each way to fill a row
    exactly is a column that counts its sequences of each length; the solution says how many rows to make of each.

    Rows may ask for more short sequences than there are; the caller leaves those places empty.
    """
    usable = histogram > 0
    usable[: PADDING_LENGTH + 1] = True
    fillings = list(islice(exact_fillings(row_length, max_per_row, usable), MAX_FILLINGS + 1))
    if len(fillings) > MAX_FILLINGS:
        ways = f"{max_per_row} sequences fill {row_length} tokens in more than {MAX_FILLINGS:,} ways"
        raise UserError("too-many-fillings", f"{ways}; use --max-per-row 3 or fewer, or another --algorithm")
    if not fillings:
        return []
    columns = np.zeros((len(fillings), max_per_row), dtype=np.int64)  # padded with length 0, which has no weight
    for number, filling in enumerate(fillings):
        columns[number, : len(filling)] = filling
    weights = np.ones(len(histogram))
    weights[: PADDING_LENGTH + 1] = PADDING_WEIGHT
    weights[0] = 0
    amounts = solve(columns, weights, histogram.astype(np.float64))
    return [(fillings[number], int(amounts[number])) for number in np.flatnonzero(amounts >= 1).tolist()]


def exact_fillings(total: int, most: int, usable: npt.NDArray[np.bool_]) -> Iterator[tuple[int, ...]]:
    """Every descending tuple of up to `most` usable lengths whose sum is `total`."""

    def fill(space: int, longest: int, places: int) -> Iterator[tuple[int, ...]]:
        if space == 0:
            yield ()
        elif places > 0:
            shortest = -(-space // places)  # shorter ones cannot reach the sum
            for length in range(min(space, longest), shortest - 1, -1):
                if usable[length]:
                    for rest in fill(space - length, length, places - 1):
                        yield (length, *rest)

    return fill(total, total, most)


def solve(columns: Ints, weights: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The x >= 0 that minimizes |diag(weights) (A x - target)|, where column j of A counts the entries of columns[j].

    Column generation: scipy solves for a few hundred columns, then those with the steepest descent join them, until no
    column would help. All columns at once would take scipy several times as long, and gigabytes in older versions.
    """
    nnls = import_extra("scipy.optimize").nnls
    solution, used = np.zeros(len(columns)), np.zeros(0, dtype=np.int64)
    residual, tolerance = weights * target, TOLERANCE * float(target.max())
    while True:
        slope = (weights * residual)[columns].sum(axis=1)
        slope[used] = 0
        steepest = np.argsort(-slope, kind="stable")[:COLUMNS_PER_ROUND]
        tried = np.concatenate([used, steepest[slope[steepest] > tolerance]])
        if len(tried) == len(used):
            return solution
        matrix = np.zeros((len(target), len(tried)))
        np.add.at(matrix, (columns[tried].T, np.arange(len(tried))), 1)
        matrix *= weights[:, None]
        amounts, _ = nnls(matrix, weights * target, maxiter=100 * len(tried))
        remaining = weights * target - matrix @ amounts
        if remaining @ remaining >= residual @ residual:  # only rounding errors are left
            return solution
        residual, used = remaining, tried[amounts > 0]
        solution = np.zeros(len(columns))
        solution[tried] = amounts


def _fill(fillings: list[tuple[tuple[int, ...], int]], counts: Ints) -> list[tuple[tuple[int, ...], int]]:
    """Rows of these fillings, taken from `counts`; where a length runs out, its place stays empty."""
    filled = []
    for lengths, rows in fillings:
        partial: list[tuple[tuple[int, ...], int]] = [((), rows)]
        for length in lengths:
            extended = []
            for content, number in partial:
                available = min(number, int(counts[length]))
                counts[length] -= available
                extended += [((*content, length), available), (content, number - available)]
            partial = [(content, number) for content, number in extended if number]
        filled += [(content, number) for content, number in partial if content]
    return filled


def _place(
    counts: Ints, begun: list[tuple[tuple[int, ...], int]], row_length: int, max_per_row: int, *, into_fullest: bool
) -> list[tuple[tuple[int, ...], int]]:
    """Place sequences, longest first, into the fullest or the emptiest row that holds them, or into a new one.

    The result is that of placing one sequence after another; equal rows are processed together. Of rows with the same
    space left, the one with the most sequences comes first.
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


@dataclass(frozen=True)
class Packing:
    """The assignment of sequences to rows, computed for any range of rows."""

    order: npt.NDArray[Any]  # the sequences sorted by length, in random order within a length
    row_starts: Ints  # the first row of each strategy before rows are shuffled, and the number of all rows
    slots: Ints  # [strategies, maximum per row]: where in `order` the sequences of this place begin; -1: no sequence
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
    """Pack sequences of these lengths; `seed` shuffles the sequences of each length and the rows."""
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


def count_lengths(lengths: npt.NDArray[np.integer]) -> Ints:
    """The number of sequences of each length, from 0 to the longest; computed in chunks, to save memory."""
    histogram = np.zeros(int(lengths.max(initial=0)) + 1, dtype=np.int64)
    for first in range(0, len(lengths), CHUNK):
        histogram += np.bincount(lengths[first : first + CHUNK], minlength=len(histogram))
    return histogram


def sort_by_length(lengths: npt.NDArray[np.integer], histogram: Ints, key: int) -> npt.NDArray[Any]:
    """The indices of the sequences, shortest first, in random order by `key` within a length."""
    order = np.empty(len(lengths), dtype=np.uint32 if len(lengths) < 1 << 32 else np.int64)
    next_place = np.cumsum(histogram) - histogram
    for first in range(0, len(lengths), CHUNK):
        members = permute(np.arange(first, min(first + CHUNK, len(lengths))), len(lengths), key)
        chunk = lengths[members]
        members = members[np.argsort(chunk, kind="stable")]
        counts = np.bincount(chunk, minlength=len(histogram))
        begins = np.repeat(next_place - (np.cumsum(counts) - counts), counts)
        order[begins + np.arange(len(members))] = members
        next_place += counts
    return order
