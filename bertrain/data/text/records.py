"""Files to records: one page, document, line or row each, not yet parsed.

Cutting a stream into records is cheap and runs in one process; parsing them runs in many. Readers do not raise on bad
content: they yield a Problem in its place, and the caller decides whether to stop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bertrain.base.errors import UserError
from bertrain.config.choices import DocumentEnd, Form
from bertrain.data.text.streams import DAMAGE, Stream, open_streams
from bertrain.data.text.wikipedia import Wiki

LARGEST_RECORD = 64 << 20
"""Bytes; the largest page of Wikipedia has two million. A larger record is probably several documents."""

_CHUNK = 1 << 20
_BEGINS_JSON = re.compile(rb'(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')


class Record(NamedTuple):
    """One document in the format of its source. Messages call it `place`."""

    form: str
    place: str
    content: bytes | str
    wiki: Wiki | None = None


class Problem(NamedTuple):
    """A defect of the input, and where it is."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place} {self.what}"


def read_records(
    path: Path, *, form: Form, text_column: str, document_end: DocumentEnd, report: Callable[[int], None]
) -> Iterator[Record | Problem]:
    """All records of a file; `form` "auto" detects the format from the content.

    A document of plain text ends at a "blank-line" or at the end of its "file", as `document_end` says.
    """
    place = f"the beginning of {path}"
    try:
        for stream in open_streams(path, report):
            place = f"the beginning of {stream.name}"
            for record in _read_stream(stream, form, text_column, document_end):
                place = record.place
                yield record
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError("unreadable-file", f"cannot read {path}: {error.strerror}") from None
        yield Problem(str(path), f"is damaged or cut off after {place} ({error or type(error).__name__})")


def _read_stream(stream: Stream, form: str, text_column: str, document_end: DocumentEnd) -> Iterator[Record | Problem]:
    form = recognize(stream.bytes.peek(_CHUNK), stream.name) if form == "auto" else form
    readers: dict[str, Callable[[Stream], Iterator[Record | Problem]]] = {
        "dump": _pages,
        "wikiextractor": _extracted_documents,
        "jsonl": _json_lines,
        "parquet": lambda stream: _rows(stream, text_column),
        "text": _whole_file if document_end == "file" else _documents,
    }
    if form in readers:
        return readers[form](stream)
    many_lines = "is one JSON value over many lines, or an array; give one object per line"
    what = many_lines if form == "json" else "has no format that bertrain reads; leave it out"
    return iter([Problem(stream.name, what)])


def recognize(beginning: bytes, name: str) -> str:
    """The format of a file by its beginning and its name; "" if it is none that bertrain reads."""
    content = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    head = content[:4096]
    ending = name.lower().rpartition(".")[2]
    if head.startswith(b"PAR1") or ending == "parquet":
        return "parquet"
    if head.startswith(b"<page>") or (head.startswith(b"<") and b"<mediawiki" in head):
        return "dump"
    if head.startswith(b"<doc "):
        return "wikiextractor"
    if ending in ("jsonl", "ndjson") or (head.startswith(b"{") and _is_json_object(content)):
        return "jsonl"
    if _BEGINS_JSON.match(head) or (ending == "json" and head.startswith((b"[", b"{"))):
        return "json" if head.startswith(b"[") or b"\n" in content else "jsonl"  # one line, longer than `beginning`
    return "" if b"\0" in head else "text"


def _is_json_object(head: bytes) -> bool:
    try:
        return isinstance(json.loads(head.split(b"\n", 1)[0]), dict)
    except ValueError:
        return False


# --- one reader for each form ------------------------------------------------------------------------------


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
            yield Record("dump", f"page {number:,} of {stream.name}", page, wiki)
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


def _json_lines(stream: Stream) -> Iterator[Record | Problem]:
    for number, line in numbered_lines(stream):
        if isinstance(line, Problem):
            yield line
        elif line.strip():
            yield Record("jsonl", f"line {number:,} of {stream.name}", line)


def _documents(stream: Stream) -> Iterator[Record | Problem]:
    """Plain text with a blank line between documents."""
    document = _Gathered(stream.name)
    for number, line in numbered_lines(stream):
        if isinstance(line, Problem):
            yield line
        elif not line.strip():
            if document.first:
                yield document.end("text")
        elif document.first:
            document.add(line)
        else:
            document.begin(number, line)
    if document.first:
        yield document.end("text")


class _Gathered:
    """The lines of a document so far, up to LARGEST_RECORD. `first` is the number of its first line, or 0."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[bytes] = []
        self._size = 0
        self.first = 0

    def begin(self, number: int, line: bytes) -> None:
        self._lines, self._size, self.first = [], 0, number
        self.add(line)

    def add(self, line: bytes) -> None:
        self._size += len(line)
        if self._size <= LARGEST_RECORD:
            self._lines.append(line)

    def end(self, form: str) -> Record | Problem:
        place = f"line {self.first:,} of {self._name}"
        self.first = 0
        if self._size > LARGEST_RECORD:
            return Problem(place, f"begins a document of more than {LARGEST_RECORD >> 20} MiB; split it")
        return Record(form, place, b"".join(self._lines))


def _whole_file(stream: Stream) -> Iterator[Record | Problem]:
    """A file of prose is one document: a blank line ends a paragraph, whose lines may be wrapped."""
    content = stream.bytes.read(LARGEST_RECORD + 1)
    if len(content) > LARGEST_RECORD:
        what = f"is larger than {LARGEST_RECORD >> 20} MiB, too large for one document; split it"
        yield Problem(stream.name, what)
    else:
        yield Record("prose", stream.name, content)


def _rows(stream: Stream, text_column: str) -> Iterator[Record | Problem]:
    import pyarrow as pa
    import pyarrow.parquet

    if stream.path is None:
        yield Problem(stream.name, "is a Parquet file inside an archive; unpack it first")
        return
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(stream.path) as file:
            names = file.schema_arrow.names
            if text_column not in names:
                yield Problem(stream.name, f"has no column {text_column!r} but {listed(names)}; give --text-column")
                return
            kind = file.schema_arrow.field(text_column).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                yield Problem(stream.name, f"has {kind} in its column {text_column!r}, not text; give --text-column")
                return
            for batch in file.iter_batches(batch_size=256, columns=[text_column]):
                for value in batch.column(0):
                    number += 1
                    yield Record("row", f"row {number:,} of {stream.name}", value.as_py() or "")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        yield Problem(stream.name, f"is damaged or cut off after row {number:,} ({str(error).splitlines()[0]})")


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
