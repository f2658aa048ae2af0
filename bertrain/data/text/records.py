"""Files to records: one page, document, line or row each, not yet parsed.

Cutting a stream into records is cheap and runs in one process; parsing them runs in many. Readers do not raise on bad
content: they yield a Problem in its place, and the caller decides whether to stop.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.config.choices import DocumentEnd, Form
from bertrain.data.text.streams import DAMAGE, Stream, is_guess, open_streams, recode
from bertrain.data.text.wikipedia import Wiki

LARGEST_RECORD = 64 << 20
"""Bytes; the largest page of Wikipedia has two million. A larger record is probably several documents."""

ENDS = {"blank-line": (0, math.inf), "size": (8 << 10, 32 << 10), "file": (16 << 20, 32 << 20)}
"""Bytes after which a document of plain text ends at the next blank line, and at the next line of any kind."""

LONG_STRING = 40  # characters, on average, of a column that is taken for the text
_CHUNK = 1 << 20
_CONTROL = bytes({*range(32), 127} - {*b"\t\n\v\f\r\b\x1b"})  # hardly any text has them
_BEGINS_JSON = re.compile(rb'(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')


class Record(NamedTuple):
    """One document in the format of its source; `number` is that of its page, its row or its first line."""

    form: str
    name: str
    number: int
    content: bytes | str
    wiki: Wiki | None = None
    text_column: str = "text"  # of a line of JSON

    @property
    def place(self) -> str:
        unit = {"dump": "page", "row": "row"}.get(self.form, "line")
        return f"{unit} {self.number:,} of {self.name}"


class Problem(NamedTuple):
    """A defect of the input, and where it is."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place} {self.what}"


class Reading(NamedTuple):
    """How to read files. `wrapped`: the lines of a paragraph are joined. `text_column` "auto": each table's own."""

    form: Form
    encoding: str
    text_column: str
    document_end: DocumentEnd = "blank-line"
    wrapped: bool = False


def read_records(
    path: Path, reading: Reading, report: Callable[[int], None], guessed: list[str], *, skip_binary: bool
) -> Iterator[Record | Problem]:
    """All records of a file. With `skip_binary`, one that is not text yields a record of the form "skipped".

    Adds to `guessed` the name of a stream whose encoding is a guess.
    """
    place = f"the beginning of {path}"
    try:
        for packed in open_streams(path, report):
            stream = recode(packed, reading.encoding)
            if is_guess(stream, reading.encoding):
                guessed.append(stream.name)
            place = f"the beginning of {stream.name}"
            for record in read_stream(stream, reading, skip_binary=skip_binary or stream.name != str(path)):
                place = record.place
                yield record
    except DAMAGE as error:
        yield Problem(str(path), f"is damaged or cut off after {place} ({error or type(error).__name__})")


def read_stream(stream: Stream, reading: Reading, *, skip_binary: bool) -> Iterator[Record | Problem]:
    form = form_of(stream, reading.form)
    column = text_column_of(stream, form, reading.text_column)
    rows = partial(_rows, text_column=column)
    text = partial(_lines, form="text") if reading.document_end == "line" else partial(_documents, reading=reading)
    readers: dict[str, Callable[[Stream], Iterator[Record | Problem]]] = {
        "dump": _pages,
        "wikiextractor": _extracted_documents,
        "jsonl": partial(_lines, form="jsonl", text_column=column),
        "csv": partial(_fields, text_column=column),
        "parquet": rows,
        "arrow": rows,
        "text": text,
    }
    if form in readers:
        return readers[form](stream)
    if not form and skip_binary:
        return iter([Record("skipped", stream.name, 1, "not text")])
    many_lines = "is one JSON value over many lines, or an array; give one object per line"
    what = many_lines if form == "json" else "is binary, in no format that bertrain reads"
    return iter([Problem(stream.name, what)])


def form_of(stream: Stream, form: Form) -> str:
    """The format of a stream: `form`, or the recognized one if that is "auto"."""
    return recognize(stream.bytes.peek(_CHUNK), stream.name) if form == "auto" else form


