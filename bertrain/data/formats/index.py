"""The index of HDF5 and TFRecord folders: the length, predictions and place of each row, and the files' hashes.

It is built once, by reading all files, which also finds inconsistent records. It is stored in the data folder as
`.bertrain-index`, or in the user's cache folder if the data folder is not writable. It contains the SHA-256 of every
file, as the manifest of a prepared folder does.

    lengths.bin      int32    tokens of each row
    predictions.bin  int32    its predictions; absent where masks are drawn at load time
    is_random.bin    bool     its next-sentence label
    places.bin       int64    its record: the number in an HDF5 file, the byte offset in a TFRecord file
    parts.bin        int32    which of the examples of that record it is
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.files import cache_folder, file_digest, is_writable, new_folder, reading, write_atomically
from bertrain.base.formatting import counted
from bertrain.base.schema import Count, JsonError, Name, load_json
from bertrain.data.formats import hdf5, tfrecord
from bertrain.data.formats.block import Block, flat_ranges
from bertrain.data.formats.layouts import DECODERS, BadRecord, Fields
from bertrain.data.formats.masking import Ints
from bertrain.data.text.streams import decode_beginning

INDEX_VERSION = 1
INDEX = ".bertrain-index"
ARRAYS: dict[str, npt.DTypeLike] = {
    "lengths": np.int32,
    "predictions": np.int32,
    "is_random": np.bool_,
    "places": np.int64,
    "parts": np.int32,
}
MAKE_DATA = "`bertrain data prepare` makes data of text, `bertrain train` does all steps"
BESIDE_DATA = {".lst", ".json", ".txt", ".md5", ".chk", ".md"}  # other files in data folders
NAMES = {("hdf5", decoder): f"hdf5-{decoder}" for decoder in hdf5.FIELDS}
NAMES |= {("tfrecord", "fixed"): "tfrecord", ("tfrecord", "graphcore"): "tfrecord-packed"}
"""The names of layouts by the kind of file and its decoder."""


STAMP = {"name": str, "bytes": Count, "mtime_ns": int}
"""Name, size and time of a file: if equal, it is taken to be unchanged."""
CONTENT = {
    "index_version": Literal[1],  # INDEX_VERSION
    "sha256?": str,  # of the rest; older ones lack it
    "layout": Literal[tuple(NAMES.values())],
    "max_seq_length": Count,
    "max_predictions": Count,
    "largest_word": {"number": int, "name": str, "row": Count},
    "files": [STAMP | {"rows": Count, "sha256": str}],
    "arrays": [{"name": Name, "bytes": Count, "sha256": str}],
}
"""The schema of index.json."""


def open_index(folder: Path, *, verify: str, note: Callable[[str], None]) -> Path:
    """The folder of an up-to-date index of `folder`, built if necessary; `verify` as for prepared folders.

    Of several processes, one builds the index while the others wait.
    """
    files = find_files(folder)
    stamps = [_stamp(folder, path) for path, _ in files]
    places = _index_places(folder)
    for place in places:
        if _is_fresh(place, stamps):
            _verify(folder, place, verify)
            return place
    writable = next((place for place in places if _can_hold(place)), None)
    if writable is None:
        raise UserError(
            "unwritable-index", f"cannot write an index to {folder} or {places[-1].parent}; make one writable"
        )
    with _locked(writable):
        if not _is_fresh(writable, stamps):
            shutil.rmtree(writable, ignore_errors=True)
            with new_folder(writable) as partial:
                _build(folder, files, stamps, partial, note)
    return writable


def verify_index(folder: Path) -> dict[str, Any] | None:
    """Compare all files with the hashes of the latest index, which is returned; None where there is none.

    The index may be older than the files and is not rebuilt: the question is whether they changed.
    """
    names = {_stamp(folder, path)["name"] for path, _ in find_files(folder)}
    kept = [place for place in _index_places(folder) if (place / "index.json").is_file()]
    if not kept:
        return None
    place = max(kept, key=lambda place: (place / "index.json").stat().st_mtime_ns)
    index = read_index(place)
    listed = {file["name"] for file in index["files"]}
    if names != listed:
        name = min(names ^ listed)
        change = "removed" if name in listed else "added"
        raise UserError(
            "changed-data", f"{folder}: {name} was {change}; to accept this change, remove the index {place}"
        )
    _verify(folder, place, "hash")
    return index


def lengths_if_unchanged(folder: Path, vocabulary_hash: str, fingerprint: str) -> npt.NDArray[np.int32] | None:
    """The lengths of all rows from an existing index, if the data still has this fingerprint."""
    try:
        stamps = [_stamp(folder, path) for path, _ in find_files(folder)]
        for place in _index_places(folder):
            if _is_fresh(place, stamps) and fingerprint_of(read_index(place), vocabulary_hash) == fingerprint:
                return map_arrays(place)["lengths"]
    except UserError:  # it is not a data folder any more
        pass
    return None


def fingerprint_of(index: dict[str, Any], vocabulary_hash: str) -> str:
    """SHA-256 of the names and hashes of all files and of the vocabulary."""
    files = [(file["name"], file["sha256"]) for file in index["files"]]
    return hashlib.sha256(json.dumps([index["layout"], files, vocabulary_hash]).encode()).hexdigest()


def _build(
    folder: Path, files: list[tuple[Path, str]], stamps: list[dict[str, Any]], out: Path, note: Callable[[str], None]
) -> None:
    layout = _common_layout(files)
    kind, decoder = next(key for key, name in NAMES.items() if name == layout)
    note(f"{folder}: {layout}, {counted(len(files), 'file')}; reading all files once to build an index")
    limits: dict[str, Any] = {"max_seq_length": 0, "max_predictions": 0}
    limits["largest_word"] = {"number": -1, "name": "", "row": 0}
    entries = []
    with ExitStack() as stack:
        names = [name for name in ARRAYS if name != "predictions" or decoder != "encoded"]
        streams = {name: stack.enter_context(open(out / f"{name}.bin", "wb")) for name in names}
        for (path, _), stamp in zip(files, stamps, strict=True):
            rows = 0
            for block, places, parts in _blocks_of(path, stamp["name"], kind, decoder, limits):
                columns = {
                    "lengths": block.lengths,
                    "is_random": block.is_random,
                    "places": np.repeat(places, parts),
                    "parts": flat_ranges(np.zeros(len(parts), dtype=np.int64), parts),
                }
                if block.masks is not None:
                    columns["predictions"] = block.masks.counts
                for name, values in columns.items():
                    streams[name].write(values.astype(ARRAYS[name]).tobytes())
                rows += len(block)
            entries.append(stamp | {"rows": rows, "sha256": file_digest(path)[1]})
    if not sum(entry["rows"] for entry in entries):
        raise UserError("empty-data", f"the data folder {folder} contains no example")
    digests = [(f"{name}.bin", *file_digest(out / f"{name}.bin")) for name in names]
    content = {"index_version": INDEX_VERSION, "layout": layout} | limits | {"files": entries}
    content["arrays"] = [{"name": name, "bytes": size, "sha256": digest} for name, size, digest in digests]
    content["sha256"] = _digest(content)
    write_atomically(out / "index.json", json.dumps(content, indent=1) + "\n")


def _digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _common_layout(files: list[tuple[Path, str]]) -> str:
    found: dict[str, Path] = {}
    for path, kind in files:
        inside = hdf5.layout_of(path) if kind == "hdf5" else tfrecord.layout_of(path)
        found.setdefault(NAMES[kind, inside], path)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise UserError("mixed-layouts", f"{first} is {one} and {second} is {other}; put them into separate folders")
    return next(iter(found))


def _blocks_of(
    path: Path, name: str, kind: str, decoder: str, limits: dict[str, Any]
) -> Iterator[tuple[Block, Ints, Ints]]:
    """The examples of a file in chunks, with the place of each record and the number of its examples.

    Raises the `limits` to those of the file.
    """
    records_before = 0
    try:
        for places, fields in hdf5.scan(path, decoder) if kind == "hdf5" else tfrecord.scan(path, decoder):
            block, parts = DECODERS[decoder](fields)
            width = _width(fields, "input_ids", "packed_input_ids") or int(block.lengths.max(initial=0))
            limits["max_seq_length"] = max(limits["max_seq_length"], width)
            words = [(block.tokens, block.offsets)]
            if block.masks is not None:
                most = _width(fields, "masked_lm_positions") or int(block.masks.counts.max(initial=0))
                limits["max_predictions"] = max(limits["max_predictions"], most)
                words.append((block.masks.labels, block.masks.offsets))
            largest = block.largest_word
            if largest > limits["largest_word"]["number"]:
                found = [(offsets, np.flatnonzero(values == largest)[:1]) for values, offsets in words]
                example = min(int(np.searchsorted(offsets, one, "right")[0]) - 1 for offsets, one in found if len(one))
                record = records_before + int(np.searchsorted(np.cumsum(parts), example, side="right"))
                limits["largest_word"] = {"number": largest, "name": name, "row": record}
            yield block, places, parts
            records_before += len(places)
    except BadRecord as bad:
        raise damaged_record(path, f"row {records_before + bad.number}", bad) from None


def _width(fields: Fields, *names: str) -> int:
    """The width of the first of these fields that is a 2-D array; 0 where they are variable-length."""
    return next((int(fields[name].shape[1]) for name in names if getattr(fields.get(name), "ndim", 0) == 2), 0)


def damaged_record(path: Path, where: str, bad: BadRecord) -> UserError:
    return UserError("damaged-data", f"{path}, {where}: {bad.complaint}; repair or remove the file")


def find_files(folder: Path) -> list[tuple[Path, str]]:
    """The data files of `folder` (which may be one file) in order of name, each with its kind."""
    if folder.is_file():
        paths = [folder]
    else:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in BESIDE_DATA)
        paths = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not paths:
        what = f"{folder} is not a data folder: it has no manifest.json, HDF5 or TFRecord file"
        raise UserError("not-prepared", f"{what}; {MAKE_DATA}")
    return [(path, _kind_of(path)) for path in paths]


def _kind_of(path: Path) -> str:
    with reading(path), open(path, "rb") as stream:
        first_bytes = stream.read(16)
    if first_bytes.startswith(hdf5.SIGNATURE):
        return "hdf5"
    if tfrecord.is_tfrecord(first_bytes):
        return "tfrecord"
    if first_bytes.startswith(b"\x1f\x8b"):
        unpack = f"gunzip < {shlex.quote(str(path))} > FILE"  # which takes any name
        raise UserError("compressed-data", f"{path} is compressed with gzip; unpack it into another folder: {unpack}")
    text = decode_beginning(first_bytes)
    if text and "".join(text.split()).isprintable():
        raise UserError("not-prepared", f"{path} is text, which is not prepared yet; {MAKE_DATA}")
    raise UserError("unknown-layout", f"{path} is neither an HDF5 nor a TFRecord file; repair or remove it")


def _index_places(folder: Path) -> list[Path]:
    """Beside the data, then in the user's cache folder."""
    places = [folder / INDEX if folder.is_dir() else folder.with_name(f".{folder.name}{INDEX}")]
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    with suppress(OSError):
        places.append(cache_folder() / f"{name}{INDEX}")
    return places


