"""Read TensorFlow 1 checkpoints of BERT, Google's and MLPerf's model.ckpt-28252, without TensorFlow.

A checkpoint is a tensor bundle: `.index` and `.data-00000-of-00001`.

The index is a sorted table in LevelDB's format: blocks of keys and values, each with a checksum and possibly compressed
by snappy (as in MLPerf's model.ckpt-28252.index), and a footer that locates the index block. The empty key has the
header of the bundle; every other key is the name of a tensor, and its value a protocol buffer with type, shape, data
file and offset.

Every value is checked: a damaged file raises UserError, and never takes much more memory than its size.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.files import reading
from bertrain.base.protobuf import read_varint, wire_fields
from bertrain.data.formats.tfrecord import masked_checksum
from bertrain.weights.names import TENSORFLOW, TRANSPOSED_IN_TENSORFLOW, find_parameter
from bertrain.weights.tensors import OpenedWeights, StoredTensor, combined_digest

FOOTER_BYTES, MAGIC = 48, 0xDB4775248B80FB57
TRAILER = struct.Struct("<BI")  # of a block: compression and checksum
PLAIN, SNAPPY = 0, 1
SNAPPY_LIMIT = 22  # the largest compression ratio of a block: three bytes copy up to 64
EXPANSION_LIMIT = 64  # the largest ratio of all keys to the file: keys share prefixes, so few bytes can spell many

# Numbers of tensorflow/core/framework/types.proto. The last three have no fixed size and hold no weights.
NUMPY_TYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64",
}  # fmt: skip
OTHER_TYPES = {7: "string", 20: "resource", 21: "variant"}
GLOBAL_STEP = "global_step"
OPTIMIZER = re.compile(r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|Momentum|beta[12]_power|global_step)$")
"""Optimizer state of each variable, and counters."""
PART = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")


@dataclass(frozen=True)
class BundleEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class Bundle:
    """A checkpoint whose index is read and checked."""

    prefix: Path
    num_shards: int
    entries: dict[str, BundleEntry]

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        path = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self.num_shards:05d}")
        if entry.dtype in OTHER_TYPES.values():
            raise UserError(
                "unsupported-tensor", f"{name} of {self.prefix} has the type {entry.dtype}, which is not numeric"
            )
        end = entry.offset + entry.nbytes
        with reading(f"{name} in {path}"), open(path, "rb") as stream:
            available = path.stat().st_size
            if end > available:
                raise UserError("damaged-weights", f"{path} is truncated: {name} ends at byte {end} of {available}")
            stream.seek(entry.offset)
            data = stream.read(entry.nbytes)
        if masked_checksum(data) != entry.checksum:
            raise UserError("damaged-weights", f"{path} is damaged: the checksum of {name} is wrong; download it again")
        dtype: torch.dtype = getattr(torch, entry.dtype)
        values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return values.reshape(entry.shape)


def index_of(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".index")


def find_prefix(path: Path) -> Path | None:
    """The prefix of a checkpoint from the prefix, one of its files, or the folder of a single checkpoint."""
    if path.is_dir():
        found = [index.with_suffix("") for index in path.glob("*.index")]
        if len(found) > 1:
            names = ", ".join(sorted(prefix.name for prefix in found))
            raise UserError("ambiguous-weights", f"{path} has several TensorFlow checkpoints ({names}); name one")
        return found[0] if found else None
    prefix = path.with_name(PART.sub("", path.name))
    return prefix if index_of(prefix).is_file() else None


def is_part(path: Path) -> bool:
    return PART.search(path.name) is not None


def open_checkpoint(prefix: Path) -> OpenedWeights:
    bundle = open_bundle(prefix)
    if "_CHECKPOINTABLE_OBJECT_GRAPH" in bundle.entries:
        raise UserError(
            "tensorflow-2-checkpoint", f"{prefix} is a TensorFlow 2 checkpoint; bertrain reads only TensorFlow 1"
        )
    tensors = tuple(
        StoredTensor(
            name=name,
            shape=entry.shape,
            dtype=entry.dtype,
            nbytes=entry.nbytes,
            read=partial(bundle.read, name),
            place=find_parameter(TENSORFLOW, name),
            is_transposed=name.endswith(TRANSPOSED_IN_TENSORFLOW),
            is_skipped=OPTIMIZER.match(name) is not None,
        )
        for name, entry in bundle.entries.items()
    )
    step = bundle.entries.get(GLOBAL_STEP)
    has_step = step is not None and step.shape == () and step.dtype.startswith("int")
    return OpenedWeights(
        kind="tf1",
        origin=str(prefix),
        fingerprint=lambda: combined_digest([index_of(prefix)]),  # it holds the checksum of every tensor
        tensors=tensors,
        global_step=int(bundle.read(GLOBAL_STEP)) if has_step else None,
    )


def open_bundle(prefix: Path) -> Bundle:
    index = index_of(prefix)
    with reading(index):
        content = index.read_bytes()
    try:
        table = _read_table(content)
        num_shards = _parse_header(table.pop(b"", b""))
        entries = [_parse_entry(key, value, num_shards) for key, value in table.items()]
    except ValueError as error:
        raise UserError("damaged-weights", f"{index} is damaged, or not a TensorFlow checkpoint: {error}") from None
    return Bundle(prefix, num_shards, {entry.name: entry for entry in entries})


def _read_table(content: bytes) -> dict[bytes, bytes]:
    if len(content) < FOOTER_BYTES:
        raise ValueError(f"it has {len(content)} bytes, fewer than the {FOOTER_BYTES} of the footer")
    footer = content[-FOOTER_BYTES:]
    if int.from_bytes(footer[-8:], "little") != MAGIC:
        raise ValueError("it does not end with the magic number of a sorted table")
    *_, offset, size = _parse_varints(footer[:-8], 4)  # the first two are the handle of the metaindex block
    table: dict[bytes, bytes] = {}
    last, end, expanded = b"", 0, 0
    for _, handle in _block_entries(_read_block(content, offset, size)):
        offset, size = _parse_varints(handle, 2)
        if offset < end:
            raise ValueError("its blocks overlap")
        end = offset + size
        for key, value in _block_entries(_read_block(content, offset, size)):
            if table and key <= last:
                raise ValueError("its keys are not sorted")
            expanded += len(key) + len(value)
            if expanded > EXPANSION_LIMIT * len(content):
                raise ValueError("its keys are too long for its size")
            table[key] = value
            last = key
    return table


def _parse_varints(data: bytes, count: int) -> list[int]:
    """The first numbers in `data`; a handle is offset and size of a block, without its trailer."""
    numbers, place = [], 0
    for _ in range(count):
        number, place = read_varint(data, place)
        numbers.append(number)
    return numbers


def _read_block(content: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + TRAILER.size > len(content):
        raise ValueError("a block ends after the file")
    compression, checksum = TRAILER.unpack_from(content, end)
    if masked_checksum(content[offset : end + 1]) != checksum:
        raise ValueError("the checksum of a block is wrong")
    block = content[offset:end]
    if compression == PLAIN:
        return block
    if compression != SNAPPY:
        raise ValueError(f"a block has the unknown compression {compression}")
    import pyarrow as pa

    size, _ = read_varint(block, 0)
    if size > SNAPPY_LIMIT * len(block):
        raise ValueError("a compressed block claims an impossible size")
    try:
        return pa.decompress(block, decompressed_size=size, codec="snappy", asbytes=True)
    except (pa.ArrowException, OSError):
        raise ValueError("a compressed block cannot be decompressed") from None


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block; each key shares a prefix with the one before."""
    num_restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * num_restarts  # restart points serve binary search only
    if end < 0:
        raise ValueError("a block is too short")
    key, place = b"", 0
    while place < end:
        shared, place = read_varint(block, place)
        own, place = read_varint(block, place)
        length, place = read_varint(block, place)
        if shared > len(key) or place + own + length > end:
            raise ValueError("a key or a value ends after its block")
        key = key[:shared] + block[place : place + own]
        place += own
        yield key, block[place : place + length]
        place += length


