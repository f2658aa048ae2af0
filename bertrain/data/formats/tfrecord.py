"""TFRecord files of tf.train.Example, without TensorFlow: the framing, the wire format, and BERT's features in it.

A file is a run of records: length (8 bytes), checksum of these, data, checksum of the data; a checksum is a CRC32C,
rotated and shifted. The data of a record is a protocol buffer: a map of names to lists of integers or floats.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.protobuf import decode_varints, encode_field, encode_varints, wire_fields
from bertrain.data.formats.block import Block
from bertrain.data.formats.layouts import FIXED, GRAPHCORE, WEIGHTS, BadRecord, Fields, Shape, to_fixed
from bertrain.data.formats.masking import Ints

RECORDS_AT_ONCE = 256
HEADER, FOOTER = struct.Struct("<QI"), struct.Struct("<I")
FIELDS = {"fixed": FIXED, "graphcore": GRAPHCORE}
OPTIONAL = {"fixed": (WEIGHTS,), "graphcore": ()}
MAY_BE_FLOATS = {WEIGHTS, "packed_masked_lm_mask"}


# --- the framing --------------------------------------------------------------------------------------


def is_tfrecord(first_bytes: bytes) -> bool:
    """Whether a file that begins so is a TFRecord file: its first length has the right checksum."""
    if len(first_bytes) < HEADER.size:
        return False
    return masked_checksum(first_bytes[:8]) == HEADER.unpack_from(first_bytes)[1]


def masked_checksum(data: bytes) -> int:
    """CRC32C, rotated right by 15 bits and shifted by a constant, as TFRecord files hold it."""
    import google_crc32c  # of those who train, few read TensorFlow's files

    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each record of a file with the place it begins at."""
    size = path.stat().st_size
    with _open(path) as stream:
        place = number = 0
        while place < size:
            data = _read_record(stream, size - place, f"record {number} of {path}")
            yield place, data
            place += HEADER.size + len(data) + FOOTER.size
            number += 1


def _read_record(stream: BinaryIO, available: int, where: str) -> bytes:
    """The record that begins where `stream` stands, both its checksums right."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise UserError(f"{where} is cut off: the file ends within its length")
    length, checksum = HEADER.unpack(header)
    if masked_checksum(header[:8]) != checksum:
        raise UserError(f"{where} is damaged: the checksum of its length is wrong")
    if length + HEADER.size + FOOTER.size > available:
        raise UserError(f"{where} is cut off: it is {length} bytes long, and the file ends before")
    data, footer = stream.read(length), stream.read(FOOTER.size)
    if FOOTER.pack(masked_checksum(data)) != footer:
        raise UserError(f"{where} is damaged: the checksum of its data is wrong")
    return data


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


# --- tf.train.Example ---------------------------------------------------------------------------------


class Feature(NamedTuple):
    """A list of numbers as it lies in the record: a run of varints, or of floats of four bytes."""

    is_float: bool
    content: bytes


EMPTY = Feature(False, b"")


def parse_example(data: bytes) -> dict[str, Feature]:
    """The features of a tf.train.Example that are lists of integers or floats; raises ValueError if it is none."""
    features = {}
    for _, message in _submessages(data):
        for _, entry in _submessages(message):
            parts = dict(_submessages(entry))
            for kind, values in _submessages(parts.get(2, b"")):
                if kind in (2, 3):
                    features[parts.get(1, b"").decode()] = Feature(kind == 2, _list_content(values, is_float=kind == 2))
    return features


def _list_content(message: bytes, *, is_float: bool) -> bytes:
    """The numbers of a FloatList or an Int64List: one field with all of them, or a field for each."""
    contents = []
    for _, wire, content in wire_fields(message):
        if wire not in ((2, 5) if is_float else (0, 2)) or (is_float and len(content) % 4):
            raise ValueError("a list of numbers holds something else")
        contents.append(content)
    return contents[0] if len(contents) == 1 else b"".join(contents)


def stack(name: str, features: list[Feature]) -> npt.NDArray:
    """A feature of some records as a rectangle, a row for each; raises BadRecord if one is not like the first."""
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
            raise BadRecord(number, f"{name} has {size} places where records before it have {sizes[0]}")
    return values.reshape(len(features), int(sizes[0]))


def _submessages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each length-delimited field; there are no others outside of the lists."""
    for number, wire, content in wire_fields(data):
        if wire != 2:
            raise ValueError("a field has an unexpected type")
        yield number, content


