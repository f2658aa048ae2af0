"""Files of lines read as a stream, and metrics.jsonl by it: numbers of every step as columns, all else as records.

Some megabytes are parsed at a time, so a run of a million steps takes seconds and no more memory than its columns. A
line that cannot be read, torn by a crash or a full disk, is counted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

Floats = npt.NDArray[np.floating]

BLOCK = 8 << 20  # bytes that are parsed at a time
PARSED_APART = 1 << 20  # bytes of them that each thread parses
COUNTS = ("step", "samples", "tokens", "ended")  # to the last digit; all else is kept in single precision
REDUNDANT = ("not_finite", "tokens_per_s")  # what other columns say too


@dataclass
class RankSums:
    """What one rank on one host told of itself, added up."""

    lines: int = 0
    tokens: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Told:
    """What a metrics file tells."""

    columns: dict[str, Floats] = field(default_factory=dict)
    """Every number of a step, by its name (`seconds.data` for one of the phases); NaN where it was not finite."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations and the end, in order, without what was null in them."""
    ranks: dict[tuple[int, str], RankSums] = field(default_factory=dict)
    """By number and host."""
    num_unreadable: int = 0
    """Lines that could not be read; the last one of the file, which may be being written, does not count."""


def read_stream(path: Path) -> Told:
    """Everything in a metrics file; nothing, if there is none."""
    told, columns_of_blocks, counts = Told(), [], []
    for block in whole_lines(path):
        tables, num_unreadable = by_halves(block, _parse_json)
        told.num_unreadable += num_unreadable if block.endswith(b"\n") else 0
        for table in tables:
            kinds = _texts(table, "kind")
            told.num_unreadable += kinds.null_count
            _add_ranks(told.ranks, table.filter(pc.equal(kinds, "ranks")))
            others = table.filter(pc.invert(pc.is_in(kinds, pa.array(["step", "ranks", None]))))
            told.records += [_without_nulls(record) for record in others.to_pylist()]
            steps = table.filter(pc.equal(kinds, "step"))
            columns = dict(_numbers(steps))
            if "step" in columns:
                columns_of_blocks.append(columns)
                counts.append(len(steps))
            else:
                told.num_unreadable += len(steps)
    for name in list(dict.fromkeys(name for columns in columns_of_blocks for name in columns)):
        # A column is taken out of its blocks as it is put together, so that no two copies of all of them lie about.
        parts = [
            columns.pop(name) if name in columns else np.full(count, np.nan, _precision(name))
            for columns, count in zip(columns_of_blocks, counts, strict=True)
        ]
        told.columns[name] = np.concatenate(parts)
    return told


def whole_lines(path: Path) -> Iterator[bytes]:
    """The file in blocks of whole lines; a last line without an end comes by itself."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError:
        return
    with file:
        rest = b""
        while read := file.read(BLOCK):
            read = rest + read if rest else read
            cut = read.rfind(b"\n") + 1
            rest = read[cut:]
            if cut:
                yield read[:cut]
        if rest:
            yield rest


def by_halves(block: bytes, parse: Callable[[bytes], pa.Table]) -> tuple[list[pa.Table], int]:
    """The lines of a block as tables, in order, and how many of them `parse` cannot read.

    Where a block has such a line, its halves are parsed apart, and so on down to that line.
    """
    if not block or block.isspace():
        return [], 0
    try:
        if not block.isascii():  # we write nothing else, but a user may
            block.decode()
        return [parse(block)], 0
    except (pa.ArrowException, UnicodeDecodeError):
        middle = block.rfind(b"\n", 0, len(block) // 2) + 1 or block.find(b"\n") + 1
        if middle in (0, len(block)):
            return [], 1
        (first, unreadable), (second, more) = by_halves(block[:middle], parse), by_halves(block[middle:], parse)
        return first + second, unreadable + more


def _parse_json(block: bytes) -> pa.Table:
    if not block.lstrip().startswith(b"{"):  # the parser ends the process at a `null` that comes first
        raise pa.ArrowInvalid("no JSON object")
    options = pj.ReadOptions(block_size=max(PARSED_APART, _longest_line(block)))
    return pj.read_json(pa.BufferReader(block), read_options=options)


def _longest_line(block: bytes) -> int:
    """An upper bound of it: no line is longer than the parser's own portion, or the block is taken whole."""
    places = range(0, len(block), PARSED_APART)
    return 0 if all(block.find(b"\n", place, place + PARSED_APART) >= 0 for place in places) else 2 * len(block)


def _texts(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of text; nulls where it is something else or not there."""
    if name in table.column_names and pa.types.is_string(table[name].type):
        return table[name]
    return pa.chunked_array([pa.nulls(len(table), pa.string())])


def _numbers(steps: pa.Table) -> Iterator[tuple[str, Floats]]:
    """The columns that are numbers or true and false, those inside `seconds` by name."""
    for name, column in zip(steps.column_names, steps.columns, strict=True):
        if pa.types.is_struct(column.type):
            for part in column.type:
                inner = f"{name}.{part.name}"
                yield inner, _floats(inner, pc.struct_field(column, part.name))
        elif name not in REDUNDANT and _is_number(column.type) and column.null_count < len(column):
            yield name, _floats(name, column)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _floats(name: str, column: pa.ChunkedArray) -> Floats:
    return pc.cast(column, pa.float64()).to_numpy().astype(_precision(name))


def _precision(name: str) -> type[np.floating]:
    return np.float64 if name in COUNTS else np.float32


def _add_ranks(sums: dict[tuple[int, str], RankSums], lines: pa.Table) -> None:
    """Add what these lines tell of each rank."""
    if not len(lines):
        return
    entries = pc.list_flatten(lines["ranks"])
    seconds = pc.struct_field(entries, "seconds")
    phases = [part.name for part in seconds.type]
    each = {name: pc.struct_field(entries, name) for name in ("rank", "host", "tokens")}
    each |= {f"seconds.{phase}": pc.struct_field(seconds, phase) for phase in phases}
    summed = [(name, "sum") for name in ("tokens", *(f"seconds.{phase}" for phase in phases))]
    grouped = pa.table(each).group_by(["rank", "host"]).aggregate([("tokens", "count"), *summed])
    for row in grouped.to_pylist():
        entry = sums.setdefault((row["rank"], row["host"]), RankSums())
        entry.lines += row["tokens_count"]
        entry.tokens += row["tokens_sum"]
        for phase in phases:
            entry.seconds[phase] = entry.seconds.get(phase, 0.0) + row[f"seconds.{phase}_sum"]


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}
