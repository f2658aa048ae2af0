"""TensorFlow's checkpoints without TensorFlow: the tensor bundle of `.index` and `.data-00000-of-00001`.

The index is a sorted table of LevelDB's form: blocks of keys and values, each block with a checksum and maybe
compressed by snappy, and at the end a footer that says where the block of blocks is. The first key is empty and holds
the bundle's header; every other key is the name of a tensor, its value a protocol buffer with the type, the shape, and
where in which data file its bytes lie. TensorFlow's default is not to compress; MLPerf's model.ckpt-28252.index is (it
has 17,371 bytes for 1,197 tensors, which take about 47,000 otherwise).

Everything is checked before it is believed: a file can make this module raise UserError, and never use much more
memory than the file has bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.protobuf import read_varint, wire_fields
from bertrain.data.formats.tfrecord import masked_checksum

FOOTER_BYTES, MAGIC = 48, 0xDB4775248B80FB57
TRAILER = struct.Struct("<BI")  # of a block: how it is compressed, and its checksum
PLAIN, SNAPPY = 0, 1
LONGEST_SHOWN = 100  # characters of a name in a sentence
SNAPPY_AT_MOST = 22  # times its size a block can become: three bytes copy up to 64
UNFOLDED_AT_MOST = 64  # times its size an index can become; names share their beginnings, so few bytes could spell many

# Numbers of tensorflow/core/framework/types.proto. The last three have no fixed size and hold no weights.
NUMPY_TYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
}
OTHER_TYPES = {7: "string", 20: "resource", 21: "variant"}


class _DamagedError(Exception):
    """What is wrong with a bundle, in words, without saying which."""


@dataclass(frozen=True)
class BundleEntry:
    """A tensor of a bundle: what it is, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class Bundle:
    """A checkpoint of TensorFlow: its index, read and checked; tensors are read when asked for."""

    prefix: Path
    num_shards: int
    entries: dict[str, BundleEntry]

    @property
    def index(self) -> Path:
        return index_of(self.prefix)

    def data_file(self, shard: int) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.data-{shard:05d}-of-{self.num_shards:05d}")

    def read(self, name: str) -> Tensor:
        """One tensor, its checksum verified."""
        entry = self.entries[name]
        path = self.data_file(entry.shard)
        if entry.dtype in OTHER_TYPES.values():
            raise UserError(f"{name} of {self.prefix} is of type {entry.dtype}, which holds no numbers")
        end = entry.offset + entry.nbytes
        try:
            with open(path, "rb") as stream:
                available = path.stat().st_size
                if end > available:
                    raise UserError(f"{path} is cut off: {name} ends at byte {end}, and the file has {available}")
                stream.seek(entry.offset)
                data = stream.read(entry.nbytes)
        except OSError as error:
            raise UserError(f"cannot read {path}, where {name} lies: {error.strerror or error}") from None
        if masked_checksum(data) != entry.checksum:
            raise UserError(f"{path} is damaged: the checksum of {name} is wrong")
        return _to_tensor(data, entry)


def index_of(prefix: Path) -> Path:
    """The index of the checkpoint that TensorFlow knows as `prefix`."""
    return prefix.with_name(prefix.name + ".index")


def open_bundle(prefix: Path) -> Bundle:
    """The checkpoint at `prefix` (TensorFlow's way to name the files that begin so)."""
    index = index_of(prefix)
    try:
        content = index.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {index}: {error.strerror or error}") from None
    try:
        table = _read_table(content)
        num_shards = _parse_header(table.pop(b"", b""))
        entries = [_parse_entry(key, value, num_shards) for key, value in table.items()]
    except (_DamagedError, ValueError) as error:
        raise UserError(f"{index} is no TensorFlow checkpoint, or a damaged one: {error}") from None
    return Bundle(prefix, num_shards, {entry.name: entry for entry in entries})


# --- the table ------------------------------------------------------------------------------------------


def _read_table(content: bytes) -> dict[bytes, bytes]:
    """Keys and values of a sorted table, whose keys must ascend."""
    if len(content) < FOOTER_BYTES:
        raise _DamagedError(f"it has {len(content)} bytes, and its footer alone has {FOOTER_BYTES}")
    footer = content[-FOOTER_BYTES:]
    if int.from_bytes(footer[-8:], "little") != MAGIC:
        raise _DamagedError("it does not end with the mark of a sorted table")
    place = 0
    for _ in range(2):  # of the block about blocks, which is unused, and of the one before it
        _, place = read_varint(footer, place)
    offset, size = _parse_handle(footer[place:-8])
    table: dict[bytes, bytes] = {}
    last, end, unfolded = b"", 0, 0
    for _, handle in _block_entries(_read_block(content, offset, size)):
        offset, size = _parse_handle(handle)
        if offset < end:
            raise _DamagedError("its blocks overlap")
        end = offset + size
        for key, value in _block_entries(_read_block(content, offset, size)):
            if table and key <= last:
                raise _DamagedError("its names are not in order")
            unfolded += len(key) + len(value)
            if unfolded > UNFOLDED_AT_MOST * len(content):
                raise _DamagedError("its names are far longer than it is")
            table[key] = value
            last = key
    return table


