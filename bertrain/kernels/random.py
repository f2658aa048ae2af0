"""Counter-based dropout: a mask is a pure function of (seed, site, row, column), so it is never stored.

The generator hashes a 32-bit counter, key + row * ROW_STEP + column * GOLDEN; a second key enters half-way, so
that the streams of two keys are not shifts of one another. One counter serves four elements: they share the
mixing and differ in the last multiplier. An element is dropped when its product lies below p * 2**32, so the
probability is exact to 2**-32; correlations between the four stay under 4e-4 (measured, see the tests). A
Philox call per element would cost more than the exponential it stands beside; this costs about five
instructions, and only two of them on the busy integer pipe.

Where the four elements lie is chosen for the kernels: in attention they are (row, row + 8) x (column,
column + 8), which a thread holds together in a tensor-core accumulator and in its transpose; in row-wise
kernels they are four neighbouring columns, which a thread loads together.

The first half of the file is the torch twin in int64 arithmetic, the second half the same functions in Triton.
"""

from __future__ import annotations

import torch

from bertrain.kernels.backend import jit, tl

GOLDEN = 0x9E3779B9
ROW_STEP = 0x85EBCA6B
MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0x846CA68B, 0x827F233D, 0xC222A3AF, 0x76C6621F)


def dropout_threshold(p: float) -> int:
    """Threshold below which a 32-bit word means "drop"."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1), not {p}")
    return min(round(p * 2**32), MASK32)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def _keep_plain(
    key: torch.Tensor, row: torch.Tensor, column: torch.Tensor, quarter: torch.Tensor, p: float
) -> torch.Tensor:
    x = (key + row * ROW_STEP + column * GOLDEN) & MASK32
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15) ^ _mix32(key ^ GOLDEN)
    multiplier = torch.full_like(quarter, MULTIPLIERS[0])  # no table from the host: a CUDA graph may be recording
    for number, value in enumerate(MULTIPLIERS[1:], start=1):
        multiplier = multiplier.masked_fill(quarter == number, value)
    return ((x * multiplier) & MASK32) >= dropout_threshold(p)


def _group(position: torch.Tensor) -> torch.Tensor:
    """Number of the group in which position and position + 8 stand together."""
    return (position & 7) + (position >> 4) * 8


def stream_key(seed: torch.Tensor, site: int) -> torch.Tensor:
    """Fold a 64-bit seed tensor of one element and a call site into a 32-bit key (as int64)."""
    seed = seed.reshape(()).to(torch.int64)
    low, high = seed & MASK32, (seed >> 32) & MASK32
    return _mix32(_mix32((low + site * GOLDEN) & MASK32) ^ high)


def rows_keep_mask(seed: torch.Tensor, site: int, num_rows: int, num_columns: int, p: float) -> torch.Tensor:
    """Keep-mask [num_rows, num_columns] of the row-wise kernels."""
    rows = torch.arange(num_rows, device=seed.device)[:, None]
    columns = torch.arange(num_columns, device=seed.device)[None, :]
    return _keep_plain(stream_key(seed, site), rows, columns >> 2, columns & 3, p)


def attention_keep_mask(
    seed: torch.Tensor, site: int, num_heads: int, sequence_start: int, length: int, p: float
) -> torch.Tensor:
    """Keep-mask [num_heads, length, length] of the attention of one sequence whose first token is a given row."""
    heads = torch.arange(num_heads, device=seed.device)
    key = (stream_key(seed, site) + sequence_start * GOLDEN + heads * ROW_STEP) & MASK32
    key = _mix32(key)[:, None, None]
    position = torch.arange(length, device=seed.device)
    rows, columns = position[None, :, None], position[None, None, :]
    quarter = ((rows >> 3) & 1) * 2 + ((columns >> 3) & 1)
    return _keep_plain(key, _group(rows), _group(columns), quarter, p)


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
def _keep(counter, second_key, quarter, THRESHOLD: tl.constexpr):
    """Keep decision from the counter of a group of four elements and the element's place in the group."""
    x = counter ^ (counter >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15) ^ second_key
    low = tl.where((quarter & 1) == 0, 0x846CA68B, 0x827F233D)
    high = tl.where((quarter & 1) == 0, 0xC222A3AF, 0x76C6621F)
    return x * tl.where(quarter < 2, low, high).to(tl.uint32) >= THRESHOLD


@jit
def rows_keep(key, row, columns, THRESHOLD: tl.constexpr):
    """Keep-mask of the row-wise kernels; `row` and `columns` broadcast against each other."""
    counter = key + tl.cast(row, tl.uint32) * 0x85EBCA6B + (columns >> 2).to(tl.uint32) * 0x9E3779B9
    return _keep(counter, mix32(key ^ 0x9E3779B9), columns & 3, THRESHOLD)


@jit
def attention_key(key, sequence_start, head):
    """Key of one sequence and head."""
    return mix32(key + tl.cast(sequence_start, tl.uint32) * 0x9E3779B9 + tl.cast(head, tl.uint32) * 0x85EBCA6B)


@jit
def attention_keep(key, first_row, rows, first_column, columns, THRESHOLD: tl.constexpr):
    """Keep-mask of a tile of scores at (first_row, first_column), both multiples of 16.

    `rows` and `columns` count from the tile's corner and are shaped to broadcast. They come apart from the
    corner because the compiler knows their bits per register: it then sees that four elements share a counter,
    mixes it once, and finds each multiplier to be a constant.
    """
    corner = key + tl.cast(first_row // 2, tl.uint32) * 0x85EBCA6B + tl.cast(first_column // 2, tl.uint32) * 0x9E3779B9
    row_part = ((rows & 7) + (rows >> 4) * 8).to(tl.uint32) * 0x85EBCA6B
    column_part = ((columns & 7) + (columns >> 4) * 8).to(tl.uint32) * 0x9E3779B9
    quarter = ((rows >> 3) & 1) * 2 + ((columns >> 3) & 1)
    return _keep(corner + (row_part + column_part), mix32(key ^ 0x9E3779B9), quarter, THRESHOLD)