def _parse_header(message: bytes) -> int:
    """The number of data files; refuses big-endian bundles."""
    if not message:
        raise ValueError("it has no header")
    fields = _parse_fields(message)
    num_shards = _integer(fields, 1)
    if _integer(fields, 2):
        raise ValueError("it is big-endian, which is not supported")
    if not 0 < num_shards < 100_000:
        raise ValueError(f"it claims {num_shards} data files")
    return num_shards


def _parse_entry(key: bytes, message: bytes, num_shards: int) -> BundleEntry:
    fields = _parse_fields(message)
    name = key.decode("utf-8", "backslashreplace")
    shown = name if len(name) <= 100 else f"{name[:100]}..."
    if key[:1] == b"\0" or 7 in fields:
        raise ValueError(f"{shown!r} is stored in slices (a partitioned variable), which is not supported")
    type_number, shard, offset, nbytes = (_integer(fields, number) for number in (1, 3, 4, 5))
    shape, checksum = _parse_shape(fields.get(2, [b""])[-1]), fields.get(6, [bytes(4)])[-1]
    dtype = NUMPY_TYPES.get(type_number) or OTHER_TYPES.get(type_number)
    if dtype is None:
        raise ValueError(f"{shown!r} has the unknown type {type_number}")
    if shard >= num_shards or isinstance(checksum, int) or len(checksum) != 4:
        raise ValueError(f"its entry of {shown!r} is inconsistent")
    if type_number in NUMPY_TYPES and nbytes != math.prod(shape) * getattr(torch, dtype).itemsize:
        raise ValueError(f"{shown!r} of shape {shape} and type {dtype} cannot have {nbytes} bytes")
    return BundleEntry(name, dtype, shape, shard, offset, nbytes, int.from_bytes(checksum, "little"))


def _parse_shape(message: int | bytes) -> tuple[int, ...]:
    fields = _parse_fields(message)
    if _integer(fields, 3):
        raise ValueError("a tensor has no shape")
    dimensions = fields.get(2, [])
    if len(dimensions) > 254:
        raise ValueError(f"a tensor has {len(dimensions)} dimensions")
    return tuple(_integer(_parse_fields(dimension), 1) for dimension in dimensions)


def _parse_fields(message: int | bytes) -> dict[int, list[int | bytes]]:
    """The values of each field of a message by its number: an integer, or bytes."""
    if isinstance(message, int):
        raise ValueError("a field is not a message")
    fields: dict[int, list[int | bytes]] = {}
    for number, wire, content in wire_fields(message):
        fields.setdefault(number, []).append(content if wire else read_varint(content, 0)[0])
    return fields


def _integer(fields: dict[int, list[int | bytes]], number: int) -> int:
    """A non-negative integer field; 0 if it is absent, as in protocol buffers."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int) or value >= 1 << 63:
        raise ValueError("a field is not a size")
    return value