def recognize(beginning: bytes, name: str) -> str:
    """The format of a file by its beginning and its name; "" if it is none that bertrain reads."""
    content = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    head = content[:4096]
    stem, _, ending = name.lower().rpartition(".")
    ending = stem.rpartition(".")[2] if ending in ("gz", "bz2", "xz", "zst") else ending
    if head.startswith(b"PAR1") or ending == "parquet":
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or ending == "arrow":
        return "arrow"
    if head.startswith(b"<page>") or (head.startswith(b"<") and b"<mediawiki" in head):
        return "dump"
    if head.startswith(b"<doc "):
        return "wikiextractor"
    if ending in ("jsonl", "ndjson") or (
        head.startswith(b"{") and _json_object(content.split(b"\n", 1)[0]) is not None
    ):
        return "jsonl"
    if _BEGINS_JSON.match(head) or (ending == "json" and head.startswith((b"[", b"{"))):
        return "json" if head.startswith(b"[") or b"\n" in content else "jsonl"  # one line, longer than `beginning`
    if b"\0" in head or len(beginning.translate(None, _CONTROL)) < 0.98 * len(beginning):
        return ""
    return "csv" if ending in ("csv", "tsv", "tab") else "text"


def _json_object(line: bytes | Problem) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if isinstance(line, bytes) else None
        return row if isinstance(row, dict) else None
    except (ValueError, RecursionError):
        return None


def _pages(stream: Stream) -> Iterator[Record | Problem]:
    """Pages of a MediaWiki dump. XML text contains no unescaped "<", so tags are found as bytes."""
    wiki: Wiki | None = None
    number = 0
    pending = b""
    while chunk := stream.bytes.read1(_CHUNK):  # `read` would drop the bytes before an error
        *pieces, pending = (pending + chunk).split(b"</page>")
        for piece in pieces:
            before, _, page = piece.partition(b"<page>")
            wiki = wiki or Wiki.from_header(before)
            number += 1
            yield Record("dump", stream.name, number, page, wiki)
        if len(pending) > LARGEST_RECORD:
            what = f"is larger than {LARGEST_RECORD >> 20} MiB; use a dump of current articles, without history"
            yield Problem(f"page {number + 1:,} of {stream.name}", what)
            return
    if b"<page>" in pending:
        yield Problem(stream.name, f"is cut off in page {number + 1:,}")
    elif wiki is None:
        yield Problem(stream.name, "contains no page")
    elif wiki.has_header and b"</mediawiki>" not in pending:
        yield Problem(stream.name, f"is cut off after page {number:,}: its last line is not </mediawiki>")


def _extracted_documents(stream: Stream) -> Iterator[Record | Problem]:
    """Documents of WikiExtractor: <doc ...>, a title, text, </doc>."""
    document = _Gathered(stream.name)
    for number, line in numbered_lines(stream):
        if isinstance(line, Problem):
            yield line
        elif line.startswith(b"<doc "):
            if document.first:
                what = f"opens a <doc> inside that of line {document.first:,}"
                yield Problem(f"line {number:,} of {stream.name}", what)
            document.begin(number, line)
        elif document.first and line.startswith(b"</doc>"):
            yield document.end("wikiextractor")
        elif document.first:
            document.add(line)
        elif line.strip():
            yield Problem(f"line {number:,} of {stream.name}", "is outside of any <doc>")
    if document.first:
        yield Problem(stream.name, f"is cut off in the <doc> of line {document.first:,}")


def _lines(stream: Stream, form: str, text_column: str = "") -> Iterator[Record | Problem]:
    for number, line in numbered_lines(stream):
        if isinstance(line, Problem):
            yield line
        elif line.strip():
            yield Record(form, stream.name, number, line, text_column=text_column)


def _documents(stream: Stream, reading: Reading) -> Iterator[Record | Problem]:
    form, (size, most) = "prose" if reading.wrapped else "text", ENDS[reading.document_end]
    document = _Gathered(stream.name)
    for number, line in numbered_lines(stream):
        if isinstance(line, Problem):
            yield line
            continue
        is_blank = not line.strip()
        if document.first and (document.size >= most or (is_blank and document.size >= size)):
            yield document.end(form)
        if document.first:
            document.add(line)
        elif not is_blank:
            document.begin(number, line)
    if document.first:
        yield document.end(form)


