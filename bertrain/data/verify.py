"""`bertrain data verify`: whether a data folder is still what it was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bertrain.data.source import open_data
from bertrain.errors import UserError

DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Verified:
    """What was compared, and found equal."""

    folder: str
    files: int
    against: str


def verify(folder: str | Path, *, checksums: str | Path | None = None) -> Verified:
    """Compare every file with its hash in the manifest or the index; a damaged one raises UserError.

    With `checksums`, compare the rows of HDF5 files with a list of MLPerf's row checksums, a line for each file: its
    name and an MD5. Names count without their ending, since MLPerf's own lists and files differ in it.
    """
    folder = Path(folder)
    if checksums is not None:
        return _verify_rows(folder, Path(checksums))
    source = open_data(folder, verify="hash")
    against = "its manifest" if source.layout == "arrow" else "its index"
    return Verified(str(folder), source.num_files, f"the hashes of {against}")


def _verify_rows(folder: Path, checksums: Path) -> Verified:
    from bertrain.data.hdf5 import row_checksum
    from bertrain.data.index import find_files

    if not folder.exists():
        raise UserError(f"no data folder at {folder}")
    expected = read_checksums(checksums)
    found = {path.name.split(".")[0]: path for path, kind in find_files(folder) if kind == "hdf5"}
    for name in expected:
        if name not in found:
            raise UserError(f"{checksums} lists {name}, which {folder} does not hold")
    for name, path in found.items():
        if name not in expected:
            raise UserError(f"{folder} holds {path.name}, which {checksums} does not list")
        actual = row_checksum(path)
        if actual != expected[name]:
            raise UserError(f"the rows of {path} have the checksum {actual}, and {checksums} says {expected[name]}")
    return Verified(str(folder), len(found), str(checksums))


def read_checksums(path: Path) -> dict[str, str]:
    """MD5 by file name, without its ending, of a list with a name and an MD5 on each line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"no list of checksums at {path}") from None
    expected = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        digests = [word for word in words if DIGEST.fullmatch(word)]
        names = [word for word in words if not DIGEST.fullmatch(word)]
        if not words:
            continue
        if len(digests) != 1 or len(names) != 1:
            raise UserError(f"line {number} of {path} is not a file's name and its MD5")
        expected[Path(names[0]).name.split(".")[0]] = digests[0]
    if not expected:
        raise UserError(f"{path} lists no checksum")
    return expected
