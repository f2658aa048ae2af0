"""Writes prepared folders: Arrow files and their manifest, as shards.py describes them.

A folder is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest, new_folder, refuse_occupied, write_atomically
from bertrain.data.formats.block import Block, Masks, Values
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.shards import MANIFEST, SCHEMA_VERSION, VOCABULARY
from bertrain.data.text.vocabulary import Vocabulary

MOST_VALUES = (1 << 31) - 1  # in a list column of one file: Arrow's offsets have 32 bits
Histogram = Counter[int]


def write_blocks(
    out: Path, blocks: Iterable[Block], vocabulary: Vocabulary, *, preparation: dict[str, Any]
) -> dict[str, Any]:
    """Write a prepared folder, a file for each block, and return its manifest.

    `preparation` describes how the examples were made.
    """
    refuse_occupied(out)
    with new_folder(out) as folder:
        files: list[dict[str, Any]] = []
        histogram: Histogram = Counter()
        has_masks = False
        for block in blocks:
            has_masks = block.masks is not None
            files.append(write_shard(folder / shard_name(len(files)), narrow(block, vocabulary)))
            histogram += histogram_of(block)
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
        raise UserError("empty-data", f"there is no example to write into {folder}")
    vocabulary.save(folder / VOCABULARY)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "rows": sum(file["rows"] for file in files),
        "tokens": sum(length * count for length, count in histogram.items()),
        "masks": "static" if has_masks else "dynamic",
        "vocabulary": {"size": len(vocabulary.words), "lower_case": vocabulary.lower_case, "sha256": vocabulary.hash},
        "preparation": preparation,
        "length_histogram": {str(length): histogram[length] for length in sorted(histogram)},
        "files": files,
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.arrow"


def histogram_of(block: Block) -> Histogram:
    lengths, counts = np.unique(block.lengths, return_counts=True)
    return Counter(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))


def narrow(block: Block, vocabulary: Vocabulary) -> Block:
    """The same block with tokens, positions and labels of their type on disk."""
    dtype = vocabulary.dtype
    masks = block.masks
    if masks is not None:
        masks = Masks(masks.counts, masks.positions.astype(dtype), masks.labels.astype(dtype))
    return Block(block.tokens.astype(dtype), block.lengths, block.segment_b, block.is_random, masks)


def write_shard(path: Path, block: Block) -> dict[str, Any]:
    """Write one Arrow file of a narrow block; returns its entry in the manifest."""
    columns = {
        "tokens": _list_column(path, block.tokens, block.offsets),
        "segment_b": pa.array(block.segment_b.astype(np.uint32)),
        "is_random": pa.array(block.is_random.astype(np.bool_)),
    }
    if block.masks is not None:
        columns["mlm_positions"] = _list_column(path, block.masks.positions, block.masks.offsets)
        columns["mlm_labels"] = _list_column(path, block.masks.labels, block.masks.offsets)
    table = pa.record_batch(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)
    size, digest = file_digest(path)
    return {"name": path.name, "rows": len(block), "bytes": size, "sha256": digest}


def _list_column(path: Path, values: Values, offsets: Ints) -> pa.ListArray:
    if offsets[-1] > MOST_VALUES:
        raise UserError("shard-too-large", f"{path.name} would have {offsets[-1]:,} tokens; write more shards")
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))
