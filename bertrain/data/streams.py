"""Files as streams of bytes, whatever they are packed in: .gz, .bz2, .xz, .zst, and tar archives of any of these."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bertrain.errors import UserError

DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)
"""What unpacking raises on damaged or truncated input; an OSError with an errno is the machine's fault instead."""

BUFFER = 1 << 20


@dataclass(frozen=True)
class Stream:
    """The unpacked bytes of a file, or of a member of an archive, under the name that messages use."""

    name: str
    bytes: io.BufferedReader
    path: Path | None
    """The file itself where nothing was unpacked, for readers that must seek."""


def open_streams(path: Path, report: Callable[[int], None]) -> Iterator[Stream]:
    """The one stream of a file, or those of an archive's members in their order.

    Each is to be read before the next is asked for. `report` is told how many bytes of the file have been read.
    """
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed below, after the last stream)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    with file:
        counted: Any = _Counted(file, report)
        yield from _unpack(str(path), path.name, io.BufferedReader(counted, BUFFER), path)


class _Counted(io.RawIOBase):
    """A file that says how far it has been read."""

    def __init__(self, file: io.FileIO, report: Callable[[int], None]) -> None:
        self._file = file
        self._report = report

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._report(self._file.tell())
        return count


def _unpack(name: str, file_name: str, packed: io.BufferedReader, path: Path | None) -> Iterator[Stream]:
    """Take off one wrapping after another, as the endings of the file name say."""
    stem, _, ending = file_name.lower().rpartition(".")
    if ending in _SHORT_FOR_TAR:
        stem, ending = f"{stem}.tar", _SHORT_FOR_TAR[ending]
    if stem and ending in _UNPACKERS:
        unpacked = io.BufferedReader(_UNPACKERS[ending](packed), BUFFER)
        yield from _unpack(name, stem, unpacked, None)
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
    if path is not None:  # tarfile takes a damaged header for the end; compressed archives have checksums instead
        archive.seek(end)
        while block := archive.read(BUFFER):
            if block.strip(b"\0"):
                raise tarfile.ReadError("a member's header is damaged")


def _unpack_zstandard(packed: IO[bytes]) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(packed, "zstd")


_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    "gz": lambda packed: gzip.GzipFile(fileobj=packed),
    "bz2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zst": _unpack_zstandard,
}
_SHORT_FOR_TAR = {"tgz": "gz", "tbz": "bz2", "tbz2": "bz2", "txz": "xz", "tzst": "zst"}
