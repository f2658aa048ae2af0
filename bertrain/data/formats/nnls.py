"""Non-negative least squares for packing: the mixture of exactly filled rows that best matches a length histogram.

NNLSHP of Krell and others, "Efficient Sequence Packing without Cross-contamination", 2021. Each way to fill a row
exactly is a column that counts its sequences of each length; the solution says how many rows to make of each column.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.data.formats.masking import Ints

Floats = npt.NDArray[np.float64]

MAX_FILLINGS = 100_000  # 512 tokens have 22,102 fillings of up to three sequences, and almost a million of up to four
PADDING_LENGTH = 8  # rows may ask for more sequences this short than there are: the missing ones become padding
PADDING_WEIGHT = 0.1  # of the residuals of these lengths
TOLERANCE = 1e-9  # relative to the largest count
COLUMNS_PER_ROUND = 500


def fill_rows(histogram: Ints, row_length: int, max_per_row: int) -> list[tuple[tuple[int, ...], int]]:
    """Exactly filled rows, as lengths and the number of such rows, whose sequences come close to the histogram.

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


def solve(columns: Ints, weights: Floats, target: Floats) -> Floats:
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
