"""bias_gelu(x, bias): exact GELU of a bare matrix product plus its bias, one pass each way.

GELU(v) = v * Phi(v) with the normal distribution, not the tanh approximation; the error is under 3.1e-6, a thousandth
of the rounding of a 16-bit result at 1. A library erf would make the kernel slower than memory, so Phi is a logistic
curve of a fitted polynomial, nine instructions in all. The backward recomputes everything from x and sums the bias
gradient in the same pass.

The kernels that also write FP8 are bound by instructions: they compute in units of the FP8 scale, which costs nothing
inside the two curves, and load the next tiles while they compute one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.arguments import Cast, Fp8Copy
from bertrain.kernels.arithmetic import exp2, log2, reciprocal
from bertrain.kernels.backend import jit, num_multiprocessors, on_cpu, tl
from bertrain.kernels.fp8 import (
    LARGEST,
    empty_both_ways,
    grid_of,
    load_four,
    peak_of_four,
    store_both_ways,
    store_four,
    widen,
)


def bias_gelu_plain(x: Tensor, bias: Tensor) -> Tensor:
    """The specification, in the dtype of its inputs."""
    return torch.nn.functional.gelu(x + bias)


@jit
def _distribution(v, unit):
    """The standard normal distribution function at v, in units of `unit`: a logistic curve of an odd polynomial.

    The error is under 3e-6 / |v|.
    """
    t = v * v
    p = -2.302045391 + t * (-0.1052266856 + t * (3.602730814e-4 + t * (8.823842478e-5 + t * -3.229005812e-6)))
    return reciprocal(unit + unit * exp2(v * p))


@jit
def _slope(v, unit, top):
    """The derivative of GELU at v, in units of `unit`: distribution + v * density.

    `top` is the logarithm of the density at 0 to base 2, in those units; the density is 2 ** (top - v^2 log2(e) / 2).
    """
    return _distribution(v, unit) + v * exp2(v * v * -0.7213475204444817 + top)


@jit
def _gelu_forward_kernel(x, bias, y, num_rows, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (rows < num_rows) & (columns < N)
    pointers = rows.to(tl.int64) * N + columns
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    v = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32) + bias_row
    tl.store(y + pointers, (v * _distribution(v, 1.0)).to(y.dtype.element_ty), mask=mask)


@jit
def _gelu_forward_fp8_kernel(
    x, bias, y, y8, y8_t, scale, largest, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns, four rows per thread."""
    first_column = tl.program_id(0) * COLUMNS
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    unit = 1 / tl.load(scale)
    peak = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    begin, step = tl.program_id(1) * 4 * QUADS, tl.num_programs(1) * 4 * QUADS
    a, b, c, d = load_four(x, begin, first_column, num_rows, N, QUADS, COLUMNS)
    for first in tl.range(begin, num_rows, step, num_stages=1):
        next_a, next_b, next_c, next_d = load_four(x, first + step, first_column, num_rows, N, QUADS, COLUMNS)
        a, b, c, d = widen(a) + bias_row, widen(b) + bias_row, widen(c) + bias_row, widen(d) + bias_row
        a, b = a * _distribution(a, unit), b * _distribution(b, unit)
        c, d = c * _distribution(c, unit), d * _distribution(d, unit)
        if FULL:
            store_four(y, a * unit, b * unit, c * unit, d * unit, first, first_column, num_rows, N, QUADS, COLUMNS)
        store_both_ways(y8, y8_t, a, b, c, d, first, first_column, num_rows, N, QUADS, COLUMNS, LIMIT)
        peak = tl.maximum(peak, peak_of_four(a, b, c, d))  # rows past the end hold GELU(bias), which does no harm
        a, b, c, d = next_a, next_b, next_c, next_d
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0) * unit)


