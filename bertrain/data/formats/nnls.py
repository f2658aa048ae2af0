"""Non-negative least squares for packing: which mixture of full rows uses up a histogram of lengths.

Every way to fill a row exactly is a column that says how many sequences of each length it takes; the mixture is the
non-negative vector that comes nearest to the histogram (NNLSHP of Krell and others, "Efficient Sequence Packing
without Cross-contamination", 2021). The solver is the active-set method of Lawson and Hanson (1974). Columns have a
few entries each, and the inverse of the normal equations of those in use follows them as they come and go, so that
a step costs the square of a few hundred columns. Sums are numpy's own, never a BLAS product, whose order of addition
depends on threads and processors: every rank must come to the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.data.formats.masking import Ints

Floats = npt.NDArray[np.float64]

MAX_FILLINGS = (
    100_000  # 512 tokens can be had in 22,102 ways from three sequences or fewer; from four, in almost a million
)
PADDING_LENGTH = 8  # sequences this short may be missing from their rows: they stand for padding
PADDING_WEIGHT = 0.1  # of their residuals, so that long rows need not go without a partner
TOLERANCE = 1e-9  # of the largest entry


def fill_rows(histogram: Ints, row_length: int, max_per_row: int) -> list[tuple[tuple[int, ...], int]]:
    """Full rows, as lengths and how many of them, whose sequences come near to the histogram.

    A row may ask for more short sequences than there are; the caller leaves such places empty.
    """
    usable = histogram > 0
    usable[: PADDING_LENGTH + 1] = True
    fillings = []
    for filling in exact_fillings(row_length, max_per_row, usable):
        fillings.append(filling)
        if len(fillings) > MAX_FILLINGS:
            raise UserError(
                f"nnlshp weighs every way to fill a row, and {max_per_row} sequences in {row_length} tokens have more "
                f"than {MAX_FILLINGS:,}; take --max-per-row 3 or fewer, or another --algorithm"
            )
    if not fillings:
        return []
    columns = np.zeros((len(fillings), max_per_row), dtype=np.int64)  # length 0 is in no row: it fills up the table
    for number, filling in enumerate(fillings):
        columns[number, : len(filling)] = filling
    weights = np.ones(len(histogram))
    weights[: PADDING_LENGTH + 1] = PADDING_WEIGHT
    weights[0] = 0
    amounts = solve(columns, weights, histogram.astype(np.float64))
    return [(fillings[number], int(amounts[number])) for number in np.flatnonzero(amounts >= 1).tolist()]


def exact_fillings(total: int, most: int, usable: npt.NDArray[np.bool_]) -> Iterator[tuple[int, ...]]:
    """Every descending tuple of up to `most` usable lengths whose sum is `total`."""
    return _fillings(total, total, most, usable)


def _fillings(total: int, longest: int, most: int, usable: npt.NDArray[np.bool_]) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    elif most > 0:
        shortest = -(-total // most)  # with a shorter one first, `most` of them could not reach the total
        for length in range(min(total, longest), shortest - 1, -1):
            if usable[length]:
                for rest in _fillings(total - length, length, most - 1, usable):
                    yield (length, *rest)


def solve(columns: Ints, weights: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimises |diag(weights) (A x - target)|, where column j of A counts the entries of columns[j].

    Columns enter one at a time, the steepest first; whichever would become negative leaves. One that brings nothing,
    since it depends on those in use, is barred until another has helped.
    """
    importance = weights**2

    def left_over(used: Ints, amounts: Floats) -> Floats:
        counted = np.repeat(amounts, columns.shape[1])
        return target - np.bincount(columns[used].ravel(), counted, minlength=len(target))

    def slopes(used: Ints | slice, residual: Floats) -> Floats:
        return (importance * residual)[columns[used]].sum(axis=1)

    def settle(used: Ints, amounts: Floats, inverse: Floats) -> tuple[Ints, Floats, Floats]:
        """The best amounts of the columns in use, moving from `amounts`; what falls to zero on the way leaves."""
        while True:
            ideal = _product(inverse, slopes(used, target))
            ideal += _product(inverse, slopes(used, left_over(used, ideal)))  # what rounding has done to the inverse
            falling = np.flatnonzero(ideal <= tolerance)
            if not len(falling):
                return used, ideal, inverse
            fall = amounts[falling] - ideal[falling]
            shares = np.divide(amounts[falling], fall, out=np.zeros(len(falling)), where=fall > 0)
            amounts = amounts + float(shares.min()) * (ideal - amounts)
            amounts[falling[shares.argmin()]] = 0
            for place in np.flatnonzero(amounts <= tolerance)[::-1].tolist():
                used, amounts, inverse = np.delete(used, place), np.delete(amounts, place), _without(inverse, place)

    used, barred = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    amounts, inverse = np.zeros(0), np.zeros((0, 0))
    residual, tolerance = target, TOLERANCE * float(target.max())
    while True:
        slope = slopes(slice(None), residual)
        slope[used] = slope[barred] = 0
        entering = int(slope.argmax())
        if slope[entering] <= tolerance:
            solution = np.zeros(len(columns))
            solution[used] = amounts
            return solution
        counts = np.bincount(columns[entering], minlength=len(target)).astype(np.float64)
        wider = _bordered(inverse, slopes(used, counts), float((importance * counts**2).sum()))
        if wider is not None:
            settled = settle(np.append(used, entering), np.append(amounts, 0.0), wider)
            remaining = left_over(*settled[:2])
            if (importance * remaining**2).sum() < (importance * residual**2).sum():
                used, amounts, inverse = settled
                residual, barred = remaining, barred[:0]
                continue
        barred = np.append(barred, entering)


def _product(matrix: Floats, vector: Floats) -> Floats:
    return (matrix * vector).sum(axis=1)


def _bordered(inverse: Floats, beside: Floats, corner: float) -> Floats | None:
    """The inverse of a symmetric matrix with a row and a column more; None where that is singular."""
    moved = _product(inverse, beside)
    rest = corner - float((beside * moved).sum())
    if rest <= TOLERANCE * corner:
        return None
    return np.block([[inverse + np.outer(moved, moved) / rest, -moved[:, None] / rest], [-moved / rest, 1 / rest]])


def _without(inverse: Floats, place: int) -> Floats:
    """The inverse of a symmetric matrix without one of its rows and columns."""
    others = np.delete(inverse[place], place)
    return np.delete(np.delete(inverse, place, 0), place, 1) - np.outer(others, others) / inverse[place, place]
