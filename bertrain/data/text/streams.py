"""Files as streams of bytes, decompressed and in UTF-8: .gz, .bz2, .xz, .zst, and tar archives of any of these."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bertrain.base.errors import UserError
from bertrain.base.files import reading
from bertrain.data.text.languages import guess_language

DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)
"""Raised by decompression of damaged or truncated input."""

BUFFER = 1 << 20
GUESSED = "cp1252"  # Windows-1252, which contains the letters of Latin-1
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
WESTERN = ("en", "de", "fr", "es", "it", "pt", "nl")  # languages that cp1252 writes


@dataclass(frozen=True)
class Stream:
    """The decompressed bytes of a file, or of a member of an archive. Messages use `name`."""

    name: str
    bytes: io.BufferedReader
    path: Path | None  # the file itself where it was not compressed, for readers that must seek
    encoding: str = "utf-8"  # what the bytes were before they were recoded


def open_streams(path: Path, report: Callable[[int], None]) -> Iterator[Stream]:
    """The stream of a file, or those of an archive's members in their order.

    Read each before taking the next. `report` is called with the number of bytes of the file that have been read.
    """
    with reading(path):
        file = _Counted(path, report)
    with file:
        yield from _unpack(str(path), path.name, io.BufferedReader(file, BUFFER), path)


def recode(stream: Stream, encoding: str) -> Stream:
    """The stream in UTF-8. Bytes that cannot be decoded become 0xff.

    "auto" is what `guess_encoding` says. Other encodings are those of files that are neither UTF-8 nor UTF-16 with a
    byte order mark, as folders mix them.
    """
    beginning = stream.bytes.peek(BUFFER)
    if encoding == "auto":
        encoding = guess_encoding(beginning)
    elif beginning.startswith(_UTF_16) and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        encoding = "utf-16"
    elif not (decode_beginning(beginning) or "").isascii():  # in others hardly any text is UTF-8
        encoding = "utf-8"
    if codecs.lookup(encoding).name == "utf-8":
        return stream  # the reader checks it
    decoder, rest = codecs.getincrementaldecoder(encoding)(_INVALID), b""

    def read_some(most: int) -> bytes:
        nonlocal rest
        block = b"more"
        while block and not rest:
            block = stream.bytes.read1(BUFFER)
            try:
                rest = decoder.decode(block, not block).encode("utf-8", _INVALID)
            except UnicodeError as error:  # no byte order mark where one must be
                raise EOFError(str(error)) from None
        some, rest = rest[:most], rest[most:]
        return some

    recoded: Any = _Unpacked(read_some)
    return Stream(stream.name, io.BufferedReader(recoded, BUFFER), stream.path, encoding)


def guess_encoding(beginning: bytes) -> str:
    """UTF-16 by its byte order mark; cp1252 for a text that is not UTF-8 and reads well in it; else UTF-8.

    It reads well if it is in a language of western Europe and bytes above 127 are few, become letters or common signs,
    and hardly any happens to be UTF-8. So neither a damaged UTF-8 file nor Cyrillic or Czech passes.
    """
    if beginning.startswith(_UTF_16):
        return "utf-16"
    if decode_beginning(beginning) is not None:
        return "utf-8"
    try:
        text = beginning.decode(GUESSED)
    except UnicodeDecodeError:
        return "utf-8"
    foreign = _NOT_ASCII.findall(text)
    num_sensible = sum(letter.isalpha() or letter in _SIGNS for letter in foreign)
    num_utf8 = len(_NOT_ASCII.findall(beginning.decode("utf-8", "ignore")))
    reads_well = num_sensible >= 0.9 * len(foreign) and num_utf8 <= 0.05 * len(foreign)
    reads_well &= len(foreign) < 0.2 * len(text)
    return GUESSED if reads_well and guess_language([text]) in WESTERN else "utf-8"


def is_guess(recoded: Stream, encoding: str) -> bool:
    """Whether `recode` read a stream as Windows-1252 ("auto"), or otherwise than as the given `encoding`."""
    if encoding == "auto":
        return recoded.encoding == GUESSED
    return codecs.lookup(recoded.encoding).name != codecs.lookup(encoding).name


def decode_beginning(beginning: bytes) -> str | None:
    """The beginning of a text, whose last character may be cut off; None if it is not UTF-8."""
    try:
        return codecs.utf_8_decode(beginning, "strict", False)[0]
    except UnicodeDecodeError:
        return None


_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SIGNS = "\xa0©®°·«»§£¢“”„‘’‚–—…€™•¡¿ºª½¼¾±"


def check_encoding(encoding: str) -> None:
    try:
        b" ".decode("utf-8" if encoding == "auto" else encoding, "ignore")  # nothing to decode would be accepted
    except (LookupError, UnicodeError):
        known = "auto, utf-8, latin-1, cp1252, utf-16 or another of Python's codecs"
        raise UserError("unknown-encoding", f"--encoding is {encoding!r}; it must be {known}") from None


_INVALID = "bertrain-invalid"  # an error handler: to a lone surrogate when decoding, to the byte 0xff when encoding
codecs.register_error(_INVALID, lambda bad: ("\udcff" if isinstance(bad, UnicodeDecodeError) else b"\xff", bad.end))  # type: ignore


class _Counted(io.FileIO):
    """A file that reports how far it has been read."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        super().__init__(path)
        self._report = report

    def readinto(self, buffer: Any) -> int:
        with reading(self.name):  # a failure of the machine, not damage
            count = super().readinto(buffer)
        self._report(self.tell())
        return count