class _Gathered:
    """The lines of a document so far, up to LARGEST_RECORD. `first` is the number of its first line, or 0."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[bytes] = []
        self.size = 0
        self.first = 0

    def begin(self, number: int, line: bytes) -> None:
        self._lines, self.size, self.first = [], 0, number
        self.add(line)

    def add(self, line: bytes) -> None:
        self.size += len(line)
        if self.size <= LARGEST_RECORD:
            self._lines.append(line)

    def end(self, form: str) -> Record | Problem:
        record = Record(form, self._name, self.first, b"".join(self._lines))
        self.first = 0
        if self.size > LARGEST_RECORD:
            return Problem(record.place, f"begins a document of more than {LARGEST_RECORD >> 20} MiB; split it")
        return record


def _fields(stream: Stream, text_column: str) -> Iterator[Record | Problem]:
    """The text column of a CSV or TSV file, whose first line names the columns."""
    try:
        rows = csv_rows(stream)
        _, names = next(rows, (0, []))
        if isinstance(names, Problem):
            yield names
        elif names.count(text_column) != 1:
            sample = [dict(zip(names, row, strict=True)) for _, row in islice(rows, 20) if len(row) == len(names)]
            yield Problem(stream.name, no_column("column", text_column, names, sample))
        else:
            index = names.index(text_column)
            for number, row in rows:
                if isinstance(row, Problem):
                    yield row
                elif len(row) != len(names):
                    what = f"has {counted(len(row), 'field')} for {len(names)} columns"
                    yield Problem(f"line {number:,} of {stream.name}", what)
                else:
                    yield Record("csv", stream.name, number, row[index].encode("utf-8", "surrogateescape"))
    except UserError as error:
        yield Problem(stream.name, f"cannot be read to its end: {error}")


def csv_rows(stream: Stream) -> Iterator[tuple[int, list[str] | Problem]]:
    """The rows of a CSV file and the number of their first line; bytes that are not UTF-8 become lone surrogates.

    The first line shows the delimiter. Where it is a tab, quotes have no meaning.
    """
    csv.field_size_limit(LARGEST_RECORD)
    header = stream.bytes.peek(_CHUNK).split(b"\n", 1)[0].decode(errors="ignore")
    delimiter = max(",;\t|", key=re.sub('"[^"]*"', "", header).count)
    texts = (line.decode("utf-8", "surrogateescape") for _, line in table_lines(stream))
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(texts, delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):  # the rest of the file became one field
                place = f"line {first:,} of {stream.name}"
                raise UserError(
                    "unclosed-quote", f"the quotation mark that opens in {place} is never closed; close or double it"
                ) from None
            for line in range(first, reader.line_num + 1):  # every line within the malformed quote is lost
                yield line, Problem(f"line {line:,} of {stream.name}", f"is not valid CSV ({error})")
            continue
        if fields:
            yield first, fields


def table_lines(stream: Stream) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without the byte order mark."""
    for number, line in numbered_lines(stream):
        if isinstance(line, Problem):
            raise UserError("line-too-long", f"{line}, too long for a row")
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _rows(stream: Stream, text_column: str) -> Iterator[Record | Problem]:
    import pyarrow as pa

    if stream.path is None:
        yield Problem(stream.name, "is a Parquet or Arrow file inside an archive; unpack it first")
        return
    number = 0
    try:
        with open_columns(stream.path) as (schema, read):
            if text_column not in schema.names:
                rows = first_rows(stream, "parquet")
                yield Problem(stream.name, no_column("column", text_column, schema.names, rows))
                return
            if schema.names.count(text_column) > 1:
                yield Problem(stream.name, f"has the column {text_column!r} twice; rename one of them")
                return
            kind = schema.field(text_column).type
            if not _is_text(kind):
                yield Problem(stream.name, f"has {kind} in its column {text_column!r}, not text; give --text-column")
                return
            for batch in read([text_column], 256):
                for value in batch.column(text_column):
                    number += 1
                    yield Record("row", stream.name, number, value.as_py() or "")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        yield Problem(stream.name, f"is damaged or cut off after row {number:,} ({str(error).splitlines()[0]})")


