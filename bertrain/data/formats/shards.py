"""Reads prepared folders: memory-mapped Apache Arrow files with a manifest. `write.py` writes them.

A prepared folder contains `shard-00000.arrow` …, the vocabulary, and `manifest.json` with counts, the length histogram
and the SHA-256 of each file. Rows are unmasked examples,

    tokens          list<uint16 or uint32>   [CLS] A [SEP] B [SEP]
    segment_b       uint32                   where segment B begins
    is_random       bool                     whether B was drawn from another document

or, where `manifest.json` says `"masks": "static"`, examples with fixed masks: `tokens` are then masked, and there are
two more columns:

    mlm_positions   list<uint16 or uint32>   positions to predict in the example, ascending
    mlm_labels      list<uint16 or uint32>   the original tokens at these positions
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest, reading
from bertrain.base.schema import Count, JsonError, Name, check_value, load_json
from bertrain.data.formats.block import Block, Masks
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.source import DataSource
from bertrain.data.text.vocabulary import Vocabulary

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
VOCABULARY = "vocab.txt"
COLUMNS = {"tokens", "segment_b", "is_random"}
MASK_COLUMNS = {"mlm_positions", "mlm_labels"}  # of static masks

FILE = {"name": Name, "rows": Count, "bytes": Count, "sha256": str}
CONTENT = {
    "rows": Count,
    "masks": Literal["static", "dynamic"],
    "vocabulary": {"lower_case": bool, "sha256": str},
    "preparation": {"masked_lm_prob?": float, "max_seq_length?": Count | None, "max_predictions?": Count | None},
    "length_histogram": dict[str, Count],
    "files": [FILE],
}
"""The schema of a manifest."""


class ListColumn:
    """A column of lists over all shards of a folder, memory-mapped."""

    def __init__(self, arrays: list[pa.ListArray]) -> None:
        self._values: list[npt.NDArray[Any]] = [_view(array.values) for array in arrays]
        self._offsets: list[npt.NDArray[np.int32]] = [_view(array.offsets) for array in arrays]
        self._first_row = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
        self.counts: npt.NDArray[np.int32] = np.concatenate([np.diff(offsets) for offsets in self._offsets])

    def gather(self, rows: Ints) -> Ints:
        """The values of `rows`, one row after another."""
        out = np.empty(int(self.counts[rows].sum()), dtype=np.int64)
        shard_numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        position = 0
        for row, shard in zip(rows.tolist(), shard_numbers.tolist(), strict=True):
            offsets = self._offsets[shard]
            local = row - self._first_row[shard]
            begin, end = offsets[local], offsets[local + 1]
            out[position : position + end - begin] = self._values[shard][begin:end]
            position += end - begin
        return out


class Shards(DataSource):
    """A prepared folder, open for reading: lengths of all rows in memory, tokens memory-mapped."""

    layout = "arrow"

    def __init__(self, folder: Path, manifest: dict[str, Any], vocabulary: Vocabulary) -> None:
        self.folder, self.manifest, self.vocabulary = folder, manifest, vocabulary
        self.num_files = len(manifest["files"])
        # The manifest contains the hash of every shard.
        self.fingerprint = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        wanted = COLUMNS | (MASK_COLUMNS if manifest["masks"] == "static" else set())
        batches = [_open_shard(folder / file["name"], wanted) for file in manifest["files"]]
        self._first_row = np.concatenate([[0], np.cumsum([batch.num_rows for batch in batches])])
        self._tokens = ListColumn([batch.column("tokens") for batch in batches])
        self.lengths = self._tokens.counts
        if len(self) != manifest["rows"]:
            raise UserError("damaged-data", f"{folder} has {len(self)} rows, not {manifest['rows']}; prepare it again")
        self._segment_b = np.concatenate([_view(batch.column("segment_b")) for batch in batches])
        labels = [_view(batch.column("is_random").cast(pa.uint8())).astype(bool) for batch in batches]
        self._is_random = np.concatenate(labels)
        preparation = manifest["preparation"]
        self.max_seq_length = preparation.get("max_seq_length") or int(self.lengths.max())
        self.predictions, self.max_predictions = None, 0
        if manifest["masks"] == "static":
            self._mlm_positions = ListColumn([batch.column("mlm_positions") for batch in batches])
            self._mlm_labels = ListColumn([batch.column("mlm_labels") for batch in batches])
            self.predictions = self._mlm_positions.counts
            self.max_predictions = preparation.get("max_predictions") or int(self.predictions.max())
            unequal = np.flatnonzero(self.predictions != self._mlm_labels.counts)
            if len(unequal):
                raise self._damaged(int(unequal[0]), "it has different numbers of masked positions and labels")

    @staticmethod
    def open(folder: str | Path, *, verify: str = "hash") -> Shards:
        """Open a prepared folder; `verify` checks each file's "hash" or only its "size"."""
        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise UserError("not-prepared", f"{folder} is not a prepared data folder: it has no {MANIFEST}")
        try:
            with reading(folder / MANIFEST):
                written = load_json(folder / MANIFEST, {"schema_version": int})
            if (version := written["schema_version"]) != SCHEMA_VERSION:
                raise UserError(
                    "other-schema", f"{folder} has schema {version}, not {SCHEMA_VERSION}; prepare the data again"
                )
            manifest = check_value(written, CONTENT)
        except JsonError as error:
            raise UserError(
                "damaged-data", f"{folder / MANIFEST} is damaged ({error}); prepare the data again"
            ) from None
        if not manifest["rows"]:
            raise UserError("empty-data", f"the data folder {folder} contains no example")
        for file in manifest["files"]:
            _check_file(folder / file["name"], file, verify)
        words = manifest["vocabulary"]
        vocabulary = Vocabulary.load(folder / VOCABULARY, lower_case=words["lower_case"])
        if vocabulary.hash != words["sha256"]:
            raise UserError("damaged-data", f"{folder / VOCABULARY} was changed; prepare the data again")
        return Shards(folder, manifest, vocabulary)

    def read(self, rows: Ints) -> Block:
        masks = None
        if self.predictions is not None:
            counts = self.predictions[rows].astype(np.int64)
            masks = Masks(counts, self._mlm_positions.gather(rows), self._mlm_labels.gather(rows))
        lengths = self.lengths[rows].astype(np.int64)
        segment_b = self._segment_b[rows].astype(np.int64)
        block = Block(self._tokens.gather(rows), lengths, segment_b, self.is_random(rows), masks)
        self._refuse_damage(rows, block)
        return block

    def _refuse_damage(self, rows: Ints, block: Block) -> None:
        """Refuse values that would index out of bounds later; the files' hashes may not have been compared."""
        words = len(self.vocabulary.words)
        checks = [
            (block.tokens >= words, block.lengths, f"a token id outside the vocabulary of {words} words"),
            (block.segment_b > block.lengths, np.ones_like(rows), "a segment B that begins after its end"),
        ]
        if block.masks is not None:
            counts = block.masks.counts
            is_past_end = block.masks.positions >= np.repeat(block.lengths, counts)
            checks += [
                (is_past_end, counts, "a masked position after its end"),
                (block.masks.labels >= words, counts, "a label outside the vocabulary"),
            ]
        for is_bad, counts, what in checks:
            if is_bad.any():
                example = np.searchsorted(np.cumsum(counts), int(is_bad.argmax()), side="right")
                raise self._damaged(int(rows[example]), f"it contains {what}")

    def _damaged(self, row: int, complaint: str) -> UserError:
        shard = int(np.searchsorted(self._first_row, row, side="right")) - 1
        path = self.folder / self.manifest["files"][shard]["name"]
        row -= int(self._first_row[shard])
        return UserError("damaged-data", f"{path} is damaged in row {row}: {complaint}; prepare the data again")


