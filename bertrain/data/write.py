"""Examples to a prepared folder: Arrow files and their manifest (the layout is described in shards.py).

The folder is written under another name beside its place and renamed when it is whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertrain.data.masking import Ints
from bertrain.data.rows import Rows, in_batches
from bertrain.data.shards import MANIFEST, SCHEMA_VERSION, VOCABULARY
from bertrain.data.tokenizer import Vocabulary
from bertrain.errors import UserError
from bertrain.files import file_digest, new_folder, refuse_occupied, write_atomically

Histogram = Counter[int]


@dataclass(frozen=True)
class Example:
    """One row: the tokens with their special ones, where segment B begins, and the next-sentence label.

    Where masks were drawn at preparation, `tokens` are masked, and positions and labels say what stood where.
    """

    tokens: list[int]
    segment_b: int
    is_random: bool
    mlm_positions: list[int] | None = None
    mlm_labels: list[int] | None = None


def write_shards(
    out: Path,
    examples: Iterable[Example],
    vocabulary: Vocabulary,
    *,
    preparation: dict[str, Any],
    rows_per_shard: int | Sequence[int],
) -> dict[str, Any]:
    """Write a prepared folder and return its manifest; `preparation` records how the examples were made.

    `rows_per_shard` is the size of all shards, or of each of them in turn.
    """
    refuse_occupied(out)
    with new_folder(out) as folder:
        return _write_into(folder, examples, vocabulary, preparation, rows_per_shard)


def _write_into(
    folder: Path,
    examples: Iterable[Example],
    vocabulary: Vocabulary,
    preparation: dict[str, Any],
    rows_per_shard: int | Sequence[int],
) -> dict[str, Any]:
    files: list[dict[str, Any]] = []
    histogram: Histogram = Counter()
    has_masks = False
    for batch in in_batches(examples, rows_per_shard):
        rows = rows_of_examples(batch, token_dtype(vocabulary))
        has_masks = rows.mlm_positions is not None
        files.append(write_shard(folder / shard_name(len(files)), rows))
        histogram += count_lengths(rows)
    return finish_folder(folder, vocabulary, files, histogram, has_masks=has_masks, preparation=preparation)


def finish_folder(
    folder: Path,
    vocabulary: Vocabulary,
    files: list[dict[str, Any]],
    histogram: Histogram,
    *,
    has_masks: bool,
    preparation: dict[str, Any],
) -> dict[str, Any]:
    """Write the vocabulary and the manifest of a folder whose shards are written; returns the manifest."""
    if not files:
        raise UserError(f"there is no example to write into {folder}")
    vocabulary.save(folder / VOCABULARY)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "rows": sum(file["rows"] for file in files),
        "tokens": sum(length * count for length, count in histogram.items()),
        "masks": "static" if has_masks else "dynamic",
        "vocabulary": {
            "size": len(vocabulary.words),
            "lower_case": vocabulary.lower_case,
            "sha256": vocabulary.hash,
        },
        "preparation": preparation,
        "length_histogram": {str(length): histogram[length] for length in sorted(histogram)},
        "files": files,
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def token_dtype(vocabulary: Vocabulary) -> np.dtype[Any]:
    """The smallest of the two types of tokens on disk that holds this vocabulary."""
    return np.dtype(np.uint16 if len(vocabulary.words) <= 1 << 16 else np.uint32)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.arrow"


def count_lengths(rows: Rows) -> Histogram:
    """How many rows there are of each length."""
    lengths, counts = np.unique(np.diff(rows.offsets), return_counts=True)
    return Counter(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))


def rows_of_examples(examples: Sequence[Example], dtype: np.dtype[Any]) -> Rows:
    """The columns of some rows."""
    tokens, offsets = _flatten([example.tokens for example in examples], dtype)
    rows = Rows(
        tokens,
        offsets,
        np.array([example.segment_b for example in examples], np.uint32),
        np.array([example.is_random for example in examples], np.bool_),
    )
    if examples[0].mlm_positions is None:
        return rows
    positions, mlm_offsets = _flatten([example.mlm_positions or [] for example in examples], dtype)
    labels, _ = _flatten([example.mlm_labels or [] for example in examples], dtype)
    return replace(rows, mlm_positions=positions, mlm_labels=labels, mlm_offsets=mlm_offsets)


def _flatten(lists: list[list[int]], dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Ints]:
    offsets = np.cumsum([0, *map(len, lists)])
    return np.fromiter(chain.from_iterable(lists), dtype, int(offsets[-1])), offsets


def write_shard(path: Path, rows: Rows) -> dict[str, Any]:
    """Write one Arrow file; returns what the manifest says of it."""
    columns = {
        "tokens": _list_column(rows.tokens, rows.offsets),
        "segment_b": pa.array(rows.segment_b),
        "is_random": pa.array(rows.is_random),
    }
    if rows.mlm_positions is not None:
        columns["mlm_positions"] = _list_column(rows.mlm_positions, rows.mlm_offsets)
        columns["mlm_labels"] = _list_column(rows.mlm_labels, rows.mlm_offsets)
    table = pa.record_batch(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)
    size, digest = file_digest(path)
    return {"name": path.name, "rows": len(rows), "bytes": size, "sha256": digest}


def _list_column(values: npt.NDArray[Any] | None, offsets: Ints | None) -> pa.ListArray:
    assert offsets is not None
    assert offsets[-1] < 1 << 31, "Arrow's lists count in 32 bits"
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))
