"""`bertrain data pack`: packs the sequences of a data folder, or of a table of lengths, into rows."""

from __future__ import annotations

import csv
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import reading
from bertrain.config.choices import PACKING, Algorithm
from bertrain.data.formats.convert import Conversion, convert
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.packing import count_lengths, efficiency, pack_histogram
from bertrain.data.formats.source import open_data

COLUMNS = ["length", "sequences"]
LONGEST = 1_000_000  # tokens


@dataclass(frozen=True)
class PackStats:
    algorithm: str
    row_length: int
    sequences: int
    tokens: int
    rows: int
    efficiency: float  # share of all row positions that are tokens of sequences
    unpacked: float  # the same with one sequence per row
    strategies: int  # number of different rows, by the lengths in them
    most_per_row: int  # maximum sequences in a row
    seconds: float
    written: Conversion | None = None  # the data written, if any


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

    Without `row_length`, rows have the length of the longest sequence. With `max_per_row` 0, lpfhp and spfhp have no
    limit on sequences per row, and nnlshp has 3. With `out`, the packs of a folder are written in the layout
    hdf5-packed; `seed` shuffles sequences of equal length and packs, and draws masks where the folder has none.
    """
    if (folder is None) == (lengths is None):
        raise UserError("one-input-expected", "give either a data folder or --lengths FILE.csv")
    if lengths is not None and out is not None:
        raise UserError(
            "one-input-expected", "--out needs a data folder to pack; --lengths alone has no examples to write"
        )
    if shards and out is None:
        raise UserError("option-without-effect", "--shards needs --out; give both, or leave --shards out")
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
        rows=sum(strategy.rows for strategy in strategies),
        efficiency=efficiency(strategies, row_length),
        unpacked=tokens / (sequences * row_length),
        strategies=len(strategies),
        most_per_row=max(len(strategy.lengths) for strategy in strategies),
        seconds=seconds,
        written=written,
    )


def read_lengths(path: Path) -> Ints:
    """The histogram of a CSV file with the columns length and sequences: histogram[n] sequences have n tokens."""
    counts: dict[int, int] = {}
    try:
        with reading(path), open(path, encoding="utf-8", newline="") as file:
            table = csv.reader(file)
            if next(table, []) != COLUMNS:
                raise UserError("bad-length-table", f"{path} must begin with the line {','.join(COLUMNS)}")
            for row in table:
                if problem := _add_row(row, counts):
                    raise UserError("bad-length-table", f"{path}, line {table.line_num}: {problem}")
    except (UnicodeDecodeError, csv.Error):
        raise UserError("bad-length-table", f"{path} is not a CSV file of UTF-8 text") from None
    if not any(counts.values()):
        raise UserError("empty-data", f"{path} counts no sequence; there is nothing to pack")
    histogram = np.zeros(max(counts) + 1, dtype=np.int64)
    histogram[list(counts)] = list(counts.values())
    return histogram


def _add_row(row: list[str], counts: dict[int, int]) -> str:
    """Add a row to the counts; returns what is wrong with it, or nothing."""
    if len(row) != 2 or not all(cell.isascii() and cell.isdigit() and len(cell) <= 15 for cell in row):
        return f"{','.join(row)!r} is not LENGTH,SEQUENCES, such as 128,1000"
    length, count = map(int, row)
    if not 1 <= length <= LONGEST:
        return f"a length of {length} is not between 1 and {LONGEST:,}"
    if length in counts:
        return f"length {length} is repeated"
    counts[length] = count
    return ""
