"""HDF5 files of pre-training examples, read and written in chunks of records.

Fields, types and shapes are those of MLPerf's data (NVIDIA's tools, and Samsung's, with wider integers), so that other
trainers read the files written here. Nothing is compressed, as in theirs.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.data.formats.layouts import ENCODED, FIXED, PACKED, VARLENGTH, BadRecord, Fields, Shape, join
from bertrain.data.formats.masking import Ints

SIGNATURE = b"\x89HDF\r\n\x1a\n"
RECORDS_AT_ONCE = 1024
FIELDS = {"fixed": FIXED, "varlength": VARLENGTH, "packed": PACKED, "encoded": ENCODED}
REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
COLLECTION = struct.Struct("<4s4xQ")  # signature, version and padding, size of the whole
OBJECT = struct.Struct("<H6xQ")  # number, reference count and padding, size of the content
Content = npt.NDArray[np.uint8]
NARROW = {"input_mask", "segment_ids", "next_sentence_labels"}  # written in 8 bits


class OpenFile:
    """An HDF5 file open for reading; contiguous datasets are memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: dict[str, Any] = {}
        with _reading(path):
            self.file = import_extra("h5py").File(path, "r")
            self._content = np.asarray(np.memmap(path, mode="r"))

    def close(self) -> None:
        self.file.close()

    def read(self, name: str, first: int, last: int) -> Any:
        """Rows `first` .. `last` - 1 of a dataset: an array, or a list of arrays if it is variable-length."""
        with _reading(self.path):
            if name not in self._columns:
                self._columns[name] = _column_of(self.file[name], self._content)
            rows = self._columns[name][first:last]
            if len(rows) != last - first:
                raise ValueError(f"it has no row {last - 1}")
            return rows


def _column_of(dataset: Any, content: Content) -> Any:
    """A dataset as a RaggedColumn, an array over the memory-mapped file, or the dataset itself."""
    if import_extra("h5py").check_vlen_dtype(dataset.dtype) is not None:
        return RaggedColumn(content, dataset)
    offset = dataset.id.get_offset() if dataset.chunks is None else None
    if offset is None:  # chunked, perhaps compressed; or never written
        return dataset
    return _mapped(content, offset, dataset.size, dataset.dtype).reshape(dataset.shape)


def _mapped(content: Content, offset: int, count: int, kind: Any) -> npt.NDArray[Any]:
    end = offset + count * kind.itemsize
    if end > len(content):
        raise ValueError("the file ends before its rows do")
    return content[offset:end].view(kind)


class RaggedColumn:
    """A variable-length dataset, read without the HDF5 library, which crashes on the lengths in damaged files.

    Such a dataset is a run of references: the length of the list, the address of a heap collection in the file, and
    the number of the list in it. A collection ("GCOL" in the file) is a run of objects: number, size, content. Both are
    read from the memory-mapped file with every bound checked. A slice is a list of arrays.
    """

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
    """The references of all rows; those of a chunked dataset are copied. What was never written is empty."""
    if dataset.compression is not None:
        raise ValueError("its variable-length datasets are compressed; rewrite them with h5repack -f NONE")
    count = len(dataset)
    per_chunk, offsets = count, [dataset.id.get_offset()]
    if dataset.chunks is not None:
        per_chunk = dataset.chunks[0]
        firsts = range(0, count, per_chunk)
        offsets = [dataset.id.get_chunk_info_by_coord((first,)).byte_offset for first in firsts]
    references = []
    for number, offset in enumerate(offsets):
        size = min(per_chunk, count - number * per_chunk)
        references.append(np.zeros(size, REFERENCE) if offset is None else _mapped(content, offset, size, REFERENCE))
    return references[0] if len(references) == 1 else np.concatenate([np.zeros(0, REFERENCE), *references])


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


def layout_of(path: Path) -> str:
    """The layout of a file by its datasets; refuses missing or inconsistent datasets."""
    with closing(OpenFile(path)) as opened, _reading(path):
        names = set(opened.file.keys())
        marks = {"packed_input_len": "packed", "special_token_positions": "encoded", "input_mask": "fixed"}
        layout = next((layout for mark, layout in marks.items() if mark in names), "varlength")
        _check_datasets(path, opened.file, layout)
        return layout


