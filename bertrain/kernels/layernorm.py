"""y = LayerNorm(residual + dropout(x + bias)): everything between two matrix products of a post-norm block.

`x` is the output of the product without its bias; bias, dropout, residual sum and normalization take one pass over
memory. The backward recomputes the sum and the mask from x and residual, which are kept for other reasons (as the
output of one product and the input of another), so that it needs only two more numbers per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.arguments import Cast, Dropout, Fp8Rows, NormParameters
from bertrain.kernels.backend import jit, num_multiprocessors, on_cpu, tl
from bertrain.kernels.fp8 import empty_rows, limit_and_scale, quantize, widen
from bertrain.kernels.random import load_stream_key, row_constants, rows_keep, rows_keep_mask


def dropout_add_layernorm_plain(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, ln_bias: Tensor, dropout: Dropout, eps: float
) -> Tensor:
    """The specification, in the dtype of its inputs."""
    hidden = x + bias
    if dropout.p > 0:
        keep = rows_keep_mask(dropout.seed, dropout.site, x.shape[0], x.shape[1], dropout.p)
        hidden = torch.where(keep, hidden / (1 - dropout.p), 0)
    return torch.nn.functional.layer_norm(residual + hidden, x.shape[1:], weight, ln_bias, eps)


@jit
def _inside(columns, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Mask of the columns that exist; a compile-time constant if all do, so that masks cost no instruction."""
    return tl.full([1, COLUMNS], True, tl.int1) if N == COLUMNS else columns < N


@jit
def _exist(rows, num_rows, ROWS: tl.constexpr):
    """Mask of the rows that exist; with one row at a time, all do."""
    return tl.full([1, 1], True, tl.int1) if ROWS == 1 else rows < num_rows


@jit
def _both_added(a, b, other_a, other_b):
    return a + other_a, b + other_b


@jit
def _summed(x, bias, residual, key, rows, columns, pointers, mask, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr):
    """residual + dropout(x + bias) of a block of rows, and the keep-mask."""
    hidden = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32) + bias
    keep = mask
    if THRESHOLD > 0:
        keep = rows_keep(key, rows, columns, THRESHOLD) & mask
        hidden = hidden * INVERSE_KEEP
    hidden = tl.where(keep, hidden, 0.0)
    return hidden + tl.load(residual + pointers, mask=mask, other=0.0).to(tl.float32), keep


