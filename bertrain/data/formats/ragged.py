"""Variable-length datasets of HDF5 files, read without the HDF5 library, which crashes on the lengths in damaged files.

Such a dataset is a run of references: the length of the list, the address of a heap collection in the file, and the
number of the list in it. A collection ("GCOL" in the file) is a run of objects: number, size, content. Both are read
from the memory-mapped file with every bound checked.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.extras import import_extra

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
COLLECTION = struct.Struct("<4s4xQ")  # signature, version and padding, size of the whole
OBJECT = struct.Struct("<H6xQ")  # number, reference count and padding, size of the content

Content = npt.NDArray[np.uint8]


class RaggedColumn:
    """A variable-length dataset; a slice of it is a list of arrays. Raises ValueError where the file is damaged."""

    def __init__(self, content: Content, dataset: Any) -> None:
        self._content = content
        self._kind = import_extra("h5py").check_vlen_dtype(dataset.dtype)
        self._references = _references(content, dataset)

    def __getitem__(self, rows: slice) -> list[npt.NDArray[Any]]:
        kind = self._kind
        collections: dict[int, dict[int, tuple[int, int]]] = {}
        lists = []
        for row, (length, address, number) in enumerate(self._references[rows].tolist(), start=rows.start):
            if not length:
                lists.append(np.zeros(0, dtype=kind))
                continue
            if address not in collections:
                collections[address] = _objects(self._content, address)
            begin, size = collections[address].get(number, (0, 0))
            if size < length * kind.itemsize:
                raise ValueError(f"row {row} is not in its heap collection, or longer than its object")
            lists.append(self._content[begin : begin + length * kind.itemsize].view(kind))
        return lists


def _references(content: Content, dataset: Any) -> npt.NDArray[Any]:
    """The references of all rows; those of a chunked dataset are copied."""
    if dataset.compression is not None:
        raise ValueError("its variable-length datasets are compressed; rewrite them with h5repack -f NONE")
    count = len(dataset)
    if dataset.chunks is None:
        return _references_at(content, dataset.id.get_offset(), count)
    per_chunk = dataset.chunks[0]
    parts = []
    for first in range(0, count, per_chunk):
        where = dataset.id.get_chunk_info_by_coord((first,))
        parts.append(_references_at(content, where.byte_offset, min(per_chunk, count - first)))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=REFERENCE)


def _references_at(content: Content, offset: int | None, count: int) -> npt.NDArray[Any]:
    """References from `offset` on; None means that nothing was written: all lists are empty."""
    if offset is None:
        return np.zeros(count, dtype=REFERENCE)
    end = offset + count * REFERENCE.itemsize
    if end > len(content):
        raise ValueError("the file ends before its rows do")
    return content[offset:end].view(REFERENCE)


def _objects(content: Content, address: int) -> dict[int, tuple[int, int]]:
    """Begin and size of each object of the collection at `address`, by its number."""
    head = content[address : address + COLLECTION.size].tobytes()
    signature, size = COLLECTION.unpack(head) if len(head) == COLLECTION.size else (b"", 0)
    if signature != b"GCOL" or address + size > len(content):
        raise ValueError("there is no heap collection at its address")
    objects, place, end = {}, address + COLLECTION.size, address + size
    while place + OBJECT.size <= end:
        number, size = OBJECT.unpack_from(content.data, place)
        place += OBJECT.size
        if number == 0 or place + size > end:  # the free space at the end, or damage
            break
        objects[number] = (place, size)
        place += size + 7 & ~7
    return objects
