"""`bertrain data verify`: whether a data folder is still what it was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.data.formats.hdf5 import row_checksum
from bertrain.data.formats.index import find_files, verify_index
from bertrain.data.formats.shards import MANIFEST
from bertrain.data.formats.source import open_data

DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Verified:
    """What was compared, and found equal; `against` is None where there was nothing to compare with."""

    folder: str
    files: int
    against: str | None

    def sentence(self) -> str:
        """What was compared, for people."""
        if self.against is None:
            return (
                f"{self.folder}: no earlier hashes to compare with; all of its {self.files} file(s) can be read, and "
                "their hashes are kept from now on"
            )
        return f"{self.folder}: {self.files} file(s) agree with {self.against}"


def verify(folder: str | Path, *, checksums: str | Path | None = None) -> Verified:
    """Compare every file with its hash in the manifest or the index; a damaged one raises UserError.

    An index is compared with as it is, however old it is by the files' dates; only where there is none, one is made.
    With `checksums`, compare the rows of HDF5 files with a list of MLPerf's row checksums, a line for each file: its
    name and an MD5. Names count without their ending, since MLPerf's own lists and files differ in it.
    """
    folder = Path(folder)
    if checksums is not None:
        return _verify_rows(folder, Path(checksums))
    against = None
    if (folder / MANIFEST).is_file():
        against = "the hashes of its manifest"
    elif folder.exists() and (index := verify_index(folder)):
        return Verified(str(folder), len(index["files"]), "the hashes of its index")
    return Verified(str(folder), open_data(folder, verify="hash").num_files, against)


def _verify_rows(folder: Path, checksums: Path) -> Verified:
    if not folder.exists():
        raise UserError(f"no data folder at {folder}")
    expected = read_checksums(checksums)
    found: dict[str, Path] = {}
    for path in (path for path, kind in find_files(folder) if kind == "hdf5"):
        other = found.setdefault(_bare(path), path)
        if other is not path:
            raise UserError(f"{other} and {path} have one name to {checksums}; verify their folders one at a time")
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
    expected: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        digests = [word for word in words if DIGEST.fullmatch(word)]
        names = [word for word in words if not DIGEST.fullmatch(word)]
        if not words:
            continue
        if len(digests) != 1 or len(names) != 1:
            raise UserError(f"line {number} of {path} is not a file's name and its MD5")
        if expected.setdefault(_bare(Path(names[0])), digests[0]) != digests[0]:
            raise UserError(f"line {number} of {path} lists {names[0]} again, with another MD5")
    if not expected:
        raise UserError(f"{path} lists no checksum")
    return expected


def _bare(path: Path) -> str:
    """A file's name without its ending, which is what it is listed under."""
    return path.name.split(".")[0]
