"""Reads metrics.jsonl of a long run: every number of a step as a column, other records as they are.

A file is parsed a block at a time, so a million steps take seconds and little more memory than their columns. Lines
that cannot be parsed, torn by a crash or a full disk, or that hold values no run writes, are counted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from bertrain.base.console import PHASES
from bertrain.base.schema import MAX_COUNT, MAX_DEPTH, MAX_NUMBER, JsonError, parse_json
from bertrain.run.records import KINDS, EndRecord, EvaluationRecord, RanksRecord, StepRecord, from_dict

Floats = npt.NDArray[np.floating]

BLOCK = 2 << 20  # bytes parsed at a time
OPENING, CLOSING = (np.frombuffer(marks, np.uint8) for marks in (b"[{", b"]}"))
MAX_PARSED = 200  # parts of a block without the lines that are bad by themselves
DOUBLE_PRECISION = ("step", "samples", "tokens", "ended", "loop_seconds")  # other columns are kept in single precision


@dataclass
class RankSums:
    """Sums over the records of one rank on one host."""

    records: int = 0
    tokens: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class MetricsTable:
    """The contents of a metrics file."""

    columns: dict[str, Floats] = field(default_factory=dict)
    """Every number of a step by its key (`seconds.data` for one of the phases); NaN where it is null or absent."""
    evaluations: list[EvaluationRecord] = field(default_factory=list)  # in order; metrics that are null are left out
    end: EndRecord | None = None
    ranks: dict[tuple[int, str], RankSums] = field(default_factory=dict)  # by rank and host
    num_unreadable: int = 0  # lines that could not be parsed, apart from an unfinished last line

    @property
    def num_steps(self) -> int:
        return len(self.columns.get("step", ()))

    def column(self, name: str) -> Floats:
        """One number of every step; NaN where it is not finite or absent."""
        found = self.columns.get(name)
        return found if found is not None else np.full(self.num_steps, np.nan)


def read_metrics(path: Path) -> MetricsTable:
    """Read a metrics file; an empty table if there is none."""
    result, numbers = MetricsTable(), [pa.table({})]
    for block in whole_lines(path):
        tables, num_unreadable = parse_by_halves(block, _parse_json, _is_record)
        result.num_unreadable += num_unreadable if block.endswith(b"\n") else 0
        for table in tables:
            kinds = table["kind"]
            _add_ranks(result.ranks, _rank_entries(table.filter(pc.equal(kinds, RanksRecord.kind))))
            _add_others(result, table.filter(pc.is_in(kinds, pa.array([EvaluationRecord.kind, EndRecord.kind]))))
            numbers.append(_numbers(table.filter(pc.equal(kinds, StepRecord.kind))))
    joined = pa.concat_tables(numbers, promote_options="default")  # a column that a block lacks is null there
    result.columns = {name: joined[name].to_numpy() for name in joined.column_names}
    return result


def whole_lines(path: Path) -> Iterator[bytes]:
    """The file in blocks of whole lines, none if there is no file; an unfinished last line is a block of its own."""
    if path.is_file():
        with open(path, "rb") as file:
            while lines := file.readlines(BLOCK):
                rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
                yield from filter(None, (b"".join(lines), rest))


def parse_by_halves(
    block: bytes, parse: Callable[[bytes], pa.Table], is_good: Callable[[bytes], bool]
) -> tuple[list[pa.Table], int]:
    """The lines of a block as tables, in order, and the number of lines that were refused.

    `parse` takes about a millisecond for any block, so from a refused block the lines that are not `is_good` by
    themselves are removed first. If the rest is refused too, it is bisected until the bad lines are found. If these are
    many, the remaining lines count as bad: a damaged file must not take minutes.
    """
    tables: list[pa.Table] = []
    num_unreadable, num_parsed, parts = 0, 0, [block]
    while parts:
        part = parts.pop()
        if not part or part.isspace():
            continue
        num_parsed += 1
        try:
            if not part.isascii():
                part.decode()
            tables.append(parse(part))
        except (pa.ArrowException, UnicodeDecodeError):
            if num_parsed == 1:
                lines = [line for line in part.split(b"\n") if line and not line.isspace()]
                good = list(filter(is_good, lines))
                num_unreadable += len(lines) - len(good)
                parts.append(b"\n".join(good))
                continue
            middle = part.rfind(b"\n", 0, len(part) // 2) + 1 or part.find(b"\n") + 1
            if middle in (0, len(part)) or num_parsed > MAX_PARSED:
                num_unreadable += part.rstrip().count(b"\n") + 1
            else:
                parts += [part[middle:], part[:middle]]
    return tables, num_unreadable


def _is_record(line: bytes) -> bool:
    if b'"kind"' not in line or not line.rstrip().endswith(b"}"):  # these tests are fast
        return False
    try:
        from_dict(parse_json(line, {"kind": str}))
    except JsonError:
        return False
    return True


def _parse_json(block: bytes) -> pa.Table:
    text = np.frombuffer(block, np.uint8)
    depth = np.cumsum(np.isin(text, OPENING).astype(np.int32) - np.isin(text, CLOSING)).max()
    if not block.lstrip().startswith(b"{") or depth > MAX_DEPTH:  # pyarrow crashes on a leading `null`, and on nesting
        raise pa.ArrowInvalid("not a JSON object of ours")
    # A line must fit into a block of the parser, which refuses values of another type than SCHEMA says.
    sizes, types = pj.ReadOptions(block_size=2 * len(block)), pj.ParseOptions(explicit_schema=SCHEMA)
    table = pj.read_json(pa.BufferReader(block), read_options=sizes, parse_options=types)
    _refuse_damage(table)
    return table


def _arrow_fields(record: Any) -> list[tuple[str, pa.DataType]]:
    return [(name, _arrow_type(hint)) for name, hint in get_type_hints(record).items() if name != "kind"]


def _arrow_type(hint: Any) -> pa.DataType:
    """The type of a field of a record."""
    inside = get_args(hint)
    if get_origin(hint) is tuple:
        return pa.list_(_arrow_type(inside[0]))
    if get_origin(hint) is dict:  # `seconds`
        return pa.struct([(phase, pa.float64()) for phase in PHASES])
    if is_dataclass(hint):
        return pa.struct(_arrow_fields(hint))
    if inside:  # `X | None`
        return _arrow_type(inside[0])
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}[hint]


FIELDS = dict(one for record in KINDS.values() for one in _arrow_fields(record) if one[0] != "metrics")
SCHEMA = pa.schema({"kind": pa.string()} | FIELDS)
"""The types of all fields, so that one line cannot change a column; metrics of evaluations are inferred."""


def _refuse_damage(table: pa.Table) -> None:
    """Refuse values of the right type that no run writes. A null may be a field that a line lacks."""
    entries = _rank_entries(table)
    if len(set(entries.column_names)) < len(entries.column_names):
        raise pa.ArrowInvalid("a rank has `seconds.data` twice")
    steps = table.filter(pc.is_in(table["kind"], pa.array(list(KINDS))))["step"]
    required = [table["kind"], steps, *(entries[name] for name in ("rank", "host", "tokens"))]
    counts = [table["step"], table["samples"], table["tokens"], entries["rank"]]
    if any(column.null_count for column in required) or not all(_is_within(one, 0, MAX_COUNT) for one in counts):
        raise pa.ArrowInvalid("a value is missing, or not a count")
    refuse_infinite(table.flatten().columns + entries.columns)


def refuse_infinite(columns: list[pa.ChunkedArray]) -> None:
    """Refuse numbers that are not finite, or whose sums might not be."""
    if not all(_is_within(one, -MAX_NUMBER, MAX_NUMBER) for one in columns if pa.types.is_floating(one.type)):
        raise pa.ArrowInvalid("a number is not finite")


def _is_within(column: pa.ChunkedArray, least: float, most: float) -> bool:
    is_inside = pc.and_(pc.greater_equal(column, least), pc.less_equal(column, most))  # false for NaN
    return bool(pc.all(is_inside, min_count=0).as_py())


def _numbers(steps: pa.Table) -> pa.Table:
    """The columns that are numbers or booleans, those in `seconds` as `seconds.data`, ...."""
    flat, found = steps.flatten(), {}
    for name, column in zip(flat.column_names, flat.columns, strict=True):
        is_number = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
        if column.null_count < len(column) and (is_number or pa.types.is_boolean(column.type)):
            found[name] = column.cast(pa.float64() if name in DOUBLE_PRECISION else pa.float32(), safe=False)
    return pa.table(found)


def _add_others(result: MetricsTable, lines: pa.Table) -> None:
    """Add evaluations and the end. A column is null where a line lacks it, so nulls count as absent."""
    for line in lines.to_pylist():
        try:
            record = from_dict({name: value for name, value in line.items() if value is not None})
        except (KeyError, TypeError, ValueError):
            result.num_unreadable += 1
            continue
        if isinstance(record, EvaluationRecord):
            result.evaluations.append(record)
        elif isinstance(record, EndRecord):
            result.end = record


def _rank_entries(lines: pa.Table) -> pa.Table:
    """The means of each rank in these lines, those in `seconds` as `seconds.data`, ...."""
    entries = pc.list_flatten(lines["ranks"]).combine_chunks()  # one chunk: some versions of Arrow need at least one
    return pa.Table.from_struct_array(entries).flatten()


def _add_ranks(sums: dict[tuple[int, str], RankSums], entries: pa.Table) -> None:
    summed = [("tokens", "count"), ("tokens", "sum"), *((f"seconds.{phase}", "sum") for phase in PHASES)]
    for row in entries.group_by(["rank", "host"]).aggregate(summed).to_pylist():
        entry = sums.setdefault((row["rank"], row["host"]), RankSums())
        entry.records += row["tokens_count"]
        entry.tokens += row["tokens_sum"]
        for phase in PHASES:
            entry.seconds[phase] = entry.seconds.get(phase, 0.0) + (row[f"seconds.{phase}_sum"] or 0.0)
