"""TFRecord files of tf.train.Example, read and written without TensorFlow.

A file is a run of records: length (8 bytes), its checksum, data, its checksum; a checksum is a masked CRC32C. The data
of a record is a protocol buffer: a map of names to lists of integers or floats.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.files import reading
from bertrain.base.protobuf import decode_varints, encode_field, encode_varints, wire_fields
from bertrain.data.formats.block import Block, in_batches
from bertrain.data.formats.layouts import FIXED, GRAPHCORE, WEIGHTS, BadRecord, Fields, Shape, to_fixed
from bertrain.data.formats.masking import Ints

RECORDS_AT_ONCE = 256
HEADER, FOOTER = struct.Struct("<QI"), struct.Struct("<I")
FIELDS = {"fixed": FIXED, "graphcore": GRAPHCORE}
OPTIONAL = {"fixed": (WEIGHTS,), "graphcore": ()}
MAY_BE_FLOATS = {WEIGHTS, "packed_masked_lm_mask"}


def is_tfrecord(first_bytes: bytes) -> bool:
    """Whether these are the first bytes of a TFRecord file: its first length has the right checksum."""
    if len(first_bytes) < HEADER.size:
        return False
    return masked_checksum(first_bytes[:8]) == HEADER.unpack_from(first_bytes)[1]


def masked_checksum(data: bytes) -> int:
    """The CRC32C of TFRecord files: rotated right by 15 bits, plus a constant."""
    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each record of a file with its byte offset."""
    size = path.stat().st_size
    with reading(path), open(path, "rb") as stream:
        place = number = 0
        while place < size:
            data = _read_record(stream, size - place, f"record {number} of {path}")
            yield place, data
            place += HEADER.size + len(data) + FOOTER.size
            number += 1


def _read_record(stream: BinaryIO, available: int, where: str) -> bytes:
    """The record at the position of `stream`, both checksums verified."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise UserError("damaged-data", f"{where} is truncated: the file ends within its length")
    length, checksum = HEADER.unpack(header)
    if masked_checksum(header[:8]) != checksum:
        raise UserError("damaged-data", f"{where} is damaged: the checksum of its length is wrong")
    if length + HEADER.size + FOOTER.size > available:
        raise UserError("damaged-data", f"{where} is truncated: it has {length} bytes, and the file ends before")
    data, footer = stream.read(length), stream.read(FOOTER.size)
    if FOOTER.pack(masked_checksum(data)) != footer:
        raise UserError("damaged-data", f"{where} is damaged: the checksum of its data is wrong")
    return data


class Feature(NamedTuple):
    """A list of numbers as stored in the record: varints, or 4-byte floats."""

    is_float: bool
    content: bytes


EMPTY = Feature(False, b"")


def parse_example(data: bytes) -> dict[str, Feature]:
    """The integer and float features of a tf.train.Example; raises ValueError if it is none."""
    features = {}
    for _, message in _submessages(data):
        for _, entry in _submessages(message):
            parts = dict(_submessages(entry))
            for kind, values in _submessages(parts.get(2, b"")):
                if kind in (2, 3):
                    features[parts.get(1, b"").decode()] = Feature(kind == 2, _list_content(values, is_float=kind == 2))
    return features


def _list_content(message: bytes, *, is_float: bool) -> bytes:
    """The numbers of a FloatList or an Int64List, packed in one field or in a field for each."""
    contents = []
    for _, wire, content in wire_fields(message):
        if wire not in ((2, 5) if is_float else (0, 2)) or (is_float and len(content) % 4):
            raise ValueError("a list of numbers contains something else")
        contents.append(content)
    return contents[0] if len(contents) == 1 else b"".join(contents)


def stack(name: str, features: list[Feature]) -> npt.NDArray:
    """A feature of some records as a 2-D array; raises BadRecord if one differs from the first in length or type."""
    contents = [feature.content for feature in features]
    data = b"".join(contents)
    byte_ends = np.cumsum([len(content) for content in contents])
    if features[0].is_float:
        values: npt.NDArray = np.frombuffer(data, dtype="<f4")
        ends = byte_ends // 4
    else:
        try:
            values = decode_varints(data)
        except ValueError as error:
            raise BadRecord(0, f"{name} is damaged: {error}") from None
        ends = np.concatenate([[0], np.cumsum(np.frombuffer(data, dtype=np.uint8) < 128)])[byte_ends]
    sizes = np.diff(ends, prepend=0)
    for number, (feature, size) in enumerate(zip(features, sizes.tolist(), strict=True)):
        if size != sizes[0] or feature.is_float != features[0].is_float:
            raise BadRecord(number, f"{name} has {size} places, but records before it have {sizes[0]}")
    return values.reshape(len(features), int(sizes[0]))


def _submessages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field, all of which must be length-delimited."""
    for number, wire, content in wire_fields(data):
        if wire != 2:
            raise ValueError("a field has an unexpected type")
        yield number, content


