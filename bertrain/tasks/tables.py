"""Files of rows to records: TSV, CSV, JSON lines, Parquet and Arrow, as people and the library `datasets` write them.

A row that cannot be read is a Problem in its place, with file and line; `Flaws` decides whether that ends the work.

TSV is as GLUE has it: a tab ends a field, a line feed ends a row, and a quote is a sign like any other. CSV has quotes,
and within them commas and line breaks.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.data.text.records import LARGEST_RECORD, Problem, listed, numbered_lines
from bertrain.data.text.streams import DAMAGE, Stream, open_streams

HUB = "data"  # the folder of the files in a repository of Hugging Face's hub
FORMS = {
    "tsv": "tsv",
    "txt": "tsv",
    "csv": "csv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "parquet": "parquet",
    "arrow": "arrow",
}
"""What a file holds, by the ending of its name."""

PACKED = ("gz", "bz2", "xz", "zst")
ROWS_AT_ONCE = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NOT_UTF8 = "is not UTF-8 text; save the file as UTF-8"

Choose = Callable[[list[str]], "Sequence[str | None]"]
"""Picks columns by name; raises LookupError of what is missing, and of what to do about it, in words."""


class Row(NamedTuple):
    """Where a row stands, for messages, and its values in the columns that were asked for; None where there is none."""

    place: str
    values: tuple[str | None, ...]


class Torn(Problem):
    """A row that has not as many fields as there are columns."""


@dataclass
class Flaws:
    """What to do with rows that cannot be read, and how many there were."""

    on_error: Literal["stop", "skip"]
    count: int = 0
    first: Problem | None = None

    def meet(self, problem: Problem) -> None:
        """Count a flaw, or end with it."""
        if self.on_error == "stop":
            raise UserError(f"{problem}; mend it, or pass over such rows with --on-error skip")
        self.count += 1
        self.first = self.first or problem


def form_of(path: Path) -> str:
    """The form of a table by the ending of its file's name, packed or not; "" if it is none that is read."""
    return FORMS.get(_unpacked_name(path).rpartition(".")[2], "")


def stem_of(path: Path) -> str:
    """The name of a table's file without its endings."""
    return _unpacked_name(path).rpartition(".")[0]


def find_tables(folder: Path, stems: Sequence[str]) -> dict[str, list[Path]]:
    """The files that one part of some data may lie in, those of the first stem first; a `*` stands for anything.

    Of the stem train: train.tsv, train.jsonl.gz; train-00000-of-00002.parquet and its like, which belong together; and
    what a folder train holds of Arrow and Parquet. Where there is nothing, a folder `data` is looked into, which is
    where Hugging Face's hub has them.
    """
    if not folder.is_dir():
        return {}
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    tables = [path for path in entries if path.is_file() and form_of(path)]
    found: dict[str, list[Path]] = {}
    for stem in stems:
        for path in tables:
            numbered = _NUMBERED.fullmatch(stem_of(path))
            if fnmatch(stem_of(path), stem):
                found.setdefault(path.name, [path])
            elif numbered and numbered["stem"] == stem:
                shards = found.setdefault(f"{stem}-*-of-{numbered['total']}", [])
                shards += [] if path in shards else [path]
        for path in entries:
            if path.is_dir() and path.name == stem:
                inside = [each for each in sorted(path.iterdir()) if form_of(each) in ("parquet", "arrow")]
                found |= {f"{stem}/": inside} if inside else {}
    if not found and (folder / HUB).is_dir():
        return find_tables(folder / HUB, stems)
    return found


def choose_files(folder: Path, stems: Sequence[str], notes: list[str]) -> list[Path]:
    """The files of a split, and a note if there were several to choose from."""
    found = find_tables(folder, stems)
    if len(found) > 1:
        chosen, *others = found
        notes.append(f"{folder} has {chosen} and {', '.join(others)}; took the first")
    files = next(iter(found.values()), [])
    numbered = _NUMBERED.fullmatch(stem_of(files[0])) if files else None
    if numbered and int(numbered["total"]) != len(files):
        raise UserError(f"of the {int(numbered['total'])} parts that {files[0]} is one of, {len(files)} are there")
    return files


def _unpacked_name(path: Path) -> str:
    name = path.name.lower()
    stem, _, ending = name.rpartition(".")
    return stem if ending in PACKED else name


