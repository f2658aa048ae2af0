"""Plain text to lines and documents: one sentence per line, a blank line between documents.

Invalid UTF-8 is dropped, as in BERT's reference. Large input is cut into units of whole documents, which processes
work on in parallel. The cuts depend on the text alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bertrain.base.errors import UserError
from bertrain.config.choices import OnError
from bertrain.data.text.records import recognize

Document = list[str]

LONGEST_LINE = 4 << 20  # bytes
LONGEST_DOCUMENT = 4  # units; a longer one is cut at the end of a line, so that memory stays bounded
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
NOT_TEXT = {b"ARROW1": "an Arrow file", b"\x89HDF\r\n": "an HDF5 file", b"%PDF-": "a PDF file"}
FOR_EXTRACT = {
    "dump": "a MediaWiki dump in XML",
    "wikiextractor": "output of WikiExtractor",
    "jsonl": "JSON",
    "json": "JSON",
    "parquet": "a Parquet file",
}
DETECTION_BYTES = 1 << 16  # of a file's beginning
EXTRACT_DESCRIPTION = "extract.json"
EXTRACT_TRAINING = "train"


class Span(NamedTuple):
    """Bytes `start` .. `stop` of a file: whole lines."""

    path: str
    start: int
    stop: int


def find_inputs(inputs: str | Path | Iterable[str | Path]) -> list[Path]:
    """The text files of `inputs`: files as given, the files of folders in order of name."""
    files: list[Path] = []
    for entry in map(Path, [inputs] if isinstance(inputs, str | Path) else inputs):
        if entry.is_dir():
            inside = sorted(path for path in entry.rglob("*") if path.is_file() and not path.name.startswith("."))
            if not inside:
                raise UserError("empty-input", f"the input folder {entry} contains no file")
            extracted = next((path.parent for path in inside if path.name == EXTRACT_DESCRIPTION), None)
            if extracted:
                train = extracted / EXTRACT_TRAINING
                raise UserError("held-out-input", f"{extracted} (`data extract`) may have held-out text; give {train}")
            files += inside
        elif entry.is_file():
            files.append(entry)
        else:
            raise UserError("missing-input", f"no input file or folder at {entry}")
    return files


def check_readable(path: Path) -> None:
    """Refuse a file that cannot be read, or that is not plain text."""
    try:
        with open(path, "rb") as file:
            head = file.read(DETECTION_BYTES)
    except OSError as error:
        raise UserError("unreadable-file", f"cannot read {path}: {error.strerror or error}") from None
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise UserError("not-text", f"{path} is compressed ({name}); read it with `bertrain data extract`")
    for magic, name in NOT_TEXT.items():
        if head.startswith(magic):
            raise UserError("not-text", f"{path} is {name}, not text; leave it out")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and len(head) >= 64 and 4 * head.count(0) >= len(head):
        raise UserError("not-text", f"{path} is text in UTF-16; save it as UTF-8")
    form = recognize(head, path.name)
    if form in FOR_EXTRACT:
        raise UserError("not-text", f"{path} is {FOR_EXTRACT[form]}; read it with `bertrain data extract`")


def read_documents(files: Iterable[Path], counts: Counter[str] | None = None) -> Iterator[Document]:
    """Each document as its list of non-empty sentences. The end of a file ends a document. `counts`: see read_lines."""
    counts = Counter() if counts is None else counts
    for path in files:
        check_readable(path)
        document: Document = []
        for line in read_lines(Span(str(path), 0, path.stat().st_size), counts, on_error="stop"):
            sentence = line.strip()
            if sentence:
                document.append(sentence)
            elif document:
                yield document
                document = []
        if document:
            yield document


def read_lines(
    span: Span, counts: Counter[str], *, on_error: OnError, drop_carriage_returns: bool = False
) -> Iterator[str]:
    """The lines of a span without their newlines.

    A line longer than LONGEST_LINE is refused, or with `on_error="skip"` left out; `counts` counts those and the lines
    with invalid UTF-8. BERT's reference, on TensorFlow's file reader, drops all carriage returns.
    """
    try:
        with open(span.path, "rb") as file:
            position = file.seek(span.start)
            while position < span.stop:
                raw = file.readline(LONGEST_LINE + 1)
                if not raw:
                    raise UserError("changed-input", f"{span.path} became shorter while it was read; run again")
                position += len(raw)
                if len(raw) > LONGEST_LINE:
                    length = len(raw) + (0 if raw.endswith(b"\n") else _skip_line(file))
                    if on_error != "skip":
                        number = _line_number(span.path, position - len(raw))
                        raise UserError(
                            "line-too-long",
                            f"line {number} of {span.path} is {length:,} bytes long; put one sentence on each line, "
                            "or skip such lines with --on-error skip",
                        )
                    position = file.tell()
                    counts["lines_skipped"] += 1
                    continue
                if drop_carriage_returns:
                    raw = raw.replace(b"\r", b"")
                try:
                    line = raw.decode()
                except UnicodeDecodeError:
                    line = raw.decode(errors="ignore")
                    counts["lines_not_utf8"] += 1
                if line:  # a last line without newline may have lost all its bytes
                    yield line.removesuffix("\n")
    except OSError as error:
        raise UserError("unreadable-file", f"cannot read {span.path}: {error.strerror or error}") from None


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line; returns the number of bytes read."""
    skipped = 0
    while True:
        raw = file.readline(LONGEST_LINE)
        skipped += len(raw)
        if not raw or raw.endswith(b"\n"):
            return skipped


def _line_number(path: str, position: int) -> int:
    number = 1
    with open(path, "rb") as file:
        while position > 0:
            block = file.read(min(position, 1 << 20))
            number += block.count(b"\n")
            position -= len(block)
    return number


def plan_units(files: Iterable[Path], unit_bytes: int) -> list[list[Span]]:
    """Cut files into units of about `unit_bytes` at the ends of documents; small files share a unit."""
    units: list[list[Span]] = [[]]
    filled = 0
    for path in files:
        for span in _cut(path, unit_bytes):
            if filled >= unit_bytes:
                units.append([])
                filled = 0
            units[-1].append(span)
            filled += span.stop - span.start
    if len(units) > 1 and filled < unit_bytes // 2:
        rest = units.pop()
        units[-1] += rest
    return units


def _cut(path: Path, unit_bytes: int) -> Iterator[Span]:
    size = path.stat().st_size
    start = 0
    with open(path, "rb") as file:
        while start < size:
            stop = size
            if size - start > unit_bytes * 3 // 2:
                stop = _end_of_document(file, start + unit_bytes, start + LONGEST_DOCUMENT * unit_bytes)
            yield Span(str(path), start, stop)
            start = stop


def _end_of_document(file: BinaryIO, position: int, limit: int) -> int:
    """The end of the first document that reaches `position`, or of the line that reaches `limit`."""
    file.seek(position - 1)
    line = file.readline(LONGEST_LINE)  # the rest of the line that reaches the position
    position += len(line) - 1
    while line:
        ended = line.endswith(b"\n")
        if ended and position >= limit:
            break
        line = file.readline(LONGEST_LINE)
        position += len(line)
        if ended and not line.decode(errors="ignore").strip():
            break
    return position