def encode_example(features: dict[str, Feature]) -> bytes:
    entries = []
    for name, (is_float, content) in features.items():
        feature = encode_field(2 if is_float else 3, encode_field(1, content))
        entries.append(encode_field(1, encode_field(1, name.encode()) + encode_field(2, feature)))
    return encode_field(1, b"".join(entries))


def rows_of(values: npt.NDArray) -> list[Feature]:
    """The rows of a 2-D array of floats, or of non-negative integers, as features."""
    if values.dtype.kind == "f":
        return [Feature(True, row.tobytes()) for row in values.astype("<f4")]
    encoded = encode_varints(values.reshape(-1))
    is_last = np.frombuffer(encoded, dtype=np.uint8) < 128
    ends = np.concatenate([[0], np.flatnonzero(is_last) + 1])[np.arange(len(values) + 1) * values.shape[1]].tolist()
    return [Feature(False, encoded[begin:end]) for begin, end in pairwise(ends)]


def layout_of(path: Path) -> str:
    """The layout of a file by the features of its first record."""
    _, data = next(records(path))
    return _layout_with(_parse(data, f"record 0 of {path}"))


def _layout_with(features: dict[str, Feature]) -> str:
    return "graphcore" if "packed_input_ids" in features else "fixed"


def scan(path: Path, layout: str) -> Generator[tuple[Ints, Fields]]:
    """All records of a file in order, in chunks: byte offsets and features."""
    parsed = (
        (place, _parse(data, f"record {number} of {path}", layout))
        for number, (place, data) in enumerate(records(path))
    )
    for batch in in_batches(parsed, RECORDS_AT_ONCE):
        yield np.array([place for place, _ in batch]), _stack_all([features for _, features in batch], layout)


def fetch(path: Path, layout: str, places: Ints) -> Fields:
    found = []
    size = path.stat().st_size if path.is_file() else 0
    with reading(path), open(path, "rb") as stream:
        for place in places.tolist():
            where = f"the record at byte {place} of {path}"
            stream.seek(place)
            found.append(_parse(_read_record(stream, size - place, where), where, layout))
    return _stack_all(found, layout)


def write(path: Path, blocks: Iterable[Block], shape: Shape) -> None:
    """Write examples with the features of BERT's script."""
    with open(path, "wb") as stream:
        for block in blocks:
            assert block.masks is not None
            fields = to_fixed(block, shape)
            fields[WEIGHTS] = (np.arange(shape.max_predictions) < block.masks.counts[:, None]).astype(np.float32)
            fields["next_sentence_labels"] = fields["next_sentence_labels"].reshape(-1, 1)
            columns = {name: rows_of(values) for name, values in fields.items()}
            for number in range(len(block)):
                data = encode_example({name: rows[number] for name, rows in columns.items()})
                length = struct.pack("<Q", len(data))
                stream.write(length + FOOTER.pack(masked_checksum(length)))
                stream.write(data + FOOTER.pack(masked_checksum(data)))


def _parse(data: bytes, where: str, layout: str | None = None) -> dict[str, Feature]:
    """The features of a record, which must have those of `layout`, or of the layout that it seems to have."""
    try:
        features = parse_example(data)
    except ValueError as error:
        raise UserError("damaged-data", f"{where} is not a tf.train.Example: {error}") from None
    names = FIELDS[layout or _layout_with(features)]
    for name in names:
        if name not in features:
            wanted = ", ".join(names)
            raise UserError("missing-field", f"{where} has no feature {name}; a pre-training example has {wanted}")
        if features[name].is_float and name not in MAY_BE_FLOATS:
            raise UserError("bad-field", f"the feature {name} in {where} contains floats, not integers")
    return features


def _stack_all(found: list[dict[str, Feature]], layout: str) -> Fields:
    fields = {}
    for name in (*FIELDS[layout], *OPTIONAL[layout]):
        if name in found[0]:
            fields[name] = stack(name, [features.get(name, EMPTY) for features in found])
    return fields
