"""Vectors on disk: shards of a fixed number of rows, each written whole, joined into one file at the end.

    .vectors.parquet.partial/job.json        what the shards are computed from
    .vectors.parquet.partial/00000.parquet   the vectors of the first rows, with their ids

A job that is killed continues with the first shard that is missing. Shards of another job are never joined.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bertrain.base.errors import UserError
from bertrain.base.files import read_json, write_atomically

Vectors = npt.NDArray[np.float32]
SHARD_ROWS = 8192
SUFFIXES = (".parquet", ".npy")
JOB = "job.json"


@dataclass(frozen=True)
class VectorFile:
    """A file of vectors to write, and the folder of its shards beside it."""

    out: Path
    num_rows: int
    width: int
    has_ids: bool

    @property
    def folder(self) -> Path:
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // SHARD_ROWS)

    @cached_property
    def schema(self) -> pa.Schema:
        number = pa.field("id", pa.string()) if self.has_ids else pa.field("row", pa.int64())
        return pa.schema([number, pa.field("embedding", pa.list_(pa.float32(), self.width))])

    def check(self, job: dict[str, Any]) -> bool:
        """Whether the file is complete. Refuses a file, or shards, of another job."""
        begun = read_json(self.folder / JOB, {}) if (self.folder / JOB).is_file() else None
        if begun is None and self.out.exists():
            raise UserError("vectors-exist", f"{self.out} exists; choose another --out or remove it")
        if begun is not None and begun != job:
            names = [name for name in job if job[name] != begun.get(name)]
            change = ", ".join(f"{name} is {job[name]!r}, was {begun.get(name)!r}" for name in names)
            why = f"{self.folder} has vectors of this command with other options ({change})"
            raise UserError("other-vectors", f"{why}; remove that folder or choose another --out")
        return self.out.exists()

    def begin(self, job: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / JOB, json.dumps(job, indent=1) + "\n")
        except OSError as error:
            raise self._unwritable(error) from None

    def has_shard(self, number: int) -> bool:
        return self._shard(number).is_file()

    def write_shard(self, number: int, ids: Sequence[str | None], vectors: Vectors) -> None:
        first = number * SHARD_ROWS
        numbers = pa.array(ids, pa.string()) if self.has_ids else pa.array(range(first, first + len(ids)), pa.int64())
        rows = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), self.width)
        path = self._shard(number)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            pq.write_table(pa.table([numbers, rows], self.schema), partial, compression="none")
            _flush(partial)
            partial.rename(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise self._unwritable(error) from None

    def join(self) -> None:
        """Write all shards into the file, which appears whole, and delete them."""
        partial = self.folder / f"whole{self.out.suffix}"
        try:
            if self.out.suffix == ".npy":
                self._join_npy(partial)
            else:
                with pq.ParquetWriter(partial, self.schema, compression="zstd", use_dictionary=False) as writer:
                    for number in range(self.num_shards):
                        writer.write_table(pq.read_table(self._shard(number), schema=self.schema))
            _flush(partial)
            partial.rename(self.out)
        except OSError as error:
            raise self._unwritable(error) from None
        self.clean_up()

    def _join_npy(self, path: Path) -> None:
        whole = np.lib.format.open_memmap(path, "w+", np.float32, (self.num_rows, self.width))
        for number in range(self.num_shards):
            first = number * SHARD_ROWS
            vectors = pq.read_table(self._shard(number), columns=["embedding"])["embedding"].combine_chunks()
            whole[first : first + SHARD_ROWS] = vectors.flatten().to_numpy().reshape(-1, self.width)
        whole.flush()

    def clean_up(self) -> None:
        """Delete the shards, the record of the job last: until then, the same command still cleans up."""
        for path in self.folder.iterdir():
            if path.name != JOB:
                path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _shard(self, number: int) -> Path:
        return self.folder / f"{number:05}.parquet"

    def _unwritable(self, error: OSError) -> UserError:
        reason = f"could not write vectors into {self.folder}: {error.strerror or error}"
        cure = "free some space, then run the same command to continue, or choose another --out"
        return UserError("cannot-write", f"{reason}; {cure}")


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