@jit(do_not_specialize=["site"])
def _norm_forward_kernel(
    x, bias, residual, weight, ln_bias, y, y8, scale, peaks, statistics, seed, site, num_rows, eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr,
    INVERSE_KEEP: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks over many rows, so that it reads the parameters of columns once."""
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = _inside(columns, N, COLUMNS)
    key = load_stream_key(seed, site)
    bias_row = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(ln_bias + columns, mask=inside, other=0.0).to(tl.float32)
    peak = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    factor = 1.0
    if LIMIT > 0:
        factor = tl.load(scale)
        y8 = y8.to(tl.pointer_type(tl.int8), bitcast=True)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS))[:, None]
        exist = _exist(rows, num_rows, ROWS)
        mask = inside & exist
        pointers = rows.to(tl.int64) * N + columns
        z, _keep = _summed(x, bias_row, residual, key, rows, columns, pointers, mask, THRESHOLD, INVERSE_KEEP)
        mean = tl.sum(z, axis=1)[:, None] * (1 / N)
        centred = tl.where(inside, z - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1)[:, None] * (1 / N) + eps)
        rounded = (centred * rstd * gain + shift).to(y.dtype.element_ty)
        tl.store(y + pointers, rounded, mask=mask)
        if LIMIT > 0:
            # From the rounded value, so that casting `y` again (activation checkpointing) gives the same bits.
            result = widen(rounded)
            tl.store(y8 + pointers, quantize(result * factor, LIMIT), mask=mask)
            peak = tl.maximum(peak, tl.where(mask, tl.abs(result), 0.0))
        tl.store(statistics + rows * 2, mean, mask=exist)
        tl.store(statistics + rows * 2 + 1, rstd, mask=exist)
    if LIMIT > 0:
        tl.store(peaks + tl.program_id(0), tl.max(tl.max(peak, axis=1), axis=0))


@jit(do_not_specialize=["site"])
def _norm_backward_kernel(
    dy, second, x, bias, residual, weight, statistics, dx, dx8, scale, peaks, dresidual, partials,
    seed, site, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr,
    INVERSE_KEEP: tl.constexpr, STAGES: tl.constexpr, PAIR: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks over many rows and keeps the three column sums in registers."""
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = _inside(columns, N, COLUMNS)
    key = load_stream_key(seed, site)
    bias_row = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    dbias = tl.zeros([COLUMNS], dtype=tl.float32)
    dweight = tl.zeros([COLUMNS], dtype=tl.float32)
    dln_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    peak = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    factor = 1.0
    if LIMIT > 0:
        factor = tl.load(scale)
        dx8 = dx8.to(tl.pointer_type(tl.int8), bitcast=True)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS))[:, None]
        exist = _exist(rows, num_rows, ROWS)
        mask = inside & exist
        pointers = rows.to(tl.int64) * N + columns
        gradient = tl.load(dy + pointers, mask=mask, other=0.0).to(tl.float32)
        if PAIR:
            gradient += tl.load(second + pointers, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(statistics + rows * 2, mask=exist, other=0.0)
        rstd = tl.load(statistics + rows * 2 + 1, mask=exist, other=0.0)
        z, keep = _summed(x, bias_row, residual, key, rows, columns, pointers, mask, THRESHOLD, INVERSE_KEEP)
        normed = tl.where(inside, (z - mean) * rstd, 0.0)
        scaled = gradient * gain
        along, offset = tl.reduce((scaled * normed, scaled), 1, _both_added)  # the warps meet once
        dz = rstd * (scaled - normed * (along * (1 / N))[:, None] - (offset * (1 / N))[:, None])
        dhidden = tl.where(keep, dz * INVERSE_KEEP, 0.0)
        tl.store(dresidual + pointers, dz.to(dresidual.dtype.element_ty), mask=mask)
        if FULL:
            tl.store(dx + pointers, dhidden.to(dx.dtype.element_ty), mask=mask)
        if LIMIT > 0:
            tl.store(dx8 + pointers, quantize(dhidden * factor, LIMIT), mask=mask)
            peak = tl.maximum(peak, tl.abs(dhidden))
        dbias += tl.sum(dhidden, axis=0)
        dweight += tl.sum(gradient * normed, axis=0)
        dln_bias += tl.sum(gradient, axis=0)
    row = partials + tl.program_id(0) * (3 * N) + tl.arange(0, COLUMNS)
    stored = tl.arange(0, COLUMNS) < N
    tl.store(row, dbias, mask=stored)
    tl.store(row + N, dweight, mask=stored)
    tl.store(row + 2 * N, dln_bias, mask=stored)
    if LIMIT > 0:
        tl.store(peaks + tl.program_id(0), tl.max(tl.max(peak, axis=1), axis=0))


# Rows per step, warps, programs per multiprocessor and pipeline stages. Tuned on an H200.
FORWARD = (2, 4, 8, 2)
FORWARD_FP8 = (1, 4, 6, 3)
BACKWARD = (1, 4, 4, 3)


@on_cpu(cpu.dropout_add_layernorm_forward)
def dropout_add_layernorm_forward(
    x: Tensor, residual: Tensor, parameters: NormParameters, dropout: Dropout, eps: float, cast: Cast | None = None
) -> tuple[Tensor, Tensor, Fp8Rows | None]:
    """LayerNorm(residual + dropout(x + bias)) of rows [T, N], computed in float32.

    Returns the result in the dtype of x, mean and 1 / deviation of each row for the backward, and the result in FP8
    if `cast`.
    """
    num_rows = x.shape[0]
    y = torch.empty_like(x)
    statistics = torch.empty(num_rows, 2, dtype=torch.float32, device=x.device)
    rows, warps, per_multiprocessor, stages = FORWARD if cast is None else FORWARD_FP8
    num_programs = min(num_multiprocessors(x.device) * per_multiprocessor, (num_rows + rows - 1) // rows)
    y8 = empty_rows(y, cast, num_programs)
    limit, scale = limit_and_scale(cast, statistics)
    bias, weight, ln_bias = parameters
    _norm_forward_kernel[(num_programs,)](
        x, bias, residual, weight, ln_bias, y, y8.rows, scale, y8.peaks, statistics, dropout.seed, dropout.site,
        num_rows, eps,
        ROWS=rows, STAGES=stages, LIMIT=limit, num_warps=warps, **row_constants(x.shape[1], dropout.p),
    )  # fmt: skip
    return y, statistics, None if cast is None else y8


@on_cpu(cpu.dropout_add_layernorm_backward)
def dropout_add_layernorm_backward(
    dy: Tensor,
    second: Tensor | None,
    x: Tensor,
    residual: Tensor,
    parameters: NormParameters,
    statistics: Tensor,
    dropout: Dropout,
    cast: Cast | None = None,
    *,
    full: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Fp8Rows | None]:
    """Gradients of x and of the residual, partial sums [n, 3, N] of `parameters`, and the gradient of x in FP8.

    The incoming gradient is dy, or dy + second: the sum takes no pass of its own. The gradient of x comes in the dtype
    of x if `full`, and in FP8 if `cast`.
    """
    num_rows, width = x.shape
    dx, dresidual = torch.empty_like(x) if full else x, torch.empty_like(residual)
    rows, warps, per_multiprocessor, stages = BACKWARD
    num_programs = min(num_multiprocessors(x.device) * per_multiprocessor, (num_rows + rows - 1) // rows)
    partials = torch.empty(num_programs, 3, width, dtype=torch.float32, device=x.device)
    dx8 = empty_rows(x, cast, num_programs)
    limit, scale = limit_and_scale(cast, statistics)
    _norm_backward_kernel[(num_programs,)](
        dy, dy if second is None else second, x, parameters.bias, residual, parameters.weight, statistics,
        dx, dx8.rows, scale, dx8.peaks, dresidual, partials, dropout.seed, dropout.site, num_rows,
        ROWS=rows, STAGES=stages, PAIR=second is not None, FULL=full, LIMIT=limit, num_warps=warps,
        **row_constants(x.shape[1], dropout.p),
    )  # fmt: skip
    return dx, dresidual, partials, None if cast is None else dx8
