"""FP8 with delayed scaling: the kernel that computes a tensor also writes its FP8 copy and records its magnitude.

The scale maps the largest magnitude of the previous step onto the format's largest number; larger values saturate.
E4M3 (up to 448) holds weights and activations, E5M2 (up to 57,344) gradients, whose range is wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels.arguments import Cast, Fp8Copy, Fp8Rows
from bertrain.kernels.arithmetic import HAS_ASSEMBLY
from bertrain.kernels.backend import jit, num_multiprocessors, tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def empty_rows(like: Tensor, cast: Cast | None, num_programs: int) -> Fp8Rows:
    """Allocate the FP8 result of a kernel; without `cast`, return a placeholder that the kernel does not touch."""
    if cast is None:
        return Fp8Rows(like, like)
    peaks = torch.empty(num_programs, dtype=torch.float32, device=like.device)
    return Fp8Rows(torch.empty(like.shape, dtype=cast.dtype, device=like.device), peaks)


def limit_and_scale(cast: Cast | None, placeholder: Tensor) -> tuple[float, Tensor]:
    """The format's largest number and the scale; without `cast`, 0 and a tensor that the kernel does not read."""
    return (0.0, placeholder) if cast is None else (LARGEST[cast.dtype], cast.scale)


def empty_both_ways(like: Tensor, cast: Cast) -> Fp8Copy:
    num_rows, width = like.shape
    return Fp8Copy(
        *(torch.empty(shape, dtype=cast.dtype, device=like.device) for shape in ((num_rows, width), (width, num_rows)))
    )


