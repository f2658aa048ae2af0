"""Non-negative least squares for packing: which mixture of full rows uses up a histogram of lengths.

Every way to fill a row exactly is a column that says how many sequences of each length it takes; the mixture is the
non-negative vector that comes nearest to the histogram (NNLSHP of Krell and others, "Efficient Sequence Packing
without Cross-contamination", 2021). The solver is the active-set method of Lawson and Hanson (1974): a column has
three entries at the most here, so a step costs one solve in the few hundred columns in use.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bertrain.data.masking import Ints
from bertrain.errors import UserError

Floats = npt.NDArray[np.float64]

MAX_FILLINGS = 100_000  # 512 tokens in up to three sequences can be had in 22,102 ways, in up to four in 950,000
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
    wanted = weights * target
    tolerance = TOLERANCE * float(wanted.max())
    used: list[int] = []
    barred: list[int] = []
    dense, gram, amounts = np.zeros((len(target), 0)), np.zeros((0, 0)), np.zeros(0)
    residual = wanted
    while True:
        slope = (residual * weights)[columns].sum(axis=1)
        slope[used + barred] = 0
        entering = int(slope.argmax())
        if slope[entering] <= tolerance:
            solution = np.zeros(len(columns))
            solution[used] = amounts
            return solution
        column = weights * np.bincount(columns[entering], minlength=len(target))
        beside = dense.T @ column
        wider_gram = np.block([[gram, beside[:, None]], [beside, column @ column]])
        wider = np.column_stack([dense, column])
        settled = _settle(wider_gram, wider.T @ wanted, np.append(amounts, 0.0), tolerance)
        left_over = wanted - wider @ settled
        if left_over @ left_over >= residual @ residual:
            barred.append(entering)
            continue
        stays = settled > 0
        used = [number for number, is_used in zip([*used, entering], stays.tolist(), strict=True) if is_used]
        dense, gram, amounts = wider[:, stays], wider_gram[np.ix_(stays, stays)], settled[stays]
        residual = left_over
        barred.clear()


def _settle(gram: Floats, aim: Floats, amounts: Floats, tolerance: float) -> Floats:
    """The best amounts of the columns in use, moving from `amounts`; columns that fall to zero on the way leave."""
    stays = np.ones(len(aim), dtype=bool)
    while True:
        ideal = np.zeros(len(aim))
        try:
            ideal[stays] = np.linalg.solve(gram[np.ix_(stays, stays)], aim[stays])
        except np.linalg.LinAlgError:
            return amounts
        falling = np.flatnonzero(stays & (ideal <= tolerance))
        if not len(falling):
            return ideal
        fall = amounts[falling] - ideal[falling]
        shares = np.divide(amounts[falling], fall, out=np.zeros(len(falling)), where=fall > 0)
        amounts = amounts + float(shares.min()) * (ideal - amounts)
        stays &= amounts > tolerance
        stays[falling[shares.argmin()]] = False
        amounts = np.where(stays, amounts, 0.0)
