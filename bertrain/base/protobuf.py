"""The wire format of protocol buffers: fields of a message, and runs of varints. Damaged bytes raise ValueError."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types
LONGEST_VARINT = 10  # bytes


def wire_fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Field number, wire type and content of each field of a message; a varint's content is its bytes."""
    place = 0
    while place < len(data):
        key, place = read_varint(data, place)
        wire = key & 7
        begin = place
        if wire == VARINT:
            _, place = read_varint(data, place)
        elif wire == LENGTH_DELIMITED:
            size, begin = read_varint(data, place)
            place = begin + size
        elif wire in (FIXED64, FIXED32):
            place += 8 if wire == FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire} is unknown")
        if place > len(data):
            raise ValueError("a field is longer than its message")
        yield key >> 3, wire, data[begin:place]


def encode_field(number: int, content: bytes) -> bytes:
    head = bytearray([number << 3 | LENGTH_DELIMITED])
    size = len(content)
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head) + content


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at `place`, seven bits to the byte, lowest bits first; and the place after it."""
    value = shift = 0
    for byte in data[place : place + LONGEST_VARINT]:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place + shift // 7
    raise ValueError("a number is cut off, or has too many bytes")


def decode_varints(data: bytes) -> npt.NDArray[np.int64]:
    """All numbers of a run of varints; a negative number takes ten bytes."""
    raw = np.frombuffer(data, dtype=np.uint8)
    is_last = raw < 128
    if is_last.all():
        return raw.astype(np.int64)
    ends = np.flatnonzero(is_last) + 1
    if not is_last[-1]:
        raise ValueError("a number is cut off")
    starts = np.concatenate([[0], ends[:-1]])
    sizes = ends - starts
    if sizes.max() > LONGEST_VARINT:
        raise ValueError("a number has too many bytes")
    shifts = 7 * (np.arange(len(raw)) - np.repeat(starts, sizes))
    shifted = (raw & 127).astype(np.uint64) << shifts.astype(np.uint64)
    return np.add.reduceat(shifted, starts).view(np.int64)


def encode_varints(values: npt.NDArray) -> bytes:
    values = values.astype(np.uint64)
    sizes = np.ones(len(values), dtype=np.int64)
    for bits in range(7, 64, 7):
        sizes += values >= np.uint64(1 << bits)
    ends = np.cumsum(sizes)
    within = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    groups = np.repeat(values, sizes) >> (7 * within).astype(np.uint64) & np.uint64(127)
    more = within < np.repeat(sizes, sizes) - 1
    return (groups.astype(np.uint8) | (more.astype(np.uint8) << 7)).tobytes()
