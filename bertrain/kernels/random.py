"""Counter-based dropout: a mask is a pure function of (seed, site, row, column), so it is never stored.

The generator hashes a 32-bit counter, key + row * ROW_STEP + column * GOLDEN; a second key is mixed in half-way, so
that the streams of two keys are not shifts of each other. Several elements share a counter and its mixing, and differ
in the last multiplier. A Philox call per element would cost more than attention's exponential.

In row-wise kernels, four neighboring columns share a counter; a thread loads them together. An element is dropped if
its product is below p * 2**32; correlations between the four stay under 4e-4 (measured, see the tests).

In attention, sixteen elements do: (row, row + 1, row + 8, row + 9) x the same columns. A thread holds half of them in a
tensor-core accumulator, and half in its transpose. A product serves two neighboring columns, 15 bits each: an element
is kept if its bits are below (1 - p) * 2**15. Kernels compare two at a time as 16-bit floats, which order like their
bits: three instructions per element instead of five. Correlations between the sixteen stay under 2e-3.

The first half of this file is PyTorch in int64 arithmetic, the second half the same functions in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels.backend import jit, tl

GOLDEN = 0x9E3779B9
ROW_STEP = 0x85EBCA6B
MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0x846CA68B, 0x827F233D, 0xC222A3AF, 0x76C6621F)
# One per (column + 8, row + 8, row + 1), as binary digits. Their lower halves multiply the same 15 bits. Of 4,000
# draws, these have the smallest correlation between any two.
PAIR_MULTIPLIERS = (
    0xC5C5178B, 0xF0E421C9, 0xB0AC6B1B, 0xB023102D, 0x733D80FF, 0x9383A5A9, 0x58F85025, 0xEC43FB6F,
)  # fmt: skip
MASK15 = 0x7FFF


def dropout_threshold(p: float) -> int:
    """The threshold below which a 32-bit word drops its element."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1), not {p}")
    return min(round(p * 2**32), MASK32)


def attention_threshold(p: float) -> int:
    """The threshold below which 15 bits keep their element in attention; 0 without dropout."""
    dropout_threshold(p)  # refuses an invalid probability
    return max(1, round((1 - p) * 2**15)) if p > 0 else 0


def row_constants(width: int, p: float) -> dict:
    """Compile-time arguments of the row-wise kernels, for rows of `width` columns."""
    columns = 1 << (width - 1).bit_length()
    return {"N": width, "COLUMNS": columns, "THRESHOLD": dropout_threshold(p), "INVERSE_KEEP": 1 / (1 - p)}


def _mix32(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def _words(key: Tensor, row: Tensor, column: Tensor, which: Tensor, multipliers: tuple[int, ...]) -> Tensor:
    x = (key + row * ROW_STEP + column * GOLDEN) & MASK32
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15) ^ _mix32(key ^ GOLDEN)
    multiplier = torch.full_like(which, multipliers[0])  # no copy from the host: a CUDA graph may be capturing
    for number, value in enumerate(multipliers[1:], start=1):
        multiplier = multiplier.masked_fill(which == number, value)
    return (x * multiplier) & MASK32


def _group(position: Tensor) -> Tensor:
    """Number of the group of a position, its neighbor, and both + 8."""
    return ((position >> 1) & 3) + (position >> 4) * 4


def stream_key(seed: Tensor, site: int) -> Tensor:
    """Fold a 64-bit seed tensor of one element and a call site into a 32-bit key (as int64)."""
    seed = seed.reshape(()).to(torch.int64)
    low, high = seed & MASK32, (seed >> 32) & MASK32
    return _mix32(_mix32((low + site * GOLDEN) & MASK32) ^ high)


def rows_keep_mask(seed: Tensor, site: int, num_rows: int, num_columns: int, p: float) -> Tensor:
    """Keep-mask [num_rows, num_columns] of the row-wise kernels."""
    rows = torch.arange(num_rows, device=seed.device)[:, None]
    columns = torch.arange(num_columns, device=seed.device)[None, :]
    return _words(stream_key(seed, site), rows, columns >> 2, columns & 3, MULTIPLIERS) >= dropout_threshold(p)