def _check_file(path: Path, expected: dict[str, Any], verify: str) -> None:
    if not path.is_file():
        raise UserError("missing-shard", f"the shard {path} is missing; prepare the data again")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise UserError("damaged-data", f"the shard {path} has {size} bytes, unlike its manifest; prepare it again")
    if verify == "hash" and file_digest(path)[1] != expected["sha256"]:
        raise UserError("damaged-data", f"the shard {path} is damaged (SHA-256); prepare the data again")


def _open_shard(path: Path, wanted: set[str]) -> pa.RecordBatch:
    """The record batch of a shard, its columns, their types and list offsets checked."""
    try:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        batch.validate()
        is_sound = all(_is_sound(name, batch.column(name)) for name in batch.schema.names)
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        reason = str(error).split("\n")[0]
        raise UserError("damaged-data", f"the shard {path} cannot be read: {reason}; prepare the data again") from None
    if not is_sound or not wanted <= set(batch.schema.names):
        raise UserError("damaged-data", f"the shard {path} is damaged (columns); prepare the data again")
    return batch


def _view(array: pa.Array) -> npt.NDArray[Any]:
    """An array of whole numbers without nulls, not copied. `to_numpy` would import pandas, where that is installed."""
    kind = np.dtype(str(array.type))
    return np.frombuffer(array.buffers()[1] or b"", kind, len(array), array.offset * kind.itemsize)


def _is_sound(name: str, column: pa.Array) -> bool:
    """Whether a column has its expected type, no null, and consecutive lists."""
    if name in ("is_random", "segment_b"):
        return column.type == (pa.bool_() if name == "is_random" else pa.uint32()) and not column.null_count
    if not pa.types.is_list(column.type) or column.null_count or column.values.null_count:
        return False
    is_number = column.values.type in (pa.uint16(), pa.uint32())
    offsets = _view(column.offsets)
    is_ascending = offsets[0] >= 0 and offsets[-1] <= len(column.values) and bool((np.diff(offsets) >= 0).all())
    return is_number and is_ascending
