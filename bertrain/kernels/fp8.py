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


class Bytes(NamedTuple):
    """A matrix in 8 bits as it lies, and how large it was, from kernels that have no room to transpose it."""

    rows: torch.Tensor
    peaks: torch.Tensor  # one entry per program


def empty_bytes(like: torch.Tensor, cast: Cast | None, num_programs: int) -> Bytes:
    """Room for them; a tensor that nobody touches where nothing is to be cast."""
    if cast is None:
        return Bytes(like, like)
    peaks = torch.empty(num_programs, dtype=torch.float32, device=like.device)
    return Bytes(torch.empty(like.shape, dtype=cast.dtype, device=like.device), peaks)


def limit_and_scale(cast: Cast | None, stand_in: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The format's largest number and the scale; 0 and a tensor that nobody reads where nothing is to be cast."""
    return (0.0, stand_in) if cast is None else (LARGEST[cast.dtype], cast.scale)


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


@jit
def widen(values):
    """bf16 as float32. The compiler's own widening is something it moves memory traffic across: it would sooner
    transpose 16 bits and compute all that follows a second time than transpose the 8 bits at the end."""
    if HAS_ASSEMBLY and values.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [values],
            dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    return values.to(tl.float32)


@jit
def quantize(values, LIMIT: tl.constexpr):
    """The bytes of scaled values, cut at what the format can hold."""
    if HAS_ASSEMBLY:
        if LIMIT == 448.0:
            return tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
                " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
                "=r,f,f,f,f", [values], dtype=tl.int8, is_pure=True, pack=4,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [values], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    cut = tl.minimum(tl.maximum(values, -LIMIT), LIMIT)
    if LIMIT == 448.0:
        return cut.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    return cut.to(tl.float8e5).to(tl.int8, bitcast=True)


@jit
def quantize_four(a, b, c, d, LIMIT: tl.constexpr):
    """The bytes of four scaled tensors side by side in one 32-bit word, a lowest."""
    if HAS_ASSEMBLY:
        if LIMIT == 448.0:
            return tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
                " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
                "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    word = quantize(a, LIMIT).to(tl.int32) & 255
    word |= (quantize(b, LIMIT).to(tl.int32) & 255) << 8
    word |= (quantize(c, LIMIT).to(tl.int32) & 255) << 16
    return word | (quantize(d, LIMIT).to(tl.int32) << 24)


@jit
def store_both_ways(
    out, out_t, a, b, c, d, first_row, first_column, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store a tile in 8 bits as it lies in [num_rows, N], and transposed in [N, num_rows].

    The tile, scaled, comes as four tensors [QUADS, COLUMNS]: the first rows of every four, the second ones and so on.
    So a thread holds four neighbours of a column, and what moves between threads are whole words of them.
    """
    places, places_t, inside = _places(first_row, first_column, num_rows, N, QUADS, COLUMNS)
    out = out.to(tl.pointer_type(tl.int8), bitcast=True) + tl.cast(first_row, tl.int64) * N
    tl.store(out + places, quantize(a, LIMIT), mask=inside)
    tl.store(out + N + places, quantize(b, LIMIT), mask=inside)
    tl.store(out + 2 * N + places, quantize(c, LIMIT), mask=inside)
    tl.store(out + 3 * N + places, quantize(d, LIMIT), mask=inside)
    out_t = out_t.to(tl.pointer_type(tl.int32), bitcast=True) + tl.cast(first_column, tl.int64) * (num_rows // 16 * 4)
    tl.store(out_t + places_t, quantize_four(a, b, c, d, LIMIT), mask=inside)


@jit
def _places(first_row, first_column, num_rows, N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the first rows of a tile's fours lie in the matrix, from `first_row` on; where the words of its transpose
    lie, from `first_column` on; and whether they exist. Divisions by 16 tell the compiler what is a multiple of it."""
    quads, columns = tl.arange(0, QUADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    words, quads_here = num_rows // 16 * 4, first_row // 16 * 4 + quads
    inside = (quads_here < words) & (first_column + columns < N)
    return quads * (4 * N) + (first_column + columns), columns * words + quads_here, inside


@jit
def load_four(values, first_row, first_column, num_rows, N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile as `store_both_ways` takes it, zero past the last row, still to be widened."""
    places, _places_t, inside = _places(first_row, first_column, num_rows, N, QUADS, COLUMNS)
    values += tl.cast(first_row, tl.int64) * N
    a = tl.load(values + places, mask=inside, other=0.0)
    b = tl.load(values + N + places, mask=inside, other=0.0)
    c = tl.load(values + 2 * N + places, mask=inside, other=0.0)
    d = tl.load(values + 3 * N + places, mask=inside, other=0.0)
    return a, b, c, d


@jit
def store_four(
    out, a, b, c, d, first_row, first_column, num_rows, N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store such a tile as it lies, in the type of `out`."""
    places, _places_t, inside = _places(first_row, first_column, num_rows, N, QUADS, COLUMNS)
    out += tl.cast(first_row, tl.int64) * N
    tl.store(out + places, a.to(out.dtype.element_ty), mask=inside)
    tl.store(out + N + places, b.to(out.dtype.element_ty), mask=inside)
    tl.store(out + 2 * N + places, c.to(out.dtype.element_ty), mask=inside)
    tl.store(out + 3 * N + places, d.to(out.dtype.element_ty), mask=inside)


@jit
def peak_of_four(a, b, c, d):
    """The largest magnitude at each place of four tensors."""
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@jit
def _cast_both_ways_kernel(
    values, out, out_t, scale, largest, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    first_column = tl.program_id(0) * COLUMNS
    factor = tl.load(scale)
    peak = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    for first in range(tl.program_id(1) * 4 * QUADS, num_rows, tl.num_programs(1) * 4 * QUADS):
        a, b, c, d = load_four(values, first, first_column, num_rows, N, QUADS, COLUMNS)
        a, b, c, d = widen(a), widen(b), widen(c), widen(d)
        peak = tl.maximum(peak, peak_of_four(a, b, c, d))
        a, b, c, d = a * factor, b * factor, c * factor, d * factor
        store_both_ways(out, out_t, a, b, c, d, first, first_column, num_rows, N, QUADS, COLUMNS, LIMIT)
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0))


PROGRAMS = 4096  # no kernel here is launched as more
CAST = (32, 64, 8, 12)  # fours of rows, columns and warps of a tile; programs per multiprocessor


def grid_of(num_rows: int, width: int, rows: int, columns: int, num_programs: int) -> tuple[int, int]:
    """Programs across and down a matrix cut into tiles: one strip of columns each, at most `num_programs` in all."""
    across = -(-width // columns)
    return across, max(1, min(num_programs // across, -(-num_rows // rows)))


def cast_both_ways(values: torch.Tensor, cast: Cast, out: Eight | None = None) -> Eight:
    """A matrix [T, N], T a multiple of 16, in 8 bits, as it lies and transposed."""
    num_rows, width = values.shape
    eight = empty_both_ways(values, cast) if out is None else out
    quads, columns, warps, per_multiprocessor = CAST
    across, down = grid_of(num_rows, width, 4 * quads, columns, num_multiprocessors(values.device) * per_multiprocessor)
    _cast_both_ways_kernel[(across, down)](
        values, *eight, cast.scale, cast.largest, num_rows,
        N=width, QUADS=quads, COLUMNS=columns, LIMIT=LARGEST[cast.dtype], num_warps=warps,
    )  # fmt: skip
    return eight


@jit
def _side_by_side(a, b, c, d):
    """Bytes of four tensors in one 32-bit word, a lowest."""
    if HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 ab0, ab1, cd0, cd1; prmt.b32 ab0, $4, $5, 0x5140; prmt.b32 ab1, $4, $5, 0x7362;"
            " prmt.b32 cd0, $6, $7, 0x5140; prmt.b32 cd1, $6, $7, 0x7362;"
            " prmt.b32 $0, ab0, cd0, 0x5410; prmt.b32 $1, ab0, cd0, 0x7632;"
            " prmt.b32 $2, ab1, cd1, 0x5410; prmt.b32 $3, ab1, cd1, 0x7632; }",
            "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    low = (a.to(tl.int32) & 255) | ((b.to(tl.int32) & 255) << 8)
    return low | ((c.to(tl.int32) & 255) << 16) | (d.to(tl.int32) << 24)


@jit
def _turn_kernel(
    rows, out_t, peaks, largest, num_rows, num_peaks,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    num_programs = tl.num_programs(0) * tl.num_programs(1)
    peak = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(program * BLOCK, num_peaks, num_programs * BLOCK):
        entries = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(peaks + entries, mask=entries < num_peaks, other=0.0))
    tl.store(largest + program, tl.max(peak, axis=0))
    rows = rows.to(tl.pointer_type(tl.int8), bitcast=True)
    out_t = out_t.to(tl.pointer_type(tl.int32), bitcast=True)
    first_column = tl.program_id(0) * COLUMNS
    out_t += tl.cast(first_column, tl.int64) * (num_rows // 16 * 4)
    for first in range(tl.program_id(1) * 4 * QUADS, num_rows, tl.num_programs(1) * 4 * QUADS):
        places, places_t, inside = _places(first, first_column, num_rows, N, QUADS, COLUMNS)
        tile = rows + tl.cast(first, tl.int64) * N + places
        a, b = tl.load(tile, mask=inside, other=0), tl.load(tile + N, mask=inside, other=0)
        c, d = tl.load(tile + 2 * N, mask=inside, other=0), tl.load(tile + 3 * N, mask=inside, other=0)
        tl.store(out_t + places_t, _side_by_side(a, b, c, d), mask=inside)


TURN = (32, 128, 8, 8)  # as CAST


def turn(given: Bytes, cast: Cast) -> Eight:
    """The same bytes transposed as well; takes up the peaks."""
    num_rows, width = given.rows.shape
    columns_first = torch.empty(width, num_rows, dtype=cast.dtype, device=given.rows.device)
    quads, columns, warps, per_multiprocessor = TURN
    num_programs = num_multiprocessors(given.rows.device) * per_multiprocessor
    grid = grid_of(num_rows, width, 4 * quads, columns, num_programs)
    _turn_kernel[grid](
        given.rows, columns_first, given.peaks, cast.largest, num_rows, given.peaks.numel(),
        N=width, QUADS=quads, COLUMNS=columns, BLOCK=128, num_warps=warps,
    )  # fmt: skip
    return Eight(given.rows, columns_first)


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
