"""bias_gelu(x, bias): exact GELU of a bare matrix product plus its bias, one pass each way.

GELU(v) = v * Phi(v) with the true normal distribution, not the tanh curve: within 3.1e-6 of it, a thousandth of the
rounding of a 16-bit result at 1. A library erf takes longer than the memory it waits for, so Phi is a logistic curve
of a fitted polynomial, nine instructions in all. The backward recomputes everything from x and sums the bias gradient
while it is there. The kernels that also write 8 bits live off what is left of the instruction slots.
"""

from __future__ import annotations

import torch

from bertrain.kernels import cpu
from bertrain.kernels.arithmetic import exp2, reciprocal
from bertrain.kernels.backend import jit, num_multiprocessors, tl
from bertrain.kernels.fp8 import (
    LARGEST,
    Cast,
    Eight,
    empty_both_ways,
    grid_of,
    load_four,
    peak_of_four,
    store_both_ways,
    store_four,
)


def bias_gelu_plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The specification, in the dtype of its inputs."""
    return torch.nn.functional.gelu(x + bias)


@jit
def _distribution(v):
    """The standard normal's distribution at v, as a logistic curve of an odd polynomial; error under 3e-6 / |v|."""
    t = v * v
    p = -2.302045391 + t * (-0.1052266856 + t * (3.602730814e-4 + t * (8.823842478e-5 + t * -3.229005812e-6)))
    return reciprocal(1.0 + exp2(v * p))


@jit
def _density(v):
    """The standard normal's density at v: 2 ** (log2(1 / sqrt(2 pi)) - v^2 log2(e) / 2)."""
    return exp2(v * v * -0.7213475204444817 - 1.3257480647361595)


@jit
def _slope(v):
    """The derivative of GELU at v."""
    return _distribution(v) + v * _density(v)


@jit
def _gelu_forward_kernel(x, bias, y, num_rows, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (rows < num_rows) & (columns < N)
    pointers = rows.to(tl.int64) * N + columns
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    v = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32) + bias_row
    tl.store(y + pointers, (v * _distribution(v)).to(y.dtype.element_ty), mask=mask)


@jit
def _gelu_forward_eight_kernel(
    x, bias, y, y8, y8_t, scale, largest, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns, four rows to a thread."""
    first_column = tl.program_id(0) * COLUMNS
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    peak = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    step = tl.num_programs(1) * 4 * QUADS
    for first in tl.range(tl.program_id(1) * 4 * QUADS, num_rows, step, num_stages=STAGES):
        a, b, c, d = load_four(x, first, first_column, num_rows, N, QUADS, COLUMNS)
        a, b, c, d = a + bias_row, b + bias_row, c + bias_row, d + bias_row
        a, b, c, d = a * _distribution(a), b * _distribution(b), c * _distribution(c), d * _distribution(d)
        if FULL:
            store_four(y, a, b, c, d, first, first_column, num_rows, N, QUADS, COLUMNS)
        store_both_ways(y8, y8_t, a, b, c, d, factor, first, first_column, num_rows, N, QUADS, COLUMNS, LIMIT)
        peak = tl.maximum(peak, peak_of_four(a, b, c, d))  # rows past the end hold GELU(bias): no harm
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0))


@jit
def _gelu_backward_kernel(
    dy, x, bias, dx, partials, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns and keeps the sum for the bias in registers."""
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    dbias = tl.zeros([1, COLUMNS], dtype=tl.float32)
    step = tl.num_programs(1) * ROWS
    for first in tl.range(tl.program_id(1) * ROWS, num_rows, step, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS))[:, None]
        mask = (rows < num_rows) & (columns < N)
        pointers = rows.to(tl.int64) * N + columns
        v = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32) + bias_row
        gradient = tl.load(dy + pointers, mask=mask, other=0.0).to(tl.float32) * _slope(v)
        tl.store(dx + pointers, gradient.to(dx.dtype.element_ty), mask=mask)
        dbias += tl.sum(gradient, axis=0)[None, :]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(partials + tl.program_id(1) * N + columns, tl.sum(dbias, axis=0), mask=columns < N)


