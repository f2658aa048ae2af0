"""Read table files: TSV, CSV, JSON lines, Parquet and Arrow, as people and the library `datasets` write them.

A row that cannot be read is returned as a Problem with its file and line; `BadRows` decides whether to stop.

TSV is read as GLUE writes it: a tab ends a field, a line feed ends a row, and quotes have no meaning. In CSV, quoted
fields may contain commas and line breaks; the header line shows whether commas, semicolons or tabs separate fields.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from bertrain.base.errors import UserError
from bertrain.base.files import is_valid_text
from bertrain.base.formatting import counted
from bertrain.base.schema import JsonError, parse_json
from bertrain.data.text.records import Problem, csv_rows, listed, open_columns, table_lines
from bertrain.data.text.streams import DAMAGE, Stream, open_streams

HUB = "data"  # the folder of the data files in a repository of the Hugging Face hub
FORMATS = {
    "tsv": "tsv", "txt": "tsv", "csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl",
    "parquet": "parquet", "arrow": "arrow", "conll": "conll", "bio": "conll", "iob": "conll", "annotated": "conll",
}  # fmt: skip
"""The format of a file by the suffix of its name."""
TABLES = frozenset(FORMATS.values()) - {"conll"}

NOT_UTF8 = "is not UTF-8 text; convert the file: `iconv -f latin1 -t utf-8 OLD > NEW`"
SKIP_HINT = "fix it, or skip such rows with --on-error skip"

SelectColumns = Callable[[list[str]], "Sequence[str | None]"]
"""Selects columns from those of a file; raises LookupError(the missing column, a hint for the user)."""

Object = dict[str, Any]
ChooseColumns = Callable[[list[str]], list[str]]  # the columns to read, of those of a file
Item = TypeVar("Item")


class Row(NamedTuple):
    """The selected values of a row, None where it has none, and its file and line for messages."""

    place: str
    values: tuple[str | None, ...]


class FieldCountProblem(Problem):
    """A row with more or fewer fields than there are columns."""


class ListProblem(Problem):
    """A row with a list where a text or a number is read."""


@dataclass
class BadRows:
    """Counts unusable rows, or stops at the first."""

    on_error: Literal["stop", "skip"]
    count: int = 0
    first: Problem | None = None

    def add(self, problem: Problem) -> None:
        if self.on_error == "stop":
            raise UserError("bad-row", f"{problem}; {SKIP_HINT}")
        self.count += 1
        self.first = self.first or problem

    def nothing_usable(self, files: Sequence[Path], what: str = "row") -> UserError:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        reason = f": {self.first}" if self.first else ""
        return UserError("no-usable-row", f"{files[0]}{more} has no usable {what}{reason}")


def format_of(path: Path) -> str:
    """The format of a table by the suffix of its name, compressed or not; "" if it is not supported."""
    return FORMATS.get(suffix_of(path), "")


def suffix_of(path: Path) -> str:
    """The suffix of a file's name, without that of its compression and without a dot."""
    return _uncompressed_name(path).rpartition(".")[2]


def stem_of(path: Path) -> str:
    return _uncompressed_name(path).rpartition(".")[0]


def _uncompressed_name(path: Path) -> str:
    name = path.name.lower()
    stem, _, suffix = name.rpartition(".")
    return stem if suffix in ("gz", "bz2", "xz", "zst") else name


def find_tables(folder: Path, stems: Sequence[str], formats: Collection[str] = TABLES) -> dict[str, list[Path]]:
    """The candidate files of a split in `folder`, by name, those of the first stem first; a stem may be a pattern.

    The stem `train` finds train.tsv and train.jsonl.gz; the parts train-00000-of-00002.parquet and so on, as one
    candidate; and the Arrow and Parquet files of a folder `train`. If there is none, it searches the folder `data`, as
    on the Hugging Face hub.
    """
    if not folder.is_dir():
        return {}
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    tables = [path for path in entries if path.is_file() and format_of(path) in formats]
    found: dict[str, list[Path]] = {}
    for stem in stems:
        for path in tables:
            part = _PART.fullmatch(stem_of(path))
            if fnmatch(stem_of(path), stem):
                found.setdefault(path.name, [path])
            elif part and part["stem"] == stem:
                parts = found.setdefault(f"{stem}-*-of-{part['total']}", [])
                parts += [] if path in parts else [path]
        if stem != HUB and (folder / stem).is_dir() and (folder / stem) in entries:
            inside = [path for path in sorted((folder / stem).iterdir()) if format_of(path) in ("parquet", "arrow")]
            found |= {f"{stem}/": inside} if inside else {}
    if not found and (folder / HUB).is_dir():
        return find_tables(folder / HUB, stems, formats)
    return found


