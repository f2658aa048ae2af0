"""Examples to a prepared folder: Arrow files and their manifest (the layout is described in shards.py).

The folder is written under another name beside its place and renamed when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from bertrain.data.shards import MANIFEST, SCHEMA_VERSION, VOCABULARY
from bertrain.data.tokenizer import Vocabulary
from bertrain.errors import UserError
from bertrain.files import file_digest, new_folder, refuse_occupied


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

    has_masks = False
    for example in examples:
        has_masks = example.mlm_positions is not None
        histogram[len(example.tokens)] = histogram.get(len(example.tokens), 0) + 1
        waiting.append(example)
        if len(waiting) == (rows_per_shard if isinstance(rows_per_shard, int) else rows_per_shard[len(files)]):
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
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _write_shard(path: Path, rows: list[Example], token_type: pa.DataType) -> None:
    columns = {
        "tokens": pa.array([row.tokens for row in rows], pa.list_(token_type)),
        "segment_b": pa.array([row.segment_b for row in rows], pa.uint32()),
        "is_random": pa.array([row.is_random for row in rows], pa.bool_()),
    }
    if rows[0].mlm_positions is not None:
        columns["mlm_positions"] = pa.array([row.mlm_positions for row in rows], pa.list_(token_type))
        columns["mlm_labels"] = pa.array([row.mlm_labels for row in rows], pa.list_(token_type))
    table = pa.record_batch(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)
