"""Examples on disk: Apache Arrow files with a manifest, memory-mapped and read without copying.

A prepared folder holds `shard-00000.arrow` …, the vocabulary, and `manifest.json` with counts, the
length histogram and the SHA-256 of each file. Rows are unmasked examples:

    tokens        list<uint16 or uint32>   [CLS] A [SEP] B [SEP]
    segment_b     uint32                   where segment B begins
    is_random     bool                     whether B was drawn from another document

The folder is written under another name beside its place and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertrain.data.masking import Ints
from bertrain.data.tokenizer import Vocabulary
from bertrain.errors import UserError
from bertrain.files import new_folder, refuse_occupied

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocab.txt"


@dataclass(frozen=True)
class Example:
    """One row: the tokens with their special ones, where segment B begins, and the next-sentence label."""

    tokens: list[int]
    segment_b: int
    is_random: bool


def write_shards(
    out: Path,
    examples: Iterable[Example],
    vocabulary: Vocabulary,
    *,
    preparation: dict[str, Any],
    rows_per_shard: int,
) -> dict[str, Any]:
    """Write a prepared folder and return its manifest; `preparation` records how the examples were made."""
    refuse_occupied(out)
    with new_folder(out) as folder:
        return _write_into(folder, examples, vocabulary, preparation, rows_per_shard)


def _write_into(
    folder: Path,
    examples: Iterable[Example],
    vocabulary: Vocabulary,
    preparation: dict[str, Any],
    rows_per_shard: int,
) -> dict[str, Any]:
    token_type = pa.uint16() if len(vocabulary.words) <= 1 << 16 else pa.uint32()
    histogram: dict[int, int] = {}
    files: list[dict[str, Any]] = []
    waiting: list[Example] = []

    def flush() -> None:
        path = folder / f"shard-{len(files):05d}.arrow"
        _write_shard(path, waiting, token_type)
        size, digest = file_digest(path)
        files.append({"name": path.name, "rows": len(waiting), "bytes": size, "sha256": digest})
        waiting.clear()

    for example in examples:
        histogram[len(example.tokens)] = histogram.get(len(example.tokens), 0) + 1
        waiting.append(example)
        if len(waiting) == rows_per_shard:
            flush()
    if waiting:
        flush()
    if not files:
        raise UserError("the input holds no text that makes an example: sentences on lines, documents apart")
    vocabulary.save(folder / VOCABULARY)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "rows": sum(file["rows"] for file in files),
        "tokens": sum(length * count for length, count in histogram.items()),
        "vocabulary": {
            "size": len(vocabulary.words),
            "lower_case": vocabulary.lower_case,
            "sha256": vocabulary.hash,
        },
        "preparation": preparation,
        "length_histogram": {str(length): histogram[length] for length in sorted(histogram)},
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _write_shard(path: Path, rows: list[Example], token_type: pa.DataType) -> None:
    table = pa.record_batch(
        {
            "tokens": pa.array([row.tokens for row in rows], pa.list_(token_type)),
            "segment_b": pa.array([row.segment_b for row in rows], pa.uint32()),
            "is_random": pa.array([row.is_random for row in rows], pa.bool_()),
        }
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)


def file_digest(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    with open(path, "rb") as stream:
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()


class Shards:
    """A prepared folder, open for reading: lengths of all rows in memory, the tokens mapped from disk."""

    def __init__(self, folder: Path, manifest: dict[str, Any], vocabulary: Vocabulary) -> None:
        self.folder, self.manifest, self.vocabulary = folder, manifest, vocabulary
        self._values: list[npt.NDArray[Any]] = []
        self._offsets: list[npt.NDArray[np.int32]] = []
        segment_b, is_random = [], []
        for file in manifest["files"]:
            tokens, shard_segment_b, shard_is_random = _open_shard(folder / file["name"])
            self._values.append(tokens.values.to_numpy())
            self._offsets.append(tokens.offsets.to_numpy())
            segment_b.append(shard_segment_b)
            is_random.append(shard_is_random)
        rows = [len(offsets) - 1 for offsets in self._offsets]
        if sum(rows) != manifest["rows"]:
            raise UserError(f"{folder} holds {sum(rows)} rows where its manifest says {manifest['rows']}")
        self._first_row = np.concatenate([[0], np.cumsum(rows)])
        self.lengths: npt.NDArray[np.int32] = np.concatenate([np.diff(offsets) for offsets in self._offsets])
        self._segment_b = np.concatenate(segment_b)
        self._is_random = np.concatenate(is_random)

    @staticmethod
    def open(folder: str | Path, *, verify: str = "hash") -> Shards:
        """Open a prepared folder; `verify` checks each file's "hash" or only its "size"."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no data folder at {folder}; make one with `bertrain data prepare INPUT --out {folder}`")
        if not (folder / MANIFEST).is_file():
            raise UserError(f"{folder} is not a prepared data folder: it has no {MANIFEST}")
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            version = manifest["schema_version"]
            if version != SCHEMA_VERSION:
                raise UserError(f"{folder} was written in layout {version}; this bertrain reads {SCHEMA_VERSION}")
            if not manifest["rows"]:
                raise UserError(f"the data folder {folder} holds no example")
            for file in manifest["files"]:
                _check_file(folder / file["name"], file, verify)
            words = manifest["vocabulary"]
            vocabulary = Vocabulary.load(folder / VOCABULARY, lower_case=words["lower_case"])
            if vocabulary.hash != words["sha256"]:
                raise UserError(f"{folder / VOCABULARY} is not the vocabulary that {folder} was prepared with")
            return Shards(folder, manifest, vocabulary)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{folder / MANIFEST} is damaged; prepare the data again") from None

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, rows: Ints) -> npt.NDArray[np.int64]:
        """The tokens of `rows`, one after another."""
        out = np.empty(int(self.lengths[rows].sum()), dtype=np.int64)
        shard_numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        position = 0
        for row, shard in zip(rows.tolist(), shard_numbers.tolist(), strict=True):
            offsets = self._offsets[shard]
            local = row - self._first_row[shard]
            begin, end = offsets[local], offsets[local + 1]
            out[position : position + end - begin] = self._values[shard][begin:end]
            position += end - begin
        return out

    def segment_b(self, rows: Ints) -> Ints:
        """Where segment B begins in each of `rows`."""
        return self._segment_b[rows].astype(np.int64)

    def is_random(self, rows: Ints) -> Ints:
        """Next-sentence label of each of `rows`: 1 where B was drawn at random, as in BERT's reference."""
        return self._is_random[rows].astype(np.int64)


def _check_file(path: Path, expected: dict[str, Any], verify: str) -> None:
    if not path.is_file():
        raise UserError(f"the shard {path} is missing; its manifest lists it")
    if path.stat().st_size != expected["bytes"]:
        raise UserError(
            f"the shard {path} is {path.stat().st_size} bytes long where its manifest says {expected['bytes']}"
        )
    if verify == "hash" and file_digest(path)[1] != expected["sha256"]:
        raise UserError(f"the shard {path} is damaged: its SHA-256 is not the manifest's; prepare the data again")


def _open_shard(path: Path) -> tuple[pa.ListArray, npt.NDArray[Any], npt.NDArray[Any]]:
    try:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"the shard {path} cannot be read: {error}") from None
    return (
        batch.column("tokens"),
        batch.column("segment_b").to_numpy(),
        batch.column("is_random").to_numpy(zero_copy_only=False),
    )