def choose_files(folder: Path, stems: Sequence[str], notes: list[str], formats: Collection[str] = TABLES) -> list[Path]:
    """The files of a split; adds a note if there were several candidates."""
    found = find_tables(folder, stems, formats)
    if len(found) > 1:
        chosen, *others = found
        notes.append(f"{folder} has {chosen} and {', '.join(others)}; using {chosen}")
    files = next(iter(found.values()), [])
    part = _PART.fullmatch(stem_of(files[0])) if files else None
    if part and int(part["total"]) != len(files):
        raise UserError(
            "missing-parts",
            f"{folder} has {len(files)} of {int(part['total'])} parts of {files[0].name}; download the rest",
        )
    return files


def read_table(
    path: Path, select: SelectColumns, header: Sequence[str] = (), *, lists_at: int = -1
) -> Iterator[Row | Problem]:
    """Read the columns that `select` chooses; the value of a column None is None.

    The chosen column number `lists_at` may hold lists, whose value is a JSON list; in the others they are refused.

    `header` names the columns of a file whose first line has none of these names. A file without rows yields nothing;
    a file that is damaged, or lacks a column, raises UserError.
    """
    kind = format_of(path)
    if kind in _FIELDS:
        yield from _read(path, lambda stream: _select_fields(stream.name, _FIELDS[kind](stream), select, header))
        return
    columns: Sequence[str | None] = ()

    def choose(names: list[str]) -> list[str]:
        nonlocal columns
        columns = _select(str(path), names, select)
        return [column for column in columns if column is not None]

    for place, record in read_objects(path, choose):
        yield record if isinstance(record, Problem) else _to_row(place, record, columns, lists_at)


def read_objects(path: Path, choose: ChooseColumns) -> Iterator[tuple[str, Object | Problem]]:
    """The rows of a file of JSON lines, Parquet or Arrow as objects, each with its place."""
    reader = _OBJECTS.get(format_of(path))
    if reader is None:
        supported = ", .".join(suffix for suffix, kind in FORMATS.items() if kind in TABLES)
        raise UserError("unknown-table-format", f"cannot read {path} as a table; supported formats are .{supported}")
    return _read(path, lambda stream: reader(stream, choose))


def read_lines(path: Path) -> Iterator[tuple[str, str | Problem]]:
    """The lines of a text file without their ends, each with its place."""

    def lines(stream: Stream) -> Iterator[tuple[str, str | Problem]]:
        for number, line in table_lines(stream):
            place, text = f"line {number:,} of {stream.name}", line.decode("utf-8", "surrogateescape")
            yield place, text.rstrip("\r\n") if is_valid_text(text) else Problem(place, NOT_UTF8)

    return _read(path, lines)


def _read(path: Path, reader: Callable[[Stream], Iterator[Item]]) -> Iterator[Item]:
    try:
        for stream in open_streams(path, lambda _: None):
            yield from reader(stream)
    except DAMAGE as error:
        raise _damaged_table(path, error or type(error).__name__) from None


def _damaged_table(name: object, reason: object) -> UserError:
    return UserError("damaged-table", f"{name} is damaged or truncated ({reason}); download it again")


def _tsv_rows(stream: Stream) -> Iterator[tuple[int, list[str]]]:
    lines = ((number, line.decode("utf-8", "surrogateescape")) for number, line in table_lines(stream))
    rows = ((number, text.rstrip("\n").removesuffix("\r").split("\t")) for number, text in lines)
    return ((number, row) for number, row in rows if row != [""])


def _select_fields(
    name: str, rows: Iterable[tuple[int, list[str] | Problem]], select: SelectColumns, header: Sequence[str]
) -> Iterator[Row | Problem]:
    """Select columns of rows whose first is the header, unless it has none of the names in `header`."""
    rows = iter(rows)
    line, names = next(rows, (0, []))
    if isinstance(names, Problem):
        raise UserError("bad-header", f"{names}; the first line must name the columns")
    if not all(map(is_valid_text, names)):
        raise UserError("bad-header", f"line {line:,} of {name} {NOT_UTF8}")
    if not names:
        return
    if header and not set(names) & set(header):
        rows = itertools.chain([(line, names)], rows)
        names = list(header)
    columns = _select(name, names, select)
    if repeated := next((column for column in columns if column is not None and names.count(column) > 1), None):
        raise UserError("repeated-column", f"{name} has {names.count(repeated)} columns named {repeated!r}; keep one")
    indices = [None if column is None else names.index(column) for column in columns]
    for line, fields in rows:
        place = f"line {line:,} of {name}"
        if isinstance(fields, Problem):
            yield fields
        elif len(fields) != len(names):
            yield FieldCountProblem(place, f"has {counted(len(fields), 'field')} for {len(names)} columns")
        else:
            values = tuple(None if index is None else fields[index] for index in indices)
            yield Row(place, values) if all(map(is_valid_text, values)) else Problem(place, NOT_UTF8)


