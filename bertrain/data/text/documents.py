"""Plain text to lines and documents: one sentence per line, a blank line between documents.

A line ends at a newline; bytes that are not UTF-8 are left out, as in BERT's reference. Large input is cut into
units: stretches of whole documents that processes work on apart. Where the cuts lie depends on the text alone.
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

LONGEST_LINE = 4 << 20  # in bytes; a sentence of four million letters is a mistake
LONGEST_DOCUMENT = 4  # in units; what is longer is cut at a line's end, so that memory stays bounded
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
RECOGNISED_BY = 1 << 16  # bytes of a file's beginning
EXTRACT_DESCRIPTION, EXTRACT_TRAINING = "extract.json", "train"


class Span(NamedTuple):
    """A stretch of a file, in bytes, from the beginning of a line to the end of one."""

    path: str
    start: int
    stop: int


def find_inputs(inputs: Iterable[str | Path]) -> list[Path]:
    """The text files behind `inputs`: files as given, folders by their files in order of name."""
    files: list[Path] = []
    for entry in map(Path, inputs):
        if entry.is_dir():
            inside = sorted(path for path in entry.rglob("*") if path.is_file() and not path.name.startswith("."))
            if not inside:
                raise UserError(f"the input folder {entry} holds no file")
            _refuse_held_out(inside)
            files += inside
        elif entry.is_file():
            files.append(entry)
        else:
            raise UserError(f"no input file or folder at {entry}")
    return files


def _refuse_held_out(files: list[Path]) -> None:
    """Refuse a folder that `data extract` made as a whole: what it held out for evaluation lies there too."""
    for path in files:
        if path.name == EXTRACT_DESCRIPTION:
            raise UserError(
                f"{path.parent} was made by `bertrain data extract` and may hold text for evaluation; give "
                f"{path.parent / EXTRACT_TRAINING} instead"
            )


def check_readable(path: Path) -> None:
    """Refuse a file that cannot be read, or that is no plain text."""
    try:
        with open(path, "rb") as file:
            head = file.read(RECOGNISED_BY)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise UserError(f"{path} is compressed ({name}); unpack it first, or let `bertrain data extract` read it")
    for magic, name in NOT_TEXT.items():
        if head.startswith(magic):
            raise UserError(f"{path} is {name}, not text; leave it out")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and len(head) >= 64 and 4 * head.count(0) >= len(head):
        raise UserError(f"{path} is text in UTF-16; save it as UTF-8")
    form = recognize(head, path.name)
    if form in FOR_EXTRACT:
        raise UserError(f"{path} is {FOR_EXTRACT[form]}; `bertrain data extract` reads it")


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

    A line that is too long to be one is an error, or with `on_error="skip"` left out; `counts` counts those, and the
    lines that are not all UTF-8. BERT's reference, on TensorFlow's file reader, drops carriage returns wherever they
    stand.
    """
    try:
        with open(span.path, "rb") as file:
            position = file.seek(span.start)
            while position < span.stop:
                raw = file.readline(LONGEST_LINE + 1)
                if not raw:
                    raise UserError(f"{span.path} has become shorter while it was read; begin again when it is at rest")
                position += len(raw)
                if len(raw) > LONGEST_LINE:
                    length = len(raw) + (0 if raw.endswith(b"\n") else _skip_line(file))
                    if on_error != "skip":
                        number = _line_number(span.path, position - len(raw))
                        raise UserError(
                            f"line {number} of {span.path} is {length:,} bytes long; put a sentence on each line, or "
                            "leave such lines out with --on-error skip"
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
                if line:  # what is left of a last line without its newline may be nothing
                    yield line.removesuffix("\n")
    except OSError as error:
        raise UserError(f"cannot read {span.path}: {error.strerror or error}") from None


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of a line; returns how many bytes that took."""
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
    """Cut files into units of about `unit_bytes`, at the ends of documents; small files share a unit."""
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
    """Where the first document ends that reaches `position`, or the line that reaches `limit` if that comes first."""
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