def attention_keep_mask(seed: Tensor, site: int, num_heads: int, sequence_start: int, length: int, p: float) -> Tensor:
    """Keep-mask [num_heads, length, length] of the attention within one sequence that starts at a given row."""
    heads = torch.arange(num_heads, device=seed.device)
    key = (stream_key(seed, site) + sequence_start * GOLDEN + heads * ROW_STEP) & MASK32
    key = _mix32(key)[:, None, None]
    position = torch.arange(length, device=seed.device)
    rows, columns = position[None, :, None], position[None, None, :]
    which = ((columns >> 3) & 1) * 4 + ((rows >> 3) & 1) * 2 + (rows & 1)
    words = _words(key, _group(rows), _group(columns), which, PAIR_MULTIPLIERS)
    bits = torch.where((columns & 1) == 0, words, words >> 16) & MASK15
    return (bits < attention_threshold(p)) | (p == 0)


# The same functions for kernels. All arithmetic is uint32 and wraps.


@jit
def mix32(x):
    """Full avalanche of 32 bits."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def load_stream_key(seed, site):
    """Key of (seed, site); `seed` points at one int64."""
    value = tl.load(seed)
    low = (value & 0xFFFFFFFF).to(tl.uint32)
    high = ((value >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return mix32(mix32(low + tl.cast(site, tl.uint32) * 0x9E3779B9) ^ high)


@jit
def _mixed(counter, key):
    """The mixing that the elements of a counter share."""
    x = counter ^ (counter >> 16)
    x = x * 0x7FEB352D
    return x ^ (x >> 15) ^ mix32(key ^ 0x9E3779B9)


@jit
def rows_keep(key, row, columns, THRESHOLD: tl.constexpr):
    """Keep-mask of the row-wise kernels; `row` and `columns` broadcast against each other."""
    counter = key + tl.cast(row, tl.uint32) * 0x85EBCA6B + (columns >> 2).to(tl.uint32) * 0x9E3779B9
    quarter = columns & 3
    low = tl.where((quarter & 1) == 0, 0x846CA68B, 0x827F233D)
    high = tl.where((quarter & 1) == 0, 0xC222A3AF, 0x76C6621F)
    return _mixed(counter, key) * tl.where(quarter < 2, low, high).to(tl.uint32) >= THRESHOLD


@jit
def attention_key(key, sequence_start, head):
    """Key of one sequence and head."""
    return mix32(key + tl.cast(sequence_start, tl.uint32) * 0x9E3779B9 + tl.cast(head, tl.uint32) * 0x85EBCA6B)


@jit
def attention_words(key, first_row, rows, first_column, columns):
    """Random words of a tile of scores at (first_row, first_column), both multiples of 16; one word per two columns.

    `rows` and `columns` count from the tile's corner and broadcast. They are separate arguments because the compiler
    knows their bits per register: so it sees which elements share a counter, mixes it once, and turns each multiplier
    into a constant.
    """
    corner = key + tl.cast(first_row // 4, tl.uint32) * 0x85EBCA6B + tl.cast(first_column // 4, tl.uint32) * 0x9E3779B9
    row_part = (((rows >> 1) & 3) + (rows >> 4) * 4).to(tl.uint32) * 0x85EBCA6B
    column_part = (((columns >> 1) & 3) + (columns >> 4) * 4).to(tl.uint32) * 0x9E3779B9
    is_even, is_upper = (rows & 1) == 0, ((rows >> 3) & 1) == 0
    left = tl.where(is_upper, tl.where(is_even, 0xC5C5178B, 0xF0E421C9), tl.where(is_even, 0xB0AC6B1B, 0xB023102D))
    right = tl.where(is_upper, tl.where(is_even, 0x733D80FF, 0x9383A5A9), tl.where(is_even, 0x58F85025, 0xEC43FB6F))
    multiplier = tl.where(((columns >> 3) & 1) == 0, left, right).to(tl.uint32)
    return _mixed(corner + (row_part + column_part), key) * multiplier


@jit
def attention_keep(words, columns, KEEP: tl.constexpr):
    """Keep-mask of a tile of scores from its words."""
    bits = tl.where((columns & 1) == 0, words, words >> 16) & 0x7FFF
    return bits < KEEP
