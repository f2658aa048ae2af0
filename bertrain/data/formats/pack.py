"""`bertrain data pack`: how well the sequences of a folder, or of a table of lengths, pack into rows; and the packs."""

from __future__ import annotations

import csv
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertrain.base.errors import UserError
from bertrain.config.choices import PACKING, Algorithm
from bertrain.data.formats.convert import Conversion, convert
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.packing import count_lengths, count_rows, efficiency, pack_histogram
from bertrain.data.formats.source import open_data

COLUMNS = ["length", "sequences"]
LONGEST = 1_000_000  # tokens; more is a mistake in the table


@dataclass(frozen=True)
class PackStats:
    """What a packing comes to."""

    algorithm: str
    row_length: int
    sequences: int
    tokens: int
    rows: int
    efficiency: float
    """Share of the places in all rows that sequences take."""
    unpacked: float
    """The same with one sequence to a row."""
    strategies: int
    """Different rows, by the lengths in them."""
    most_per_row: int
    """Most sequences in a row."""
    seconds: float
    written: Conversion | None = None
    """The packs, where they were written."""


def pack(
    folder: str | Path | None = None,
    out: str | Path | None = None,
    *,
    lengths: str | Path | None = None,
    algorithm: Algorithm = PACKING,
    max_per_row: int = 0,
    row_length: int = 0,
    shards: int = 0,
    seed: int = 12345,
    vocab: str | Path | None = None,
) -> PackStats:
    """Pack the sequences of a data folder, or of a CSV file with the columns length and sequences.

    A row is as long as the longest sequence unless `row_length` says otherwise. With `max_per_row` 0, lpfhp and spfhp
    put as many sequences to a row as it holds, and nnlshp three. The packs of a folder are written to `out`, if given,
    in the layout hdf5-packed; `seed` decides which sequence of a length goes where, the order of the packs, and masks
    where the folder has none.
    """
    if (folder is None) == (lengths is None):
        raise UserError("give a data folder or --lengths FILE.csv, one of the two")
    if lengths is not None and out is not None:
        raise UserError("--out needs a data folder to write the packs of; --lengths only counts them")
    if lengths is not None:
        histogram = read_lengths(Path(lengths))
    else:
        assert folder is not None
        histogram = count_lengths(open_data(folder, vocab=vocab, verify="size").lengths)
    tokens, sequences = int(histogram @ np.arange(len(histogram))), int(histogram.sum())
    row_length = row_length or int(np.flatnonzero(histogram)[-1])
    begin = time.perf_counter()
    strategies = pack_histogram(histogram, row_length=row_length, algorithm=algorithm, max_per_row=max_per_row)
    seconds = time.perf_counter() - begin
    written = None
    if folder is not None and out is not None:
        written = convert(
            folder,
            out,
            to="hdf5-packed",
            shards=shards,
            seed=seed,
            max_seq_length=row_length,
            packing=algorithm,
            max_per_row=max_per_row,
            vocab=vocab,
        )
    return PackStats(
        algorithm=algorithm,
        row_length=row_length,
        sequences=sequences,
        tokens=tokens,
        rows=count_rows(strategies),
        efficiency=efficiency(strategies, row_length),
        unpacked=tokens / (sequences * row_length),
        strategies=len(strategies),
        most_per_row=max(len(strategy.lengths) for strategy in strategies),
        seconds=seconds,
        written=written,
    )


def read_lengths(path: Path) -> Ints:
    """The histogram in a CSV file whose columns are length and sequences: histogram[n] sequences have n tokens."""
    counts: dict[int, int] = {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = csv.reader(file)
            if next(table, []) != COLUMNS:
                raise UserError(f"{path} is not a table of lengths: its first line must be {','.join(COLUMNS)}")
            for row in table:
                length, count = _read_row(row, f"{path}, line {table.line_num}")
                if length in counts:
                    raise UserError(f"{path}, line {table.line_num}: length {length} stands there twice")
                counts[length] = count
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"{path} is not a CSV file of UTF-8 text") from None
    if not any(counts.values()):
        raise UserError(f"{path} counts no sequence; there is nothing to pack")
    histogram = np.zeros(max(counts) + 1, dtype=np.int64)
    histogram[list(counts)] = list(counts.values())
    return histogram


def _read_row(row: list[str], where: str) -> tuple[int, int]:
    if len(row) == 2 and all(cell.isascii() and cell.isdigit() and len(cell) <= 15 for cell in row):
        length, count = map(int, row)
        if 1 <= length <= LONGEST:
            return length, count
        raise UserError(f"{where}: a length of {length} is not between 1 and {LONGEST:,}")
    raise UserError(f"{where}: {','.join(row)!r} is not a length and a number of sequences, such as 128,1000")
