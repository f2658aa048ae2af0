"""bias_gelu(x, bias): exact GELU of a bare matrix product plus its bias, one pass each way.

GELU(v) = v * Phi(v) with the true normal distribution, not the tanh curve: within 3.1e-6 of it, a thousandth of the
rounding of a 16-bit result at 1. A library erf takes longer than the memory it waits for, so Phi is a logistic curve
of a fitted polynomial, nine instructions in all. The backward recomputes everything from x and sums the bias gradient
while it is there. The kernels that also write 8 bits live off what is left of the instruction slots.
"""

from __future__ import annotations

import torch

from bertrain.kernels.arithmetic import exp2, reciprocal
from bertrain.kernels.backend import jit, num_multiprocessors, tl
from bertrain.kernels.fp8 import Cast, Eight, empty_both_ways, limit_of, scale_and_largest, store_both_ways


def bias_gelu_plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The specification, in the dtype of its inputs."""
    return torch.nn.functional.gelu(x + bias)


@jit
def _distribution(v):
    """The standard normal's distribution at v, as a logistic curve of an odd polynomial; error under 3e-6 / |v|."""
    t = v * v
    p = 2.302045391 + t * (0.1052266856 + t * (-3.602730814e-4 + t * (-8.823842478e-5 + t * 3.229005812e-6)))
    return reciprocal(1.0 + exp2(-v * p))


@jit
def _density(v):
    """The standard normal's density at v."""
    return 0.3989422804014327 * exp2(v * v * -0.7213475204444817)


@jit
def _gelu_forward_kernel(
    x, bias, y, y8, y8_t, scale, largest, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns; without 8-bit copies there are enough of them for one step each."""
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    peak = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    factor = 1.0
    if LIMIT > 0:
        factor = tl.load(scale)
    for first in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        rows = (first + tl.arange(0, ROWS))[:, None]
        mask = (rows < num_rows) & (columns < N)
        pointers = rows.to(tl.int64) * N + columns
        v = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32) + bias_row
        result = v * _distribution(v)
        if FULL:
            tl.store(y + pointers, result.to(y.dtype.element_ty), mask=mask)
        if LIMIT > 0:
            store_both_ways(
                y8, y8_t, result, factor, first, tl.program_id(0) * COLUMNS, num_rows, N, ROWS, COLUMNS, LIMIT
            )
            peak = tl.maximum(peak, tl.abs(result))  # rows past the end hold GELU(bias): no harm
    if LIMIT > 0:
        largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0))


@jit
def _gelu_backward_kernel(
    dy, x, bias, dx, dx8, dx8_t, scale, largest, partials, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns and keeps the sum for the bias in registers."""
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    # In tall tiles one sum and one maximum for each place, which meet at the end; flat ones spare the registers.
    SUM_ROWS: tl.constexpr = ROWS if LIMIT > 0 else 1
    dbias = tl.zeros([SUM_ROWS, COLUMNS], dtype=tl.float32)
    peak = tl.zeros([SUM_ROWS, COLUMNS], dtype=tl.float32)
    factor = 1.0
    if LIMIT > 0:
        factor = tl.load(scale)
    step = tl.num_programs(1) * ROWS
    for first in tl.range(tl.program_id(1) * ROWS, num_rows, step, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS))[:, None]
        mask = (rows < num_rows) & (columns < N)
        pointers = rows.to(tl.int64) * N + columns
        v = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32) + bias_row
        gradient = tl.load(dy + pointers, mask=mask, other=0.0).to(tl.float32)
        gradient = gradient * (_distribution(v) + v * _density(v))
        if FULL:
            tl.store(dx + pointers, gradient.to(dx.dtype.element_ty), mask=mask)
        if LIMIT > 0:
            store_both_ways(
                dx8, dx8_t, gradient, factor, first, tl.program_id(0) * COLUMNS, num_rows, N, ROWS, COLUMNS, LIMIT
            )
            peak = tl.maximum(peak, tl.abs(gradient))
            dbias += gradient
        else:
            dbias += tl.sum(gradient, axis=0)[None, :]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(partials + tl.program_id(1) * N + columns, tl.sum(dbias, axis=0), mask=columns < N)
    if LIMIT > 0:
        largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0))


# Rows, columns and warps of a block, programs per multiprocessor (0: one for each block), pipeline stages.
# Measured on an H200.
FORWARD = (8, 512, 4, 0)
BACKWARD = (2, 1024, 4, 4, 3)
FORWARD_EIGHT = (32, 128, 4, 8)
BACKWARD_EIGHT = (32, 128, 8, 4, 1)


def bias_gelu_forward(
    x: torch.Tensor, bias: torch.Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[torch.Tensor, Eight]:
    """GELU(x + bias) of rows [T, N], computed in float32: in the dtype of x if `full`, and in 8 bits if `cast`."""
    num_rows, width = x.shape
    y = torch.empty_like(x) if full else x
    eight = empty_both_ways(x, cast)
    rows, columns, warps, per_multiprocessor = FORWARD if cast is None else FORWARD_EIGHT
    across, down = -(-width // columns), -(-num_rows // rows)
    if cast is not None:
        down = max(1, min(down, num_multiprocessors(x.device) * per_multiprocessor // across))
    _gelu_forward_kernel[(across, down)](
        x, bias, y, *eight, *scale_and_largest(cast, x), num_rows,
        N=width, ROWS=rows, COLUMNS=columns, FULL=full, LIMIT=limit_of(cast), num_warps=warps,
    )  # fmt: skip
    return y, eight


def bias_gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[torch.Tensor, Eight, torch.Tensor]:
    """Gradient of x, in the forms asked for as above, and partial sums [n, 1, N] of the bias gradient."""
    num_rows, width = x.shape
    dx = torch.empty_like(x) if full else x
    eight = empty_both_ways(x, cast)
    rows, columns, warps, per_multiprocessor, stages = BACKWARD if cast is None else BACKWARD_EIGHT
    across = (width + columns - 1) // columns
    down = max(1, min(num_multiprocessors(x.device) * per_multiprocessor // across, num_rows // rows))
    partials = torch.empty(down, 1, width, dtype=torch.float32, device=x.device)
    _gelu_backward_kernel[(across, down)](
        dy, x, bias, dx, *eight, *scale_and_largest(cast, x), partials, num_rows,
        N=width, ROWS=rows, COLUMNS=columns, STAGES=stages, FULL=full, LIMIT=limit_of(cast), num_warps=warps,
    )  # fmt: skip
    return dx, eight, partials
