"""Writes TensorFlow's tensor bundles, byte by byte after the format's description: for tests of what its own writer
does not write any more (compressed blocks), or never would (damage with right checksums)."""

from __future__ import annotations

import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

MAGIC = 0xDB4775248B80FB57
TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def masked(data: bytes) -> int:
    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def block(entries: list[tuple[bytes, bytes]], *, restart_every: int = 16) -> bytes:
    """Keys and values of a block; every so many keys, one is spelled out."""
    out, restarts, last = b"", [], b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % restart_every == 0:
            restarts.append(len(out))
        else:
            pairs = zip(key, last, strict=False)
            shared = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(key), len(last)))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(blocks: list[bytes], keys: list[bytes], *, snappy: bool = False) -> bytes:
    """A sorted table of these blocks, whose last keys are `keys`."""
    out = b""

    def append(content: bytes) -> bytes:
        nonlocal out
        if snappy:
            content = pa.compress(content, codec="snappy", asbytes=True)
        kind = bytes([int(snappy)])
        handle = varint(len(out)) + varint(len(content))
        out += content + kind + struct.pack("<I", masked(content + kind))
        return handle

    handles = [append(content) for content in blocks]
    unused = append(block([]))
    index = append(block(list(zip(keys, handles, strict=True))))
    return out + (unused + index).ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def shape_message(shape: tuple[int, ...]) -> bytes:
    return b"".join(field(2, field(1, size)) for size in shape)


def entry(dtype: str, shape: tuple[int, ...], shard: int, offset: int, data: bytes) -> bytes:
    """What an index says of a tensor."""
    said = field(1, TYPES[dtype]) + field(2, shape_message(shape)) + field(3, shard) + field(4, offset)
    return said + field(5, len(data)) + varint(6 << 3 | 5) + struct.pack("<I", masked(data))


def header(num_shards: int = 1, endianness: int = 0) -> bytes:
    return field(1, num_shards) + field(2, endianness) + field(3, field(1, 1))


def write_index(prefix: Path, entries: dict[bytes, bytes], *, snappy: bool = False, num_shards: int = 1) -> None:
    """An index of these entries, in blocks of 40."""
    rows = [(b"", header(num_shards)), *sorted(entries.items())]
    parts = [rows[first : first + 40] for first in range(0, len(rows), 40)]
    content = table([block(part) for part in parts], [part[-1][0] for part in parts], snappy=snappy)
    prefix.with_name(prefix.name + ".index").write_bytes(content)


def write_bundle(prefix: Path, tensors: dict[str, np.ndarray], *, snappy: bool = False, num_shards: int = 1) -> None:
    """A checkpoint of these tensors, dealt to so many data files."""
    data = [b""] * num_shards
    entries = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        shard, content = number % num_shards, tensor.tobytes()
        entries[name.encode()] = entry(str(tensor.dtype), tensor.shape, shard, len(data[shard]), content)
        data[shard] += content
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{num_shards:05d}").write_bytes(content)
    write_index(prefix, entries, snappy=snappy, num_shards=num_shards)