def _parse_handle(data: bytes) -> tuple[int, int]:
    """Where a block is, and its size without the trailer."""
    offset, place = read_varint(data, 0)
    size, _ = read_varint(data, place)
    return offset, size


def _read_block(content: bytes, offset: int, size: int) -> bytes:
    """A block's content, its checksum verified, decompressed."""
    end = offset + size
    if end + TRAILER.size > len(content):
        raise _DamagedError("a block reaches beyond its end")
    compression, checksum = TRAILER.unpack_from(content, end)
    if masked_checksum(content[offset : end + 1]) != checksum:
        raise _DamagedError("the checksum of a block is wrong")
    block = content[offset:end]
    if compression == PLAIN:
        return block
    if compression != SNAPPY:
        raise _DamagedError(f"a block is compressed in a way unknown here ({compression})")
    return _decompress(block)


def _decompress(block: bytes) -> bytes:
    import pyarrow as pa

    size, _ = read_varint(block, 0)
    if size > SNAPPY_AT_MOST * len(block):
        raise _DamagedError("a compressed block promises more than it can hold")
    try:
        return pa.decompress(block, decompressed_size=size, codec="snappy", asbytes=True)
    except (pa.ArrowException, OSError):
        raise _DamagedError("a compressed block cannot be decompressed") from None


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block; a key says how many of its bytes are those of the key before it."""
    if len(block) < 4:
        raise _DamagedError("a block is too short")
    num_restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * num_restarts  # restarts are for searching, which nobody does here
    if end < 0:
        raise _DamagedError("a block is too short")
    key, place = b"", 0
    while place < end:
        shared, place = read_varint(block, place)
        own, place = read_varint(block, place)
        length, place = read_varint(block, place)
        if shared > len(key) or place + own + length > end:
            raise _DamagedError("a name or a value is longer than it can be")
        key = key[:shared] + block[place : place + own]
        place += own
        yield key, block[place : place + length]
        place += length


# --- its values -----------------------------------------------------------------------------------------


def _parse_header(message: bytes) -> int:
    """The number of data files; refuses bundles of another byte order or of a later version."""
    if not message:
        raise _DamagedError("it has no header")
    fields = {number: (wire, content) for number, wire, content in wire_fields(message)}
    num_shards, endianness = _integer(fields.get(1)), _integer(fields.get(2))
    if endianness:
        raise _DamagedError("its bytes are in big-endian order, which is not read here")
    if not 0 < num_shards < 100_000:
        raise _DamagedError(f"it speaks of {num_shards} data files")
    return num_shards


def _parse_entry(key: bytes, message: bytes, num_shards: int) -> BundleEntry:
    fields: dict[int, tuple[int, bytes]] = {}
    shape: tuple[int, ...] = ()
    has_slices = key[:1] == b"\0"
    for number, wire, content in wire_fields(message):
        if number == 2 and wire == 2:
            shape = _parse_shape(content)
        elif number == 7:
            has_slices = True
        else:
            fields[number] = (wire, content)
    name = key.decode("utf-8", "backslashreplace")
    shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..."
    if has_slices:
        raise _DamagedError(
            f"{shown!r} is stored in slices, as a partitioned training stores its variables; save it whole first"
        )
    type_number, shard, offset, nbytes = (_integer(fields.get(number)) for number in (1, 3, 4, 5))
    checksum_wire, checksum = fields.get(6, (5, b"\0\0\0\0"))
    dtype = NUMPY_TYPES.get(type_number) or OTHER_TYPES.get(type_number)
    if dtype is None:
        raise _DamagedError(f"{shown!r} is of a type unknown here ({type_number})")
    if shard >= num_shards or checksum_wire != 5:
        raise _DamagedError(f"what it says of {shown!r} contradicts itself")
    if type_number in NUMPY_TYPES and nbytes != math.prod(shape) * item_bytes(dtype):
        raise _DamagedError(f"{shown!r} of shape {shape} and type {dtype} cannot have {nbytes} bytes")
    return BundleEntry(name, dtype, shape, shard, offset, nbytes, int.from_bytes(checksum, "little"))


def _parse_shape(message: bytes) -> tuple[int, ...]:
    dimensions = []
    for number, wire, content in wire_fields(message):
        if number == 2 and wire == 2:
            fields = {inner: (kind, value) for inner, kind, value in wire_fields(content)}
            dimensions.append(_integer(fields.get(1)))
        elif number == 3 and wire == 0 and _integer((wire, content)):
            raise _DamagedError("a tensor has no shape")
    if len(dimensions) > 254:
        raise _DamagedError(f"a tensor has {len(dimensions)} dimensions")
    return tuple(dimensions)


def _integer(field: tuple[int, bytes] | None) -> int:
    """A field that is a number from 0 on; 0 where it is left out, as protocol buffers do."""
    if field is None:
        return 0
    wire, content = field
    if wire != 0:
        raise _DamagedError("a number is no number")
    value, _ = read_varint(content, 0)
    if value >= 1 << 63:
        raise _DamagedError("a size is negative")
    return value


def item_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _to_tensor(data: bytes, entry: BundleEntry) -> Tensor:
    if not data:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, entry.dtype)).reshape(entry.shape)