def read_table(path: Path, choose: Choose, unnamed: Sequence[str] = ()) -> Iterator[Row | Problem]:
    """The rows of a file, with the columns that `choose` wants when it is told which there are; of None, nothing.

    `unnamed` are the columns of a file whose first line names none of them. A file that is damaged as a whole, or has
    not the columns, raises UserError; a file without any row has none.
    """
    reader = _READERS.get(form_of(path))
    if reader is None:
        raise UserError(f"{path} is no table that is read; its name must end in one of .{', .'.join(FORMS)}")
    try:
        for stream in open_streams(path, lambda _: None):
            yield from reader(stream, choose, unnamed)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        raise UserError(f"{path} is damaged or cut off ({error or type(error).__name__}); fetch it again") from None


# --- one reader for each form ------------------------------------------------------------------------------


def _tab_separated(stream: Stream, choose: Choose, unnamed: Sequence[str]) -> Iterator[Row | Problem]:
    numbered = ((number, _decoded(line)) for number, line in _whole_lines(stream))
    rows = ((number, text.rstrip("\n").removesuffix("\r").split("\t")) for number, text in numbered)
    return _fields(stream.name, ((number, fields) for number, fields in rows if fields != [""]), choose, unnamed)


def _comma_separated(stream: Stream, choose: Choose, unnamed: Sequence[str]) -> Iterator[Row | Problem]:
    csv.field_size_limit(LARGEST_RECORD)
    reader = csv.reader((_decoded(line) for _, line in _whole_lines(stream)), strict=True)

    def rows() -> Iterator[tuple[int, list[str] | Problem]]:
        while True:
            first = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):  # all that follows was taken for one field
                    raise UserError(f"a quote that opens in line {first:,} of {stream.name} is never closed") from None
                for line in range(first, reader.line_num + 1):  # lines within a quote that went wrong are lost, each
                    yield line, Problem(f"line {line:,} of {stream.name}", f"is no CSV ({error})")
                continue
            if fields:
                yield first, fields

    return _fields(stream.name, rows(), choose, unnamed)


def _fields(
    name: str, rows: Iterable[tuple[int, list[str] | Problem]], choose: Choose, unnamed: Sequence[str]
) -> Iterator[Row | Problem]:
    """Rows of fields, the first of which names the columns; or does not, where `unnamed` are given."""
    rows = iter(rows)
    line, header = next(rows, (0, []))
    if isinstance(header, Problem):
        raise UserError(f"{header}; it must name the columns")
    if not all(map(_is_text, header)):
        raise UserError(f"line {line:,} of {name} {NOT_UTF8}")
    if not header:
        return
    if unnamed and not set(header) & set(unnamed):
        rows = itertools.chain([(line, header)], rows)
        header = list(unnamed)
    columns = _chosen(name, header, choose)
    if twice := next((column for column in columns if column is not None and header.count(column) > 1), None):
        raise UserError(f"{name} has {header.count(twice)} columns {twice!r}; rename all but one")
    chosen = [None if column is None else header.index(column) for column in columns]
    for line, fields in rows:
        place = f"line {line:,} of {name}"
        if isinstance(fields, Problem):
            yield fields
        elif len(fields) != len(header):
            yield Torn(place, f"has {counted(len(fields), 'field')}, and there are {len(header)} columns")
        else:
            values = tuple(None if number is None else fields[number] for number in chosen)
            yield Row(place, values) if all(map(_is_text, values)) else Problem(place, NOT_UTF8)


def _json_lines(stream: Stream, choose: Choose, unnamed: Sequence[str]) -> Iterator[Row | Problem]:
    columns: Sequence[str | None] | None = None
    for number, line in _whole_lines(stream):
        place = f"line {number:,} of {stream.name}"
        if not line.strip():
            continue
        if columns is None and line.lstrip().startswith(b"["):
            raise UserError(f"{stream.name} is a JSON array; write one object per line")
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError:
            yield Problem(place, NOT_UTF8)
            continue
        except (ValueError, RecursionError) as error:
            yield Problem(place, f"is no JSON ({error})")
            continue
        if not isinstance(record, dict):
            yield Problem(place, "is no JSON object")
            continue
        if columns is None:
            columns = _chosen(stream.name, list(record), choose)
        absent = [column for column in columns if column is not None and column not in record]
        if absent:
            yield Problem(place, f"has no {absent[0]!r}")
        else:
            yield _row(place, [None if column is None else record[column] for column in columns], columns)