def encode_example(features: dict[str, Feature]) -> bytes:
    """A tf.train.Example of these features."""
    entries = []
    for name, (is_float, content) in features.items():
        feature = encode_field(2 if is_float else 3, encode_field(1, content))
        entries.append(encode_field(1, encode_field(1, name.encode()) + encode_field(2, feature)))
    return encode_field(1, b"".join(entries))


def rows_of(values: npt.NDArray) -> list[Feature]:
    """The rows of a rectangle of floats, or of integers from 0 on, as features."""
    if values.dtype.kind == "f":
        return [Feature(True, row.tobytes()) for row in values.astype("<f4")]
    encoded = encode_varints(values.reshape(-1))
    is_last = np.frombuffer(encoded, dtype=np.uint8) < 128
    ends = np.concatenate([[0], np.flatnonzero(is_last) + 1])[np.arange(len(values) + 1) * values.shape[1]].tolist()
    return [Feature(False, encoded[begin:end]) for begin, end in pairwise(ends)]


# --- files of examples ----------------------------------------------------------------------------------


def layout_of(path: Path) -> str:
    """Which layout a file has, told by the features of its first record."""
    features = _parse(*next(records(path)), path, 0)
    layout = "graphcore" if "packed_input_ids" in features else "fixed"
    _refuse_missing(features, layout, f"record 0 of {path}")
    return layout


def scan(path: Path, layout: str) -> Generator[tuple[Ints, Fields]]:
    """All records of a file in order, some at a time: their places and their features."""
    places: list[int] = []
    waiting: list[dict[str, Feature]] = []
    for number, (place, data) in enumerate(records(path)):
        features = _parse(place, data, path, number)
        _refuse_missing(features, layout, f"record {number} of {path}")
        places.append(place)
        waiting.append(features)
        if len(waiting) == RECORDS_AT_ONCE:
            yield np.array(places), _stack_all(waiting, layout)
            places, waiting = [], []
    if waiting:
        yield np.array(places), _stack_all(waiting, layout)


def fetch(path: Path, layout: str, places: Ints) -> Fields:
    """The features of the records that begin at `places`."""
    found = []
    size = path.stat().st_size if path.is_file() else 0
    with _open(path) as stream:
        for place in places.tolist():
            where = f"the record at byte {place} of {path}"
            stream.seek(place)
            data = _read_record(stream, size - place, where)
            features = _parse(place, data, path, None)
            _refuse_missing(features, layout, where)
            found.append(features)
    return _stack_all(found, layout)


def write(path: Path, blocks: Iterable[Block], shape: Shape) -> None:
    """Write examples with the features of BERT's own script."""
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


def _parse(place: int, data: bytes, path: Path, number: int | None) -> dict[str, Feature]:
    try:
        return parse_example(data)
    except ValueError as error:
        where = f"record {number}" if number is not None else f"the record at byte {place}"
        raise UserError(f"{where} of {path} is not a tf.train.Example: {error}") from None


def _refuse_missing(features: dict[str, Feature], layout: str, where: str) -> None:
    for name in FIELDS[layout]:
        if name not in features:
            wanted = ", ".join(FIELDS[layout])
            raise UserError(f"{where} has no feature {name}; a pre-training example has {wanted}")
        if features[name].is_float and name not in MAY_BE_FLOATS:
            raise UserError(f"the feature {name} in {where} holds floats, not integers")


def _stack_all(found: list[dict[str, Feature]], layout: str) -> Fields:
    """The features of some records, each a rectangle."""
    fields = {}
    for name in (*FIELDS[layout], *OPTIONAL[layout]):
        if name in found[0]:
            fields[name] = stack(name, [features.get(name, EMPTY) for features in found])
    return fields