def scan(path: Path, layout: str) -> Generator[tuple[Ints, Fields]]:
    """All records of a file in order, in chunks: their numbers and fields."""
    with closing(OpenFile(path)) as opened:
        with _reading(path):
            count = len(opened.file[FIELDS[layout][0]])
        for first in range(0, count, RECORDS_AT_ONCE):
            numbers = np.arange(first, min(first + RECORDS_AT_ONCE, count))
            yield numbers, fetch(opened, layout, numbers)


def fetch(opened: OpenFile, layout: str, numbers: Ints) -> Fields:
    """The fields of the records `numbers`, which ascend; consecutive ones are read together."""
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)]
    return {name: join([opened.read(name, first, last) for first, last in runs]) for name in FIELDS[layout]}


def row_checksum(path: Path) -> str:
    """MLPerf's checksum: the MD5 of the list of the rows' MD5s, each of the text of its list of `input_ids`."""
    digests = []
    with closing(OpenFile(path)) as opened:
        with _reading(path):
            if "input_ids" not in opened.file:
                raise UserError(
                    "missing-field", f"{path} has no dataset input_ids, which the checksum is computed from"
                )
            count = len(opened.file["input_ids"])
        for first in range(0, count, RECORDS_AT_ONCE):
            for row in opened.read("input_ids", first, min(first + RECORDS_AT_ONCE, count)):
                digests.append(hashlib.md5(str(row.tolist()).encode(), usedforsecurity=False).hexdigest())
    return hashlib.md5(str(digests).encode(), usedforsecurity=False).hexdigest()


def _check_datasets(path: Path, file: Any, layout: str) -> None:
    names = FIELDS[layout]
    for name in names:
        if name not in file or not isinstance(file[name], import_extra("h5py").Dataset):
            wanted = ", ".join(names)
            raise UserError("missing-field", f"{path} has no dataset {name}; the layout {layout} has {wanted}")
        dataset = file[name]
        axes, is_varlength = _axes(layout, name)
        kind = import_extra("h5py").check_vlen_dtype(dataset.dtype)
        if (kind is not None) != is_varlength or (kind or dataset.dtype).kind not in "iu":
            wanted = "lists of integers" if is_varlength else "integers"
            raise UserError("bad-field", f"the dataset {name} of {path} contains {dataset.dtype}, not {wanted}")
        if len(dataset.shape) != axes:
            raise UserError("bad-field", f"the dataset {name} of {path} has {len(dataset.shape)} axes, not {axes}")
        if len(dataset) != len(file[names[0]]):
            rows = f"{names[0]} has {len(file[names[0]])} rows, {name} {len(dataset)}"
            raise UserError("bad-field", f"the datasets of {path} differ in length: {rows}")


def _axes(layout: str, name: str) -> tuple[int, bool]:
    """The number of axes of a dataset, and whether its rows are variable-length."""
    is_flat = name == "next_sentence_labels" and layout != "packed"  # one number per record; a list for a pack
    is_padded = layout in ("fixed", "encoded") and not is_flat
    return 1 + is_padded, not (is_flat or is_padded)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any exception into a UserError: on damaged files, the HDF5 library raises almost anything."""
    try:
        yield
    except (UserError, BadRecord):
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError("damaged-data", f"cannot read {path} as HDF5; it is damaged or truncated: {reason}") from None


def write(path: Path, layout: str, records: Iterable[Fields], count: int, shape: Shape) -> None:
    """Write `count` records of a layout, given in chunks of their fields."""
    content = BytesIO()  # in memory first: the HDF5 library crashes when the disk is full
    h5py = import_extra("h5py")
    with h5py.File(content, "w") as file:
        for name in FIELDS[layout]:
            kind = np.dtype(np.int8 if name in NARROW else shape.token_type)
            width = shape.max_predictions if name.startswith("masked_lm") else shape.max_seq_length
            axes, is_varlength = _axes(layout, name)
            file.create_dataset(name, (count, width)[:axes], dtype=h5py.vlen_dtype(kind) if is_varlength else kind)
        first = 0
        for fields in records:
            number = len(fields["next_sentence_labels"])
            for name, values in fields.items():
                file[name][first : first + number] = _column(values)
            first += number
    path.write_bytes(content.getbuffer())


def _column(values: npt.NDArray | list[npt.NDArray]) -> npt.NDArray:
    """Rows as h5py takes them: lists of equal length as a 2-D array, else an array of objects."""
    if isinstance(values, np.ndarray):
        return values
    if len(set(map(len, values))) <= 1:
        return np.stack(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