def _columnar(stream: Stream, choose: Choose, unnamed: Sequence[str]) -> Iterator[Row | Problem]:
    import pyarrow as pa

    if stream.path is None:
        raise UserError(f"{stream.name} is packed; unpack it, Parquet and Arrow are compressed by themselves")
    read = _parquet if form_of(stream.path) == "parquet" else _arrow
    place = "its beginning"
    try:
        for row in read(stream.path, choose):
            place = row.place
            yield row
    except (pa.ArrowException, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{stream.name} is damaged or cut off after {place} ({reason}); fetch it again") from None


def _parquet(path: Path, choose: Choose) -> Iterator[Row | Problem]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = _chosen(str(path), file.schema_arrow.names, choose)
        wanted = [column for column in columns if column is not None]
        yield from _batches(path, file.iter_batches(ROWS_AT_ONCE, columns=wanted), file.schema_arrow, columns)


def _arrow(path: Path, choose: Choose) -> Iterator[Row | Problem]:
    """What `datasets` saves, a stream of Arrow's; and the file form, which others write."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from _batches(path, batches, reader.schema, _chosen(str(path), reader.schema.names, choose))


def _batches(path: Path, batches: Iterable[Any], schema: Any, columns: Sequence[str | None]) -> Iterator[Row | Problem]:
    classes = _class_names(schema)
    number = 0
    for batch in batches:
        batch.validate(full=True)
        lists = [
            itertools.repeat(None) if column is None else _named(batch.column(column).to_pylist(), classes.get(column))
            for column in columns
        ]
        for _, *values in zip(range(batch.num_rows), *lists, strict=False):
            number += 1
            yield _row(f"row {number:,} of {path}", values, columns)


def _class_names(schema: Any) -> dict[str, list[str]]:
    """The names of classes that `datasets` wrote into the schema, of each column that has such."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: list(map(str, feature["names"]))
            for column, feature in features.items()
            if feature.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _named(numbers: list[Any], names: list[str] | None) -> list[Any]:
    """Numbers of classes as their names; -1 is what `datasets` writes where there is no label."""
    if names is None:
        return numbers
    known = range(len(names))
    return [None if number == -1 else names[number] if number in known else number for number in numbers]


# --- values ------------------------------------------------------------------------------------------------


def _chosen(name: str, names: list[str], choose: Choose) -> Sequence[str | None]:
    try:
        return choose(names)
    except LookupError as error:
        missing, hint = error.args
        raise UserError(f"{name} has no column {missing}, only {listed(names)}{hint}") from None


def _row(place: str, values: Iterable[Any], columns: Sequence[str | None]) -> Row | Problem:
    texts: list[str | None] = []
    for value, column in zip(values, columns, strict=True):
        if isinstance(value, float) and not math.isnan(value):
            texts.append(str(int(value)) if value.is_integer() else repr(value))
        elif value is None or isinstance(value, float):
            texts.append(None)
        elif isinstance(value, bool):
            texts.append(str(value).lower())
        elif isinstance(value, int):
            texts.append(str(value))
        elif not isinstance(value, str):
            return Problem(place, f"has {type(value).__name__} in {column!r}, neither text nor number")
        elif not _is_text(value):
            return Problem(place, f"has no valid Unicode in {column!r}")
        else:
            texts.append(value)
    return Row(place, tuple(texts))


def _whole_lines(stream: Stream) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without the byte order mark."""
    for number, line in numbered_lines(stream):
        if isinstance(line, Problem):
            raise UserError(f"{line}; such a line is no row")
        yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def _decoded(line: bytes) -> str:
    """A line as text; bytes that are none stay recognisable to `_is_text`."""
    return line.decode("utf-8", "surrogateescape")


def _is_text(value: str | None) -> bool:
    return value is None or value.isascii() or not _HALVES_OF_PAIRS.search(value)


_NUMBERED = re.compile(r"(?P<stem>.+)-\d+-of-(?P<total>\d+)")  # as `datasets` numbers the parts of a large file
_HALVES_OF_PAIRS = re.compile("[\ud800-\udfff]")
_READERS: dict[str, Callable[[Stream, Choose, Sequence[str]], Iterator[Row | Problem]]] = {
    "tsv": _tab_separated,
    "csv": _comma_separated,
    "jsonl": _json_lines,
    "parquet": _columnar,
    "arrow": _columnar,
}
