"""Plain text to lines and documents: one sentence per line, a blank line between documents.

Invalid UTF-8 is refused, or dropped as in BERT's reference. Large input is cut into units of whole documents, which
processes work on in parallel. The cuts depend on the text alone.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bertrain.base.console import remark
from bertrain.base.errors import UserError
from bertrain.base.files import reading
from bertrain.base.formatting import counted
from bertrain.config.choices import OnError
from bertrain.data.text.records import recognize

Document = list[str]

LONGEST_LINE = 4 << 20  # bytes
LONGEST_DOCUMENT = 4  # units; a longer one is cut at the end of a line, so that memory stays bounded
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gzip, bzip2, xz, zstd, zip
NOT_TEXT = (b"\x89HDF\r\n", b"%PDF-")
DETECTION_BYTES = 1 << 16  # of a file's beginning
EXTRACT_DESCRIPTION = "extract.json"
EXTRACT_TRAINING = "train"
CHECKSUMS = re.compile(r"(\.|_|^)(md5|sha1|sha256|sha512)(sums?)?(\.txt)?$", re.IGNORECASE)
SPLITS = ("train", "validation", "valid", "dev", "test")
HUB_PART = re.compile(rf"/(?:(\w+)-\d{{5}}-of-\d{{5}}(?:-\w+)?|({'|'.join(SPLITS)})/\d{{4,5}})\.parquet$")
"""A file in the Hugging Face Hub's layout: data/train-00000-of-00002.parquet, or default/train/0000.parquet."""
HUB_CARDS = ("README.md", "dataset_infos.json", "LICENSE", "LICENSE.md", "LICENSE.txt")
HELD_OUT = ("eval", "held-out", "held_out")
"""Names of files that hold evaluation text, where files named as training text stand beside them."""
TRAINING_TEXT = re.compile(r"^train|-of-\d+", re.IGNORECASE)


class Span(NamedTuple):
    """Bytes `start` .. `stop` of a file: whole lines."""

    path: str
    start: int
    stop: int


