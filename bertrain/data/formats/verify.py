"""`bertrain data verify`: compares a data folder with its hashes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.data.formats.hdf5 import row_checksum
from bertrain.data.formats.index import find_files, verify_index
from bertrain.data.formats.shards import MANIFEST
from bertrain.data.formats.source import open_data

DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Verified:
    """A folder found intact; `against` is None where there were no earlier hashes to compare with."""

    folder: str
    files: int
    against: str | None

    def sentence(self) -> str:
        if self.against is None:
            stored = f"the hashes of {counted(self.files, 'file')}, all readable, are now stored"
            return f"{self.folder}: no earlier hashes to compare with; {stored}"
        return f"{self.folder}: {counted(self.files, 'file')} verified against {self.against}"


def verify(folder: str | Path, *, checksums: str | Path | None = None) -> Verified:
    """Compare every file with its hash in the manifest or the index; a damaged one raises UserError.

    An existing index is used even if files are newer; without one, an index is built. With `checksums`, compare the
    rows of HDF5 files with a list of MLPerf's row checksums: a line for each file, its name and an MD5. Names are
    compared without their extension, since MLPerf's own lists and files differ in it.
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
        raise UserError("missing-data", f"no data folder at {folder}; check the path")
    expected = read_checksums(checksums)
    found: dict[str, Path] = {}
    for path in (path for path, kind in find_files(folder) if kind == "hdf5"):
        other = found.setdefault(_bare(path), path)
        if other is not path:
            raise UserError("ambiguous-name", f"{other} and {path} have the same name; verify one folder at a time")
    for name in expected:
        if name not in found:
            raise UserError("missing-file", f"{checksums} lists {name}, which is not in {folder}")
    for name, path in found.items():
        if name not in expected:
            raise UserError("unlisted-file", f"{folder} contains {path.name}, which {checksums} does not list")
        actual = row_checksum(path)
        if actual != expected[name]:
            raise UserError("wrong-checksum", f"the rows of {path} have the checksum {actual}, not {expected[name]}")
    return Verified(str(folder), len(found), str(checksums))


def read_checksums(path: Path) -> dict[str, str]:
    """MD5 by file name without extension, from a file with a name and an MD5 on each line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UserError("bad-checksum-list", f"there is no list of checksums at {path}, or it is not text") from None
    expected: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        digests = [word for word in words if DIGEST.fullmatch(word)]
        names = [word for word in words if not DIGEST.fullmatch(word)]
        if not words:
            continue
        if len(digests) != 1 or len(names) != 1:
            raise UserError("bad-checksum-list", f"line {number} of {path} does not have one file name and one MD5")
        if expected.setdefault(_bare(Path(names[0])), digests[0]) != digests[0]:
            raise UserError("bad-checksum-list", f"line {number} of {path} lists {names[0]} again, with another MD5")
    if not expected:
        raise UserError("bad-checksum-list", f"{path} has no checksums in it")
    return expected


def _bare(path: Path) -> str:
    return path.name.split(".")[0]