def _json_rows(stream: Stream, choose: ChooseColumns) -> Iterator[tuple[str, Object | Problem]]:
    is_first = True
    for number, line in table_lines(stream):
        place = f"line {number:,} of {stream.name}"
        if not line.strip():
            continue
        if is_first and line.lstrip().startswith(b"["):
            raise UserError("json-array", f"{stream.name} is a JSON array; write one object per line")
        try:
            record = parse_json(line.decode())
        except UnicodeDecodeError:
            yield place, Problem(place, NOT_UTF8)
        except JsonError as error:
            yield place, Problem(place, f"is {error}")
        else:
            if not isinstance(record, dict):
                yield place, Problem(place, "is not a JSON object")
                continue
            if is_first:
                choose(list(record))
                is_first = False
            yield place, record


def _columnar_rows(stream: Stream, choose: ChooseColumns) -> Iterator[tuple[str, Object]]:
    import pyarrow as pa

    if stream.path is None:
        raise UserError("compressed-table", f"{stream.name} is compressed; decompress this Parquet or Arrow file")
    place, numbers = "the start", itertools.count(1)
    try:
        with open_columns(stream.path) as (schema, read):
            columns, classes = choose(schema.names), _class_names(schema)
            for batch in read(columns, 4096):
                batch.validate(full=True)
                for record in batch.select(columns).to_pylist():
                    for column in classes.keys() & record.keys():
                        record[column] = _to_class_name(record[column], classes[column])
                    place = f"row {next(numbers):,} of {stream.path}"
                    yield place, record
    except (pa.ArrowException, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _damaged_table(stream.name, f"after {place}: {reason}") from None


def _class_names(schema: Any) -> dict[str, list[str]]:
    """The class names that `datasets` wrote into the schema, by column of classes or of lists of classes."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        # A list of classes: by older versions as a list of one feature.
        items = {name: one[0] if isinstance(one, list) else one.get("feature", one) for name, one in features.items()}
        classes = {name: item for name, item in items.items() if item.get("_type") == "ClassLabel"}
        return {column: list(map(str, feature["names"])) for column, feature in classes.items()}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def _to_class_name(index: Any, names: list[str]) -> Any:
    """The name of a class index, or of each in a list; `datasets` writes -1 for no label."""
    if isinstance(index, list):
        return [_to_class_name(each, names) for each in index]
    if isinstance(index, float) and index.is_integer():  # as pandas writes whole numbers beside missing ones
        index = int(index)
    is_class = isinstance(index, int) and 0 <= index < len(names)
    return None if index == -1 else names[index] if is_class else index


def _select(name: str, names: list[str], select: SelectColumns) -> Sequence[str | None]:
    try:
        return select(names)
    except LookupError as error:
        missing, hint = error.args
        columns = listed(names)
        raise UserError("missing-column", f"{name} has no column {missing}; its columns are {columns}{hint}") from None


def _to_row(place: str, record: Object, columns: Sequence[str | None], lists_at: int) -> Row | Problem:
    texts: list[str | None] = []
    for number, column in enumerate(columns):
        if column is not None and column not in record:
            return Problem(place, f"has no {column!r}")
        value = None if column is None else record[column]
        if isinstance(value, list) and number == lists_at:
            try:
                value = json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError):
                return Problem(place, f"has a list in {column!r} of other things than texts")
        if value is None or (isinstance(value, float) and math.isnan(value)):
            texts.append(None)
        elif isinstance(value, float):
            texts.append(str(int(value)) if value.is_integer() else repr(value))
        elif isinstance(value, int):  # or a bool
            texts.append(str(value).lower())
        elif not isinstance(value, str):
            kind = ListProblem if isinstance(value, list) else Problem
            return kind(place, f"has a {type(value).__name__} in {column!r}, not a text or a number")
        elif not is_valid_text(value):
            return Problem(place, f"has invalid Unicode in {column!r}")
        else:
            texts.append(value)
    return Row(place, tuple(texts))


_PART = re.compile(r"(?P<stem>.+)-\d+-of-(?P<total>\d+)")  # as `datasets` numbers the parts of a large file
_FIELDS: dict[str, Callable[[Stream], Iterator[tuple[int, list[str] | Problem]]]] = {"tsv": _tsv_rows, "csv": csv_rows}
_OBJECTS: dict[str, Callable[[Stream, ChooseColumns], Iterator[tuple[str, Object | Problem]]]] = {
    "jsonl": _json_rows,
    "parquet": _columnar_rows,
    "arrow": _columnar_rows,
}