def find_inputs(inputs: str | Path | Iterable[str | Path]) -> list[Path]:
    """The text files of `inputs`: files as given, the files of folders in order of name.

    Of a folder that the library `datasets` saved, these are the Arrow files, and of several splits those of `train`;
    the same holds for Parquet files that are named as on the Hugging Face Hub.
    """
    files: list[Path] = []
    entries = [Path(entry) for entry in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    named = [entry for entry in entries if entry.is_file()]
    if len(named) > 1 and (sums := [path for path in named if CHECKSUMS.search(path.name)]):
        raise UserError("not-text", f"{sums[0]} looks like a list of checksums; name only the text files")
    _refuse_held_out(named, "name only the other files")
    for entry in entries:
        if entry.is_dir():
            inside = sorted(path for path in entry.rglob("*") if path.is_file() and not _is_hidden(path, entry))
            if sums := [path for path in inside if CHECKSUMS.search(path.name)]:
                remark(f"{entry}: {counted(len(sums), 'checksum file')} left out ({sums[0].name})")
                inside = [path for path in inside if path not in sums]
            if not inside:
                raise UserError("empty-input", f"the input folder {entry} contains no file; name another")
            extracted = next((path.parent for path in inside if path.name == EXTRACT_DESCRIPTION), None)
            if extracted:
                train = extracted / EXTRACT_TRAINING
                raise UserError(
                    "held-out-input", f"{extracted} may have held-out text, by `data extract`; give {train}"
                )
            _refuse_held_out(inside, "name only the other files, or move it elsewhere")
            for folder in [path.parent for path in inside if path.name == "dataset_dict.json"]:
                splits = sorted({path.relative_to(folder).parts[0] for path in inside if path.parent.parent == folder})
                if "train" not in splits:
                    raise UserError("missing-split", f"{folder} has no split train; give one of {', '.join(splits)}")
                remark(f"{folder}: of its splits {', '.join(splits)}, only train is read")
                inside = [path for path in inside if (folder / "train" in path.parents) or folder not in path.parents]
            saved = {path.parent for path in inside if path.name == "dataset_info.json"}
            inside = [path for path in inside if path.parent not in saved or path.match("[!c]*.arrow")]  # no cache-*
            files += _training_split(entry, inside)
        elif entry.is_file():
            files.append(entry)
        else:
            raise UserError("missing-input", f"there is no file or folder {entry}; check the path")
    return files


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether it is hidden in the folder, or in a hidden one there: .git, or .cache, which `hf download` makes."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _training_split(folder: Path, files: list[Path]) -> list[Path]:
    """Of Parquet files in the Hub's layout, those of `train`, without the data set's card; others as they are."""
    found = {path: HUB_PART.search(path.absolute().as_posix()) for path in files}
    splits = {path: match[1] or match[2] for path, match in found.items() if match}
    names = sorted(set(splits.values()))
    if names and "train" not in names and len(names) > 1 and set(names) <= set(SPLITS):
        raise UserError("missing-split", f"{folder} has no split train; give one of {', '.join(names)}")
    if "train" in names and len(names) > 1:
        remark(f"{folder}: of its splits {', '.join(names)}, only train is read")
        files = [path for path in files if splits.get(path, "train") == "train"]
    return [path for path in files if not (splits and path.name in HUB_CARDS)]


def _refuse_held_out(files: Sequence[Path], cure: str) -> None:
    """Refuse a file that is held-out text by its name, beside a file that is training text by its name."""
    training = {path.parent for path in files if TRAINING_TEXT.search(path.name)}
    held_out = [path for path in files if path.stem.lower() in HELD_OUT and path.parent in training]
    if held_out:
        raise UserError("held-out-input", f"{held_out[0]} is held-out text, judging by its name; {cure}")


def check_readable(path: Path, *, as_reference: bool = False) -> None:
    """Refuse a file that cannot be read, or that is not plain text; the reference reads text with any bytes in it."""
    with reading(path), open(path, "rb") as file:
        head = file.read(DETECTION_BYTES)
    if head.startswith(COMPRESSED):
        raise UserError("not-text", f"{path} is compressed; read it with `bertrain data extract`")
    is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not as_reference
    form = "utf-16" if is_utf16 else recognize(head, path.name)
    if head.startswith(NOT_TEXT) or not (form or as_reference):
        raise UserError("not-text", f"{path} is binary, not text; leave it out")
    if form not in ("text", ""):
        raise UserError("not-text", f"{path} has the format {form}; read it with `bertrain data extract`")


def read_documents(files: Iterable[Path]) -> Iterator[Document]:
    """Each document as its list of non-empty sentences. The end of a file ends a document."""
    for path in files:
        check_readable(path)
        lines = read_lines(Span(str(path), 0, path.stat().st_size), Counter(), on_error="stop")
        for is_text, sentences in groupby((line.strip() for line in lines), bool):
            if is_text:
                yield list(sentences)


def read_lines(span: Span, counts: Counter[str], *, on_error: OnError, as_reference: bool = False) -> Iterator[str]:
    """The lines of a span without their newlines.

    A line longer than LONGEST_LINE, or with invalid UTF-8, is refused; with `on_error="skip"` such lines or bytes are
    dropped, and `counts` counts the lines. BERT's reference, on TensorFlow's file reader, always drops invalid bytes,
    and with `as_reference` all carriage returns too.
    """
    with reading(span.path), open(span.path, "rb") as file:
        position = file.seek(span.start)
        while position < span.stop:
            raw = file.readline(LONGEST_LINE + 1)
            if not raw:
                raise UserError("changed-input", f"{span.path} became shorter while it was read; run again")
            position += len(raw)
            if len(raw) > LONGEST_LINE:
                if on_error != "skip":
                    number = _line_number(span.path, position - len(raw))
                    cure = "put one sentence on each line, or skip such lines with --on-error skip"
                    what = f"line {number} of {span.path} has more than {LONGEST_LINE:,} bytes"
                    raise UserError("line-too-long", f"{what}; {cure}")
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(LONGEST_LINE)
                position = file.tell()
                counts["lines_skipped"] += 1
                continue
            if as_reference:
                raw = raw.replace(b"\r", b"")
            try:
                line = raw.decode()
            except UnicodeDecodeError:
                if on_error == "stop" and not as_reference:
                    number = _line_number(span.path, position - len(raw))
                    cure = "read it with `bertrain data extract`, which has --encoding"
                    raise UserError("not-utf8", f"line {number} of {span.path} is not UTF-8; {cure}") from None
                line = raw.decode(errors="ignore")
                counts["lines_not_utf8"] += 1
            if line:  # a last line without newline may have lost all its bytes
                yield line.removesuffix("\n")


def _line_number(path: str, position: int) -> int:
    with open(path, "rb") as file:
        blocks = iter(lambda: file.read(min(position - file.tell(), 1 << 20)), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)


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
