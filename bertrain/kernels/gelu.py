"""bias_gelu(x, bias): exact GELU of a bare matrix product plus its bias, one pass each way.

GELU(v) = v * Phi(v) with the true normal distribution, not the tanh curve. Phi comes from the rational
approximation 7.1.26 of Abramowitz and Stegun (absolute error below 1.5e-7, finer than any 16-bit result), because
its exponential is the one the derivative needs, and a library erf takes longer than the memory it waits for.
The backward recomputes everything from x and sums the bias gradient while it is there.
"""

from __future__ import annotations

import torch

from bertrain.kernels.backend import jit, num_multiprocessors, tl
from bertrain.kernels.fp8 import Cast, limit_of, quantise, scale_and_largest


def bias_gelu_plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The specification, in the dtype of its inputs."""
    return torch.nn.functional.gelu(x + bias)


@jit
def _normal(v):
    """Density (times sqrt(2 pi)) and distribution of the standard normal at v."""
    u = tl.abs(v) * 0.7071067811865476
    density = tl.exp2(u * u * -1.4426950408889634)
    t = 1.0 / (1.0 + 0.3275911 * u)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * density
    return density, tl.where(v >= 0, 1.0 - tail, tail)


@jit
def _forward_kernel(
    x, bias, y, y8, scale, largest, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (rows < num_rows) & (columns < N)
    pointers = rows.to(tl.int64) * N + columns
    v = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32)
    v += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    _density, distribution = _normal(v)
    result = tl.where(mask, v * distribution, 0.0)
    tl.store(y + pointers, result.to(y.dtype.element_ty), mask=mask)
    if LIMIT > 0:
        tl.store(y8 + pointers, quantise(result, tl.load(scale), LIMIT).to(y8.dtype.element_ty), mask=mask)
        tl.store(
            largest + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(tl.abs(result), 1), 0)
        )


@jit
def _backward_kernel(
    dy, x, bias, dx, dx8, scale, largest, partials, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns and keeps the sum for the bias in registers."""
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    bias_row = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    dbias = tl.zeros([COLUMNS], dtype=tl.float32)
    peak = tl.zeros([COLUMNS], dtype=tl.float32)
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
        density, distribution = _normal(v)
        gradient = gradient * (distribution + v * density * 0.3989422804014327)
        tl.store(dx + pointers, gradient.to(dx.dtype.element_ty), mask=mask)
        if LIMIT > 0:
            tl.store(dx8 + pointers, quantise(gradient, factor, LIMIT).to(dx8.dtype.element_ty), mask=mask)
            peak = tl.maximum(peak, tl.max(tl.abs(gradient), axis=0))
        dbias += tl.sum(gradient, axis=0)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(partials + tl.program_id(1) * N + columns, dbias, mask=columns < N)
    if LIMIT > 0:
        tl.store(largest + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(peak, axis=0))


# Rows, columns and warps of a block; in the backward also programs per multiprocessor and pipeline stages.
# Measured on an H200.
FORWARD = (8, 512, 4)
BACKWARD = (2, 1024, 4, 4, 3)


def bias_gelu_forward(
    x: torch.Tensor, bias: torch.Tensor, cast: Cast | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU(x + bias) of rows [T, N], computed in float32; in the dtype of x, and in 8 bits if `cast` asks for it.

    Without `cast` the second result is the first.
    """
    num_rows, width = x.shape
    y = torch.empty_like(x)
    y8 = y if cast is None else torch.empty_like(x, dtype=cast.dtype)
    rows, columns, warps = FORWARD
    grid = ((width + columns - 1) // columns, (num_rows + rows - 1) // rows)
    _forward_kernel[grid](
        x, bias, y, y8, *scale_and_largest(cast, x), num_rows,
        N=width, ROWS=rows, COLUMNS=columns, LIMIT=limit_of(cast), num_warps=warps,
    )  # fmt: skip
    return y, y8


def bias_gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, cast: Cast | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of x (also in 8 bits, as above), and partial sums [n, 1, N] of the bias gradient."""
    num_rows, width = x.shape
    dx = torch.empty_like(x)
    dx8 = dx if cast is None else torch.empty_like(x, dtype=cast.dtype)
    rows, columns, warps, per_multiprocessor, stages = BACKWARD
    across = (width + columns - 1) // columns
    down = max(1, min(num_multiprocessors(x.device) * per_multiprocessor // across, num_rows // rows))
    partials = torch.empty(down, 1, width, dtype=torch.float32, device=x.device)
    _backward_kernel[(across, down)](
        dy, x, bias, dx, dx8, *scale_and_largest(cast, x), partials, num_rows,
        N=width, ROWS=rows, COLUMNS=columns, STAGES=stages, LIMIT=limit_of(cast), num_warps=warps,
    )  # fmt: skip
    return dx, dx8, partials