@jit
def _gelu_backward_eight_kernel(
    dy, x, bias, dx, dx8, dx8_t, scale, largest, partials, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """The same with 8-bit copies, four rows to a thread; a sum and a maximum for each place, which meet at the end."""
    first_column = tl.program_id(0) * COLUMNS
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    dbias = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    peak = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    step = tl.num_programs(1) * 4 * QUADS
    for first in tl.range(tl.program_id(1) * 4 * QUADS, num_rows, step, num_stages=STAGES):
        va, vb, vc, vd = load_four(x, first, first_column, num_rows, N, QUADS, COLUMNS)
        a, b, c, d = load_four(dy, first, first_column, num_rows, N, QUADS, COLUMNS)
        a, b = a * _slope(va + bias_row), b * _slope(vb + bias_row)
        c, d = c * _slope(vc + bias_row), d * _slope(vd + bias_row)
        if FULL:
            store_four(dx, a, b, c, d, first, first_column, num_rows, N, QUADS, COLUMNS)
        store_both_ways(dx8, dx8_t, a, b, c, d, factor, first, first_column, num_rows, N, QUADS, COLUMNS, LIMIT)
        peak = tl.maximum(peak, peak_of_four(a, b, c, d))
        dbias += (a + b) + (c + d)
    columns = first_column + tl.arange(0, COLUMNS)
    tl.store(partials + tl.program_id(1) * N + columns, tl.sum(dbias, axis=0), mask=columns < N)
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0))


# Rows (of 8 bits: fours of rows), columns and warps of a block; programs per multiprocessor and pipeline stages.
# Measured on an H200.
FORWARD = (8, 512, 4)
BACKWARD = (2, 1024, 4, 4, 3)
FORWARD_EIGHT = (8, 128, 4, 5, 1)
BACKWARD_EIGHT = (16, 128, 8, 2, 3)


def bias_gelu_forward(
    x: torch.Tensor, bias: torch.Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[torch.Tensor, Eight]:
    """GELU(x + bias) of rows [T, N], computed in float32: in the dtype of x if `full`, and in 8 bits if `cast`.

    With `cast` T is a multiple of 16.
    """
    if cpu.computes(x):
        return cpu.gelu_forward(x, bias), empty_both_ways(x, None)
    num_rows, width = x.shape
    y = torch.empty_like(x) if full else x
    eight = empty_both_ways(x, cast)
    if cast is None:
        rows, columns, warps = FORWARD
        grid = -(-width // columns), -(-num_rows // rows)
        _gelu_forward_kernel[grid](x, bias, y, num_rows, N=width, ROWS=rows, COLUMNS=columns, num_warps=warps)
        return y, eight
    quads, columns, warps, per_multiprocessor, stages = FORWARD_EIGHT
    grid = grid_of(num_rows, width, 4 * quads, columns, num_multiprocessors(x.device) * per_multiprocessor)
    _gelu_forward_eight_kernel[grid](
        x, bias, y, *eight, cast.scale, cast.largest, num_rows,
        N=width, QUADS=quads, COLUMNS=columns, STAGES=stages, FULL=full, LIMIT=LARGEST[cast.dtype], num_warps=warps,
    )  # fmt: skip
    return y, eight


def bias_gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[torch.Tensor, Eight, torch.Tensor]:
    """Gradient of x, in the forms asked for as above, and partial sums [n, 1, N] of the bias gradient."""
    if cpu.computes(x):
        dx, partials = cpu.gelu_backward(dy, x, bias)
        return dx, empty_both_ways(x, None), partials
    num_rows, width = x.shape
    dx = torch.empty_like(x) if full else x
    eight = empty_both_ways(x, cast)
    rows, columns, warps, per_multiprocessor, stages = BACKWARD if cast is None else BACKWARD_EIGHT
    num_programs = num_multiprocessors(x.device) * per_multiprocessor
    grid = grid_of(num_rows, width, rows if cast is None else 4 * rows, columns, num_programs)
    partials = torch.empty(grid[1], 1, width, dtype=torch.float32, device=x.device)
    if cast is None:
        _gelu_backward_kernel[grid](
            dy, x, bias, dx, partials, num_rows,
            N=width, ROWS=rows, COLUMNS=columns, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return dx, eight, partials
    _gelu_backward_eight_kernel[grid](
        dy, x, bias, dx, *eight, cast.scale, cast.largest, partials, num_rows,
        N=width, QUADS=rows, COLUMNS=columns, STAGES=stages, FULL=full, LIMIT=LARGEST[cast.dtype], num_warps=warps,
    )  # fmt: skip
    return dx, eight, partials
