"""ForeignData: HDF5 and TFRecord folders of other systems, read in place through an index (index.py)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertrain.base.errors import UserError
from bertrain.data.formats import hdf5, tfrecord
from bertrain.data.formats.block import Block, concatenate
from bertrain.data.formats.index import NAMES, damaged_record, fingerprint_of, map_arrays, path_of, read_index
from bertrain.data.formats.layouts import DECODERS, BadRecord, Fields, join
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.source import DataSource
from bertrain.data.text.vocabulary import Vocabulary

OPEN_FILES = 256  # HDF5 files held open at once


class ForeignData(DataSource):
    """A folder of HDF5 or TFRecord files (or one file), open for reading through its index."""

    def __init__(self, folder: Path, index: Path, vocabulary: Vocabulary) -> None:
        self.folder, self.vocabulary = folder, vocabulary
        content = read_index(index)
        self.layout, self.num_files = content["layout"], len(content["files"])
        self.max_seq_length, self.max_predictions = content["max_seq_length"], content["max_predictions"]
        self.fingerprint = fingerprint_of(content, vocabulary.hash)
        self._kind, self._decoder = next(key for key, name in NAMES.items() if name == self.layout)
        self._paths = [path_of(folder, file) for file in content["files"]]
        self._first_row = np.concatenate([[0], np.cumsum([file["rows"] for file in content["files"]])])
        arrays = map_arrays(index)
        self.lengths, self.predictions = arrays["lengths"], arrays.get("predictions")
        self._is_random, self._places, self._parts = arrays["is_random"], arrays["places"], arrays["parts"]
        self._open = lru_cache(OPEN_FILES)(hdf5.OpenFile)
        largest, words = content["largest_word"], len(vocabulary.words)
        if largest["number"] >= words:
            word = f"{path_of(folder, largest)}, row {largest['row']}, has the token id {largest['number']}"
            cure = "give the right one with --vocab FILE (pretrain: --data.vocab)"
            raise UserError("other-vocabulary", f"{word}, but the vocabulary has {words} words; {cure}")

    def read(self, rows: Ints) -> Block:
        """The examples of `rows`, in that order; each record is read once."""
        file_of_row = np.searchsorted(self._first_row, rows, side="right") - 1
        record = np.empty(len(rows), dtype=np.int64)  # the number of each row's record in its group
        groups: dict[tuple[int, ...], list[_Fetched]] = {}  # by the widths of their fields; decoded together
        for number in np.unique(file_of_row).tolist():
            asked = np.flatnonzero(file_of_row == number)
            places, own = np.unique(self._places[rows[asked]], return_inverse=True)
            fields = self._fetch(self._paths[number], places)
            widths = (values.shape[1] for values in fields.values() if getattr(values, "ndim", 0) == 2)
            group = groups.setdefault(tuple(widths), [])
            record[asked] = own + sum(fetched.records for fetched in group)
            group.append(_Fetched(self._paths[number], len(places), asked, fields))
        blocks, order = [], np.empty(len(rows), dtype=np.int64)
        examples_before = 0
        for group in groups.values():
            block, parts = self._decode(group)
            asked = np.concatenate([fetched.asked for fetched in group])
            part, own = self._parts[rows[asked]], record[asked]
            example = np.minimum((np.cumsum(parts) - parts)[own] + part, len(block) - 1)
            is_changed = (part >= parts[own]) | (block.lengths[example] != self.lengths[rows[asked]])
            if is_changed.any():
                path = self._paths[file_of_row[asked[is_changed.argmax()]]]
                raise UserError("changed-data", f"{path} changed after it was indexed; run again")
            order[asked] = examples_before + example
            examples_before += len(block)
            blocks.append(block)
        return concatenate(blocks).take(order)

    def _fetch(self, path: Path, places: Ints) -> Fields:
        if self._kind == "hdf5":
            return hdf5.fetch(self._open(path), self._decoder, places)
        try:
            return tfrecord.fetch(path, self._decoder, places)
        except BadRecord as bad:
            raise damaged_record(path, f"the record at {places[bad.number]}", bad) from None

    def _decode(self, group: list[_Fetched]) -> tuple[Block, Ints]:
        """The examples of some files' records, and the number of examples of each record."""
        fields = {name: join([fetched.fields[name] for fetched in group]) for name in group[0].fields}
        try:
            block, parts = DECODERS[self._decoder](fields)
        except BadRecord as bad:
            ends = np.cumsum([fetched.records for fetched in group])
            culprit = group[int(np.searchsorted(ends, bad.number, side="right"))]
            raise UserError("changed-data", f"{culprit.path} changed after it was indexed: {bad.complaint}") from None
        if block.largest_word >= len(self.vocabulary.words):
            files = ", ".join(str(fetched.path) for fetched in group)
            raise UserError("changed-data", f"{files} changed: it has the token id {block.largest_word}; run again")
        return block, parts


class _Fetched(NamedTuple):
    """Records of one file, and the requested rows that are in them."""

    path: Path
    records: int
    asked: Ints
    fields: Fields