@jit
def _gelu_backward_kernel(
    dy, x, bias, dx, partials, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns; it keeps a sum per element in registers, reduced at the end."""
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    step = tl.num_programs(1) * ROWS
    for first in tl.range(tl.program_id(1) * ROWS, num_rows, step, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS))[:, None]
        mask = (rows < num_rows) & (columns < N)
        pointers = rows.to(tl.int64) * N + columns
        v = widen(tl.load(x + pointers, mask=mask, other=0.0)) + bias_row
        gradient = widen(tl.load(dy + pointers, mask=mask, other=0.0)) * _slope(v, 1.0, -1.3257480647361595)
        # Stores of four elements, in the layout of the sum: with eight, the compiler computes everything twice.
        tl.store(tl.max_contiguous(dx + pointers, [1, 4]), gradient.to(dx.dtype.element_ty), mask=mask)
        dbias += gradient
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(partials + tl.program_id(1) * N + columns, tl.sum(dbias, axis=0), mask=columns < N)


@jit
def _gelu_backward_fp8_kernel(
    dy, x, bias, dx, dx8, dx8_t, scale, largest, partials, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """The same with FP8 copies, four rows per thread; a sum and a maximum per element, reduced at the end."""
    first_column = tl.program_id(0) * COLUMNS
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    unit, top = 1 / factor, log2(factor) - 1.3257480647361595
    dbias = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    peak = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    step = tl.num_programs(1) * 4 * QUADS
    for first in tl.range(tl.program_id(1) * 4 * QUADS, num_rows, step, num_stages=STAGES):
        va, vb, vc, vd = load_four(x, first, first_column, num_rows, N, QUADS, COLUMNS)
        a, b, c, d = load_four(dy, first, first_column, num_rows, N, QUADS, COLUMNS)
        a = widen(a) * _slope(widen(va) + bias_row, unit, top)
        b = widen(b) * _slope(widen(vb) + bias_row, unit, top)
        c = widen(c) * _slope(widen(vc) + bias_row, unit, top)
        d = widen(d) * _slope(widen(vd) + bias_row, unit, top)
        if FULL:
            store_four(dx, a * unit, b * unit, c * unit, d * unit, first, first_column, num_rows, N, QUADS, COLUMNS)
        store_both_ways(dx8, dx8_t, a, b, c, d, first, first_column, num_rows, N, QUADS, COLUMNS, LIMIT)
        peak = tl.maximum(peak, peak_of_four(a, b, c, d))
        dbias += (a + b) + (c + d)
    columns = first_column + tl.arange(0, COLUMNS)
    tl.store(partials + tl.program_id(1) * N + columns, tl.sum(dbias, axis=0) * unit, mask=columns < N)
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0) * unit)


# Rows (FP8: groups of four rows), columns and warps of a block; programs per multiprocessor; pipeline stages.
# Tuned on an H200.
FORWARD = (8, 512, 4)
BACKWARD = (2, 1024, 4, 4, 3)
FORWARD_FP8 = (16, 128, 16, 2)
BACKWARD_FP8 = (8, 128, 8, 2, 3)


@on_cpu(cpu.bias_gelu_forward)
def bias_gelu_forward(
    x: Tensor, bias: Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[Tensor, Fp8Copy | None]:
    """GELU(x + bias) of rows [T, N]: in the dtype of x if `full`, in FP8 if `cast` (then T is a multiple of 16)."""
    num_rows, width = x.shape
    y = torch.empty_like(x) if full else x
    if cast is None:
        rows, columns, warps = FORWARD
        grid = -(-width // columns), -(-num_rows // rows)
        _gelu_forward_kernel[grid](x, bias, y, num_rows, N=width, ROWS=rows, COLUMNS=columns, num_warps=warps)
        return y, None
    y8 = empty_both_ways(x, cast)
    quads, columns, warps, per_multiprocessor = FORWARD_FP8
    grid = grid_of(num_rows, width, 4 * quads, columns, num_multiprocessors(x.device) * per_multiprocessor)
    _gelu_forward_fp8_kernel[grid](
        x, bias, y, *y8, cast.scale, cast.largest, num_rows,
        N=width, QUADS=quads, COLUMNS=columns, FULL=full, LIMIT=LARGEST[cast.dtype], num_warps=warps,
    )  # fmt: skip
    return y, y8


@on_cpu(cpu.bias_gelu_backward)
def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[Tensor, Fp8Copy | None, Tensor]:
    """Gradient of x, in the dtype of x if `full` and in FP8 if `cast`; partial sums [n, 1, N] of the bias gradient."""
    num_rows, width = x.shape
    dx = torch.empty_like(x) if full else x
    rows, columns, warps, per_multiprocessor, stages = BACKWARD if cast is None else BACKWARD_FP8
    num_programs = num_multiprocessors(x.device) * per_multiprocessor
    grid = grid_of(num_rows, width, rows if cast is None else 4 * rows, columns, num_programs)
    partials = torch.empty(grid[1], 1, width, dtype=torch.float32, device=x.device)
    if cast is None:
        _gelu_backward_kernel[grid](
            dy, x, bias, dx, partials, num_rows,
            N=width, ROWS=rows, COLUMNS=columns, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return dx, None, partials
    dx8 = empty_both_ways(x, cast)
    _gelu_backward_fp8_kernel[grid](
        dy, x, bias, dx, *dx8, cast.scale, cast.largest, partials, num_rows,
        N=width, QUADS=rows, COLUMNS=columns, STAGES=stages, FULL=full, LIMIT=LARGEST[cast.dtype], num_warps=warps,
    )  # fmt: skip
    return dx, dx8, partials
