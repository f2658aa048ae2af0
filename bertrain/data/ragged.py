"""Ragged datasets of HDF5 files, read past the HDF5 library, which believes whatever lengths a damaged file names and
then crashes the process.

A ragged dataset is a run of references: the length of the list, the address of a collection in the file, and the
number of the list in it. A collection ("GCOL" in the file) is a run of objects: number, size, content. Both are read
from the mapped file, and nothing outside of them is ever touched. It is also several times as fast.
"""

from __future__ import annotations

import struct
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
COLLECTION = struct.Struct("<4s4xQ")  # signature, version and padding, size of the whole
OBJECT = struct.Struct("<HHIQ")  # number, reference count, padding, size of the content

Content = npt.NDArray[np.uint8]


def read_ragged(content: Content, dataset: h5py.Dataset, first: int, last: int) -> list[npt.NDArray[Any]]:
    """The lists `first` .. `last` of a ragged dataset in a file of this content; raises ValueError if it is damaged."""
    kind = h5py.check_vlen_dtype(dataset.dtype)
    collections: dict[int, dict[int, tuple[int, int]]] = {}
    lists = []
    for row, (length, address, number) in enumerate(_references(content, dataset, first, last).tolist(), start=first):
        if not length:
            lists.append(np.zeros(0, dtype=kind))
            continue
        if address not in collections:
            collections[address] = _objects(content, address, row)
        begin, size = collections[address].get(number, (0, 0))
        if size < length * kind.itemsize:
            raise ValueError(f"row {row} is longer than the place where it is kept")
        lists.append(content[begin : begin + length * kind.itemsize].view(kind))
    return lists


def _references(content: Content, dataset: h5py.Dataset, first: int, last: int) -> npt.NDArray[Any]:
    if not 0 <= first <= last <= len(dataset):
        raise ValueError("the file has fewer rows than it had")
    if dataset.compression is not None:
        raise ValueError("its ragged datasets are compressed, which is not supported; write them anew with h5repack")
    if dataset.chunks is None:
        return _references_at(content, dataset.id.get_offset(), first, last - first)
    per_chunk = dataset.chunks[0]
    parts = []
    for chunk in range(first // per_chunk, -(-last // per_chunk)):
        begin, end = max(first, chunk * per_chunk), min(last, (chunk + 1) * per_chunk)
        where = dataset.id.get_chunk_info_by_coord((chunk * per_chunk,))
        parts.append(_references_at(content, where.byte_offset, begin - chunk * per_chunk, end - begin))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=REFERENCE)


def _references_at(content: Content, offset: int | None, first: int, count: int) -> npt.NDArray[Any]:
    """References from a run that begins at `offset`; where nothing was ever written, all lists are empty."""
    if offset is None:
        return np.zeros(count, dtype=REFERENCE)
    begin = offset + first * REFERENCE.itemsize
    end = begin + count * REFERENCE.itemsize
    if end > len(content):
        raise ValueError("the file ends before its lists do")
    return content[begin:end].view(REFERENCE)


def _objects(content: Content, address: int, row: int) -> dict[int, tuple[int, int]]:
    """Where each object of the collection at `address` begins, and how long it is; `row` is kept there."""
    head = content[address : address + COLLECTION.size].tobytes()
    signature, size = COLLECTION.unpack(head) if len(head) == COLLECTION.size else (b"", 0)
    if signature != b"GCOL" or address + size > len(content):
        raise ValueError(f"row {row} is kept where there is no collection")
    collection = content[address : address + size].tobytes()
    objects = {}
    place = COLLECTION.size
    while place + OBJECT.size <= size:
        number, _, _, length = OBJECT.unpack_from(collection, place)
        if number == 0:  # the free space at the end
            break
        place += OBJECT.size
        if place + length > size:
            raise ValueError(f"row {row} is kept in a collection that is damaged")
        objects[number] = (address + place, length)
        place += -(-length // 8) * 8
    return objects