@contextmanager
def open_columns(path: Path) -> Iterator[tuple[Any, Callable[[list[str], int], Iterator[Any]]]]:
    """The schema of a Parquet file or of one of Arrow's two formats, and a function to read batches of some columns.

    Arrow's batches have the columns and the number of rows that they were written with.
    """
    import pyarrow as pa
    import pyarrow.parquet

    with pa.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        if magic[:4] == b"PAR1" or path.suffix.lower() == ".parquet":
            # Both options: without either of them, pyarrow reads all of a row group, which may be the whole file.
            with pyarrow.parquet.ParquetFile(path, buffer_size=_CHUNK, pre_buffer=False) as table:
                yield table.schema_arrow, lambda columns, rows: table.iter_batches(rows, columns=columns)
        elif magic == b"ARROW1":
            reader = pa.ipc.open_file(file)
            yield reader.schema, lambda columns, rows: map(reader.get_batch, range(reader.num_record_batches))
        else:
            stream = pa.ipc.open_stream(file)
            yield stream.schema, lambda columns, rows: iter(stream)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def no_column(kind: str, wanted: str, names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Says that there is no such column, and which column of these rows has the text, if that is obvious."""
    hint = f" {longest}" if (longest := longest_column(rows)) else ""
    if list(names).count(wanted) > 1:
        return f"has the {kind} {wanted!r} twice; rename one of them"
    return f"has no {kind} {wanted!r} but {listed(list(names)) or f'no {kind} at all'}; give --text-column{hint}"


def text_column_of(stream: Stream, form: str, given: str) -> str:
    """The column of a table's text: the `given` one, or if that is "auto", what the first rows show.

    That is "text", or the only column of long strings; "text" if it is not clear. Reads nothing from the stream.
    """
    if given != "auto":
        return given
    beginning: Any = io.BytesIO(stream.bytes.peek(_CHUNK) if form in ("csv", "jsonl") else b"")
    with suppress(UserError, ValueError, *DAMAGE):  # who reads it all says what cannot be read; Arrow's are ValueErrors
        if rows := first_rows(replace(stream, bytes=io.BufferedReader(beginning, _CHUNK)), form):
            return "text" if "text" in rows[0] else longest_column(rows, LONG_STRING) or "text"
    return "text"


def longest_column(rows: Sequence[Mapping[str, Any]], least: int = 1) -> str:
    """The column with more than twice the text of any other, and `least` characters in a row; "" if there is none."""
    lengths: Counter[str] = Counter()
    for row in rows:
        lengths.update({name: len(value) for name, value in row.items() if isinstance(value, str)})
    (longest, most), (_, second) = [*lengths.most_common(2), ("", 0), ("", 0)][:2]
    return longest if most > 2 * second and most >= least * len(rows) else ""


def first_rows(stream: Stream, form: str, count: int = 20) -> list[dict[str, Any]]:
    """The first rows of a table or of JSON lines, as far as they can be read; none of another form."""
    if form == "csv":
        rows = csv_rows(stream)
        _, names = next(rows, (0, []))
        found: list[dict[str, Any]] = []
        with suppress(UserError):  # of a quote that is closed after the beginning of a stream
            for _, fields in islice(rows, count):
                if isinstance(names, list) and isinstance(fields, list) and len(fields) == len(names):
                    found.append(dict(zip(names, fields, strict=True)))
        return found
    if form in ("parquet", "arrow") and stream.path is not None:
        with open_columns(stream.path) as (schema, read):
            # Only what may be text: a date, say, may be out of Python's range.
            names = [
                name for name in schema.names if schema.names.count(name) == 1 and _is_text(schema.field(name).type)
            ]
            sample = next(read(names, count), None) if names else None
            return [] if sample is None else sample.slice(0, count).select(names).to_pylist()
    if form == "jsonl":
        return [row for _, line in islice(numbered_lines(stream), count) if (row := _json_object(line)) is not None]
    return []


def numbered_lines(stream: Stream) -> Iterator[tuple[int, bytes | Problem]]:
    """Numbered lines; a line that is too long becomes a Problem."""
    number = 0
    while line := stream.bytes.readline(LARGEST_RECORD + 1):
        number += 1
        if len(line) <= LARGEST_RECORD:
            yield number, line
            continue
        yield number, Problem(f"line {number:,} of {stream.name}", f"is longer than {LARGEST_RECORD >> 20} MiB")
        while line and not line.endswith(b"\n"):
            line = stream.bytes.readline(LARGEST_RECORD)


def listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