class _Unpacked(io.RawIOBase):
    """Decompressed bytes up to the defect of a damaged file: only the read after them raises."""

    def __init__(self, read_some: Callable[[int], bytes]) -> None:
        self._read_some = read_some
        self._damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._damage is not None:
            raise self._damage
        filled = 0
        try:
            while filled < len(buffer) and (block := self._read_some(len(buffer) - filled)):
                buffer[filled : filled + len(block)] = block
                filled += len(block)
        except DAMAGE as error:
            if not filled:
                raise
            self._damage = error
        return filled


def _unpack(name: str, file_name: str, packed: io.BufferedReader, path: Path | None) -> Iterator[Stream]:
    """Undo one compression or archive after another, by the extensions of the file name."""
    stem, _, ending = file_name.lower().rpartition(".")
    if ending in _SHORT_FOR_TAR:
        stem, ending = f"{stem}.tar", _SHORT_FOR_TAR[ending]
    if stem and ending in _UNPACKERS:
        unpacked: Any = _Unpacked(_UNPACKERS[ending](packed))
        yield from _unpack(name, stem, io.BufferedReader(unpacked, BUFFER), None)
    elif stem and ending == "tar":
        yield from _members(name, packed, path)
    else:
        yield Stream(name, packed, path)


def _members(name: str, archive: io.BufferedReader, path: Path | None) -> Iterator[Stream]:
    with tarfile.open(fileobj=archive, mode="r|", bufsize=BUFFER) as tar:
        for member in tar:
            file_name = member.name.rpartition("/")[2]
            if member.isreg() and not file_name.startswith("."):
                content: Any = tar.extractfile(member)
                yield from _unpack(f"{name}:{member.name}", file_name, io.BufferedReader(content, BUFFER), None)
        end = tar.offset
    if path is not None:  # tarfile takes a damaged header for the end; compressed archives have checksums
        archive.seek(end)
        while block := archive.read(BUFFER):
            if block.strip(b"\0"):
                raise tarfile.ReadError("a member's header is damaged")


def _unpack_zstandard(packed: IO[bytes]) -> Callable[[int], bytes]:
    import pyarrow as pa

    stream = pa.CompressedInputStream(packed, "zstd")
    return lambda most: bytes(stream.read(min(most, 1 << 13)))  # a read that fails returns nothing, so reads are small


_UNPACKERS: dict[str, Callable[[Any], Callable[[int], bytes]]] = {
    "gz": lambda packed: gzip.GzipFile(fileobj=packed).read1,
    "bz2": lambda packed: bz2.BZ2File(packed).read1,
    "xz": lambda packed: lzma.LZMAFile(packed).read1,  # noqa: SIM115 (`packed` is closed elsewhere)
    "zst": _unpack_zstandard,
}
_SHORT_FOR_TAR = {"tgz": "gz", "tbz": "bz2", "tbz2": "bz2", "txz": "xz", "tzst": "zst"}
