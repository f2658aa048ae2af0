"""8-bit copies: a kernel that makes a tensor also writes it in 8 bits, scaled, and notes how large it was.

The scale is the one the previous step called for (delayed scaling): the largest magnitude then seen is mapped onto
the format's largest number. Values that outgrow it meanwhile saturate. E4M3 (448 at the most) holds weights and
activations, E5M2 (57,344) gradients, whose range is wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bertrain.kernels.arithmetic import HAS_ASSEMBLY
from bertrain.kernels.backend import jit, num_multiprocessors, tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class Cast:
    """Where a kernel finds the scale of its 8-bit result, and where each program leaves the largest magnitude."""

    dtype: torch.dtype
    scale: torch.Tensor  # [1]
    largest: torch.Tensor  # one entry per program, at least


class Eight(NamedTuple):
    """A matrix in 8 bits, as it lies [T, N] and transposed [N, T]: a product wants both sides along their rows."""

    rows: torch.Tensor
    columns: torch.Tensor


def empty_both_ways(like: torch.Tensor, cast: Cast | None) -> Eight:
    """Room for the 8-bit copies; a tensor that nobody touches where nothing is to be cast."""
    if cast is None:
        return Eight(like, like)
    num_rows, width = like.shape
    return Eight(
        *(torch.empty(shape, dtype=cast.dtype, device=like.device) for shape in ((num_rows, width), (width, num_rows)))
    )


def cast_plain(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The specification: scaled, cut at the format's largest number, rounded to nearest."""
    limit = LARGEST[dtype]
    return (values.float() * scale).clamp(-limit, limit).to(dtype)


def limit_of(cast: Cast | None) -> float:
    """The largest number of the format, or 0 where nothing is to be cast."""
    return 0.0 if cast is None else LARGEST[cast.dtype]


def scale_and_largest(cast: Cast | None, stand_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel is given for them; a tensor that nobody reads where nothing is to be cast."""
    return (stand_in, stand_in) if cast is None else (cast.scale, cast.largest)


@jit
def quantise(values, scale, LIMIT: tl.constexpr):
    """The bytes of the scaled values, cut at what the format can hold.

    The conversion is written as an instruction with a side effect that it does not have. Left to itself the compiler
    prefers to compute everything twice, once in the layout of each store, over moving a few bytes between threads.
    """
    if HAS_ASSEMBLY:
        if LIMIT == 448.0:
            return tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
                " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
                "=r,f,f,f,f", [values * scale], dtype=tl.int8, is_pure=False, pack=4,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [values * scale], dtype=tl.int8, is_pure=False, pack=4,
        )  # fmt: skip
    cut = tl.minimum(tl.maximum(values * scale, -LIMIT), LIMIT)
    if LIMIT == 448.0:
        return cut.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    return cut.to(tl.float8e5).to(tl.int8, bitcast=True)


@jit
def store_both_ways(
    out, out_t, values, scale, first_row, first_column, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store a tile in 8 bits as it lies in [num_rows, N], and transposed in [N, num_rows]."""
    quantised = quantise(values, scale, LIMIT)
    out = out.to(tl.pointer_type(tl.int8), bitcast=True) + (tl.cast(first_row, tl.int64) * N + first_column)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (first_row + rows < num_rows) & (first_column + columns < N)
    tl.store(out + (rows * N + columns), quantised, mask=inside)
    out_t = out_t.to(tl.pointer_type(tl.int8), bitcast=True) + (tl.cast(first_column, tl.int64) * num_rows + first_row)
    rows, columns = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None]
    inside = (first_row + rows < num_rows) & (first_column + columns < N)
    tl.store(out_t + (columns * num_rows + rows), tl.trans(quantised), mask=inside)


@jit
def _cast_both_ways_kernel(
    values, out, out_t, scale, largest, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    factor = tl.load(scale)
    peak = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        rows = (first + tl.arange(0, ROWS))[:, None]
        mask = (rows < num_rows) & (columns < N)
        block = tl.load(values + rows.to(tl.int64) * N + columns, mask=mask, other=0.0).to(tl.float32)
        store_both_ways(out, out_t, block, factor, first, tl.program_id(0) * COLUMNS, num_rows, N, ROWS, COLUMNS, LIMIT)
        peak = tl.maximum(peak, tl.abs(block))
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0))


PROGRAMS = 4096  # no kernel here is launched as more
CAST = (64, 64, 4, 16)  # rows, columns and warps of a tile; programs per multiprocessor


def cast_both_ways(values: torch.Tensor, cast: Cast, out: Eight | None = None) -> Eight:
    """A matrix [T, N] in 8 bits, as it lies and transposed."""
    num_rows, width = values.shape
    eight = empty_both_ways(values, cast) if out is None else out
    rows, columns, warps, per_multiprocessor = CAST
    across = -(-width // columns)
    down = max(1, min(num_multiprocessors(values.device) * per_multiprocessor // across, -(-num_rows // rows)))
    _cast_both_ways_kernel[(across, down)](
        values, *eight, cast.scale, cast.largest, num_rows,
        N=width, ROWS=rows, COLUMNS=columns, LIMIT=LARGEST[cast.dtype], num_warps=warps,
    )  # fmt: skip
    return eight


@jit
def _collect_kernel(partials, largest, BLOCK: tl.constexpr):
    places = partials + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peak = tl.max(tl.load(places), axis=0)
    tl.store(places, tl.zeros([BLOCK], dtype=tl.float32))
    largest += tl.program_id(0)
    tl.store(largest, tl.maximum(tl.load(largest), peak))


class Scales:
    """The scale of every 8-bit tensor of a model, and the largest magnitudes that decide the next step's.

    `formats` names each tensor's format. Scales start at 1 and mean nothing before the first `update`, so the first
    step of a run is computed in 16 bits and only measured.
    """

    def __init__(self, formats: list[torch.dtype], device: torch.device) -> None:
        self.formats = formats
        self._limits = torch.tensor([LARGEST[dtype] for dtype in formats], device=device)
        self.scale = torch.ones(len(formats), device=device)
        self._inverse = torch.ones(len(formats), 4, device=device)  # cuBLAS wants each on a 16-byte boundary
        self.largest = torch.zeros(len(formats), device=device)
        self._partials = torch.zeros(len(formats), PROGRAMS, device=device)
        self.ready = False
        """Whether the scales come from a measurement; until then they only take part in one."""

    def cast(self, site: int) -> Cast:
        return Cast(self.formats[site], self.scale[site : site + 1], self._partials[site])

    def inverse(self, site: int) -> torch.Tensor | None:
        """What to multiply the 8-bit tensor by to have its values back, a scalar on the device; None before `ready`."""
        return self._inverse[site, 0] if self.ready else None

    def collect(self) -> None:
        """Take up what the kernels of a bin, or of the matrices, have left."""
        _collect_kernel[(len(self.formats),)](self._partials, self.largest, BLOCK=PROGRAMS)

    def load(self, scale: torch.Tensor) -> None:
        """Go on with the scales of an earlier run."""
        self.scale.copy_(scale)
        self._inverse.copy_((1 / self.scale)[:, None])
        self.ready = True

    def update(self) -> None:
        """The next step's scales. A tensor that was all zero or not finite keeps the one it has."""
        usable = (self.largest > 0) & torch.isfinite(self.largest)
        self.scale.copy_(torch.where(usable, self._limits / self.largest, self.scale))
        self._inverse.copy_((1 / self.scale)[:, None])
        self.largest.zero_()
        self.ready = True