def _can_hold(place: Path) -> bool:
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
    return is_writable(place.parent)


def _stamp(folder: Path, path: Path) -> dict[str, Any]:
    name = path.name if folder.is_file() else str(path.relative_to(folder))
    return {"name": name, "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}


def path_of(folder: Path, entry: dict[str, Any]) -> Path:
    return folder if folder.is_file() else folder / entry["name"]


def _is_fresh(place: Path, stamps: list[dict[str, Any]]) -> bool:
    try:
        files = read_index(place)["files"]
        return [{key: file[key] for key in STAMP} for file in files] == stamps
    except UserError:
        return False


def _verify(folder: Path, place: Path, verify: str) -> None:
    """Compare the files of the index and all data files with the index."""
    index = read_index(place)
    for array in index["arrays"]:
        path = place / array["name"]
        size = path.stat().st_size if path.is_file() else -1
        if size != array["bytes"] or (verify == "hash" and file_digest(path)[1] != array["sha256"]):
            raise UserError("damaged-index", f"the index {place} is damaged; remove it, and it will be rebuilt")
    if verify == "hash":
        for file in index["files"]:
            path = path_of(folder, file)
            if file_digest(path)[1] != file["sha256"]:
                raise UserError("damaged-data", f"{path} is damaged (SHA-256); to accept it, remove the index {place}")


def read_index(place: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = load_json(place / "index.json", CONTENT)
        if index.get("sha256", "") not in ("", _digest(index)):
            raise JsonError("its SHA-256 differs")
        return index
    except (OSError, JsonError) as error:
        raise UserError(
            "damaged-index", f"the index {place} is damaged ({error}); remove it, and it will be rebuilt"
        ) from None


def map_arrays(index: Path) -> dict[str, npt.NDArray[Any]]:
    files = {name: index / f"{name}.bin" for name in ARRAYS}
    return {name: np.asarray(np.memmap(file, ARRAYS[name], "r")) for name, file in files.items() if file.is_file()}


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold a lock, so that one process at a time builds the index; the system frees it when the process ends."""
    try:
        lock = open(place.with_name(f"{place.name}.lock"), "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError("unwritable-index", f"cannot write the index {place}: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