def cast_plain(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The specification: scaled, clamped to the format's range, rounded to nearest."""
    limit = LARGEST[dtype]
    return (values.float() * scale).clamp(-limit, limit).to(dtype)


@jit
def widen(values):
    """bf16 as float32. In assembly, because the compiler moves layout changes across its own conversion: it would
    transpose the 16-bit input and compute everything twice rather than transpose the 8-bit result."""
    if HAS_ASSEMBLY and values.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [values],
            dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    return values.to(tl.float32)


@jit
def quantize(values, LIMIT: tl.constexpr):
    """The FP8 bytes of scaled values, clamped to the format's range."""
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
    """The FP8 bytes of four scaled tensors in one 32-bit word, `a` lowest."""
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
    """Store a scaled tile in FP8, as it is in [num_rows, N] and transposed in [N, num_rows].

    The tile comes as four tensors [QUADS, COLUMNS]: the first row of every four, the second, and so on. So a thread
    holds four neighbors of a column, and threads exchange whole words of them.
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
    """Offsets of the first row of each four from `first_row`; of the words of the transpose from `first_column`; and
    the mask of both. Dividing by 16 tells the compiler that an offset is a multiple of 16."""
    quads, columns = tl.arange(0, QUADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    words, quads_here = num_rows // 16 * 4, first_row // 16 * 4 + quads
    inside = (quads_here < words) & (first_column + columns < N)
    return quads * (4 * N) + (first_column + columns), columns * words + quads_here, inside


@jit
def load_four(values, first_row, first_column, num_rows, N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile as `store_both_ways` takes it, zero past the last row, in its own dtype."""
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
    """Store such a tile in the dtype of `out`."""
    places, _places_t, inside = _places(first_row, first_column, num_rows, N, QUADS, COLUMNS)
    out += tl.cast(first_row, tl.int64) * N
    tl.store(out + places, a.to(out.dtype.element_ty), mask=inside)
    tl.store(out + N + places, b.to(out.dtype.element_ty), mask=inside)
    tl.store(out + 2 * N + places, c.to(out.dtype.element_ty), mask=inside)
    tl.store(out + 3 * N + places, d.to(out.dtype.element_ty), mask=inside)


@jit
def peak_of_four(a, b, c, d):
    """The elementwise largest magnitude of four tensors."""
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


PROGRAMS = 4096  # no kernel that casts has more programs
CAST = (32, 64, 8, 12)  # groups of four rows, columns and warps of a tile; programs per multiprocessor


def grid_of(num_rows: int, width: int, rows: int, columns: int, num_programs: int) -> tuple[int, int]:
    """Programs across and down a matrix of tiles: one strip of columns each, at most `num_programs` in total."""
    across = -(-width // columns)
    return across, max(1, min(num_programs // across, -(-num_rows // rows)))


def cast_both_ways(values: Tensor, cast: Cast, out: Fp8Copy | None = None) -> Fp8Copy:
    """Cast a matrix [T, N], T a multiple of 16, to FP8, as it is and transposed."""
    num_rows, width = values.shape
    out = empty_both_ways(values, cast) if out is None else out
    quads, columns, warps, per_multiprocessor = CAST
    across, down = grid_of(num_rows, width, 4 * quads, columns, num_multiprocessors(values.device) * per_multiprocessor)
    _cast_both_ways_kernel[(across, down)](
        values, *out, cast.scale, cast.largest, num_rows,
        N=width, QUADS=quads, COLUMNS=columns, LIMIT=LARGEST[cast.dtype], num_warps=warps,
    )  # fmt: skip
    return out


@jit
def _side_by_side(a, b, c, d):
    """Bytes of four tensors in one 32-bit word, `a` lowest."""
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
def _transpose_kernel(
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


TRANSPOSE = (32, 128, 8, 8)  # as CAST


def transpose(given: Fp8Rows, cast: Cast) -> Fp8Copy:
    """Transpose the bytes of `given`, and reduce its peaks into those of `cast`."""
    num_rows, width = given.rows.shape
    transposed = torch.empty(width, num_rows, dtype=cast.dtype, device=given.rows.device)
    quads, columns, warps, per_multiprocessor = TRANSPOSE
    num_programs = num_multiprocessors(given.rows.device) * per_multiprocessor
    grid = grid_of(num_rows, width, 4 * quads, columns, num_programs)
    _transpose_kernel[grid](
        given.rows, transposed, given.peaks, cast.largest, num_rows, given.peaks.numel(),
        N=width, QUADS=quads, COLUMNS=columns, BLOCK=128, num_warps=warps,
    )  # fmt: skip
    return Fp8Copy(given.rows, transposed)


@jit
def _collect_kernel(partials, largest, BLOCK: tl.constexpr):
    places = partials + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peak = tl.max(tl.load(places), axis=0)
    tl.store(places, tl.zeros([BLOCK], dtype=tl.float32))
    largest += tl.program_id(0)
    tl.store(largest, tl.maximum(tl.load(largest), peak))


class Scales:
    """The scale of every FP8 tensor of a model, and the largest magnitudes that set the next step's scales.

    `formats` names each tensor's format. Scales are unknown before the first `update`: the first step of a run computes
    in 16 bits and only measures.
    """

    def __init__(self, formats: list[torch.dtype], device: torch.device) -> None:
        self.formats = formats
        self._limits = torch.tensor([LARGEST[dtype] for dtype in formats], device=device)
        self.scale = torch.ones(len(formats), device=device)
        self._inverse = torch.ones(len(formats), 4, device=device)  # cuBLAS needs each on a 16-byte boundary
        self.largest = torch.zeros(len(formats), device=device)
        self._partials = torch.zeros(len(formats), PROGRAMS, device=device)
        self.ready = False  # whether the scales have been measured, so that products may use FP8

    def cast(self, site: int) -> Cast:
        return Cast(self.formats[site], self.scale[site : site + 1], self._partials[site])

    def inverse(self, site: int) -> Tensor | None:
        """The factor from FP8 back to values, a scalar on the device; None before `ready`."""
        return self._inverse[site, 0] if self.ready else None

    def collect(self) -> None:
        """Reduce the magnitudes that the kernels of a bin, or of the matrices, have recorded."""
        _collect_kernel[(len(self.formats),)](self._partials, self.largest, BLOCK=PROGRAMS)

    def load(self, scale: Tensor) -> None:
        """Restore the scales of a checkpoint."""
        self.scale.copy_(scale)
        self._inverse.copy_((1 / self.scale)[:, None])
        self.ready = True

    def update(self) -> None:
        """Set the next step's scales. A tensor that was all zero or not finite keeps its scale."""
        usable = (self.largest > 0) & torch.isfinite(self.largest)
        self.scale.copy_(torch.where(usable, self._limits / self.largest, self.scale))
        self._inverse.copy_((1 / self.scale)[:, None])
        self.largest.zero_()
        self.ready = True
