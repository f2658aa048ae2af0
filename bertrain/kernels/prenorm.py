"""total = residual + dropout(x), y = LayerNorm(total): everything between two matrix products of a pre-norm block.

No biases. The total goes on as the residual, its LayerNorm into the next product. The backward adds the gradient that
comes along the residual to that of LayerNorm, in the same pass. Both passes normalize the total as it was stored, so
that `layernorm_forward` of a stored total gives the same bits again (activation checkpointing).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels.arguments import Cast, Dropout, Fp8Rows
from bertrain.kernels.backend import jit, num_multiprocessors, tl
from bertrain.kernels.fp8 import empty_rows, limit_and_scale, quantize, widen
from bertrain.kernels.layernorm import _both_added, _exist, _inside
from bertrain.kernels.random import load_stream_key, row_constants, rows_keep, rows_keep_mask


def add_layernorm_plain(
    x: Tensor, residual: Tensor, weight: Tensor, dropout: Dropout, eps: float
) -> tuple[Tensor, Tensor]:
    """The specification, in the dtype of its inputs: the total and its LayerNorm."""
    if dropout.p > 0:
        keep = rows_keep_mask(dropout.seed, dropout.site, x.shape[0], x.shape[1], dropout.p)
        x = torch.where(keep, x / (1 - dropout.p), 0)
    total = residual + x
    return total, torch.nn.functional.layer_norm(total, x.shape[1:], weight, None, eps)


@jit(do_not_specialize=["site"])
def _prenorm_forward_kernel(
    x, residual, weight, total, y, y8, scale, peaks, statistics, seed, site, num_rows, eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr,
    INVERSE_KEEP: tl.constexpr, STAGES: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks over many rows; without x, the residual is the total."""
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = _inside(columns, N, COLUMNS)
    key = load_stream_key(seed, site) if THRESHOLD > 0 else 0
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
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
        z = tl.load(residual + pointers, mask=mask, other=0.0).to(tl.float32)
        if x is not None:
            added = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32)
            if THRESHOLD > 0:
                added = tl.where(rows_keep(key, rows, columns, THRESHOLD), added * INVERSE_KEEP, 0.0)
            stored = (z + added).to(total.dtype.element_ty)
            tl.store(total + pointers, stored, mask=mask)
            z = stored.to(tl.float32)
        mean = tl.sum(z, axis=1)[:, None] * (1 / N)
        centred = tl.where(inside, z - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1)[:, None] * (1 / N) + eps)
        rounded = (centred * rstd * gain).to(residual.dtype.element_ty)
        if FULL:
            tl.store(y + pointers, rounded, mask=mask)
        if LIMIT > 0:  # from the rounded value, whether that is stored or not
            result = widen(rounded)
            tl.store(y8 + pointers, quantize(result * factor, LIMIT), mask=mask)
            peak = tl.maximum(peak, tl.where(mask, tl.abs(result), 0.0))
        tl.store(statistics + rows * 2, mean, mask=exist)
        tl.store(statistics + rows * 2 + 1, rstd, mask=exist)
    if LIMIT > 0:
        tl.store(peaks + tl.program_id(0), tl.max(tl.max(peak, axis=1), axis=0))


@jit(do_not_specialize=["site"])
def _prenorm_backward_kernel(
    dy, along, total, weight, statistics, dtotal, dx, dx8, scale, peaks, partials, seed, site, num_rows,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr,
    INVERSE_KEEP: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks over many rows and keeps the column sum in registers."""
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = _inside(columns, N, COLUMNS)
    key = load_stream_key(seed, site) if THRESHOLD > 0 else 0
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([COLUMNS], dtype=tl.float32)
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
        z = tl.load(total + pointers, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(statistics + rows * 2, mask=exist, other=0.0)
        rstd = tl.load(statistics + rows * 2 + 1, mask=exist, other=0.0)
        normed = tl.where(inside, (z - mean) * rstd, 0.0)
        scaled = gradient * gain
        slope, offset = tl.reduce((scaled * normed, scaled), 1, _both_added)  # the warps meet once
        dz = rstd * (scaled - normed * (slope * (1 / N))[:, None] - (offset * (1 / N))[:, None])
        if along is not None:
            dz += tl.load(along + pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(dtotal + pointers, dz.to(dtotal.dtype.element_ty), mask=mask)
        if THRESHOLD > 0:
            dz = tl.where(rows_keep(key, rows, columns, THRESHOLD), dz * INVERSE_KEEP, 0.0)
        if dx is not None:
            tl.store(dx + pointers, dz.to(dx.dtype.element_ty), mask=mask)
        if LIMIT > 0:
            tl.store(dx8 + pointers, quantize(dz * factor, LIMIT), mask=mask)
            peak = tl.maximum(peak, tl.where(mask, tl.abs(dz), 0.0))
        dweight += tl.sum(gradient * normed, axis=0)
    row = partials + tl.program_id(0) * N + tl.arange(0, COLUMNS)
    tl.store(row, dweight, mask=tl.arange(0, COLUMNS) < N)
    if LIMIT > 0:
        tl.store(peaks + tl.program_id(0), tl.max(tl.max(peak, axis=1), axis=0))


# Rows per step, warps, programs per multiprocessor and pipeline stages.
FORWARD = (2, 4, 8, 2)
BACKWARD = (1, 4, 8, 3)


def _num_programs(num_rows: int, rows: int, per_multiprocessor: int, device: torch.device) -> int:
    return min(num_multiprocessors(device) * per_multiprocessor, -(-num_rows // rows))


def _forward(
    x: Tensor | None, residual: Tensor, weight: Tensor, dropout: Dropout, eps: float, cast: Cast | None, full: bool
) -> tuple[Tensor, Tensor, Tensor, Fp8Rows | None]:
    num_rows, width = residual.shape
    total = residual if x is None else torch.empty_like(residual)
    y = torch.empty_like(residual) if full else residual
    statistics = torch.empty(num_rows, 2, dtype=torch.float32, device=residual.device)
    rows, warps, per_multiprocessor, stages = FORWARD
    num_programs = _num_programs(num_rows, rows, per_multiprocessor, residual.device)
    y8 = empty_rows(residual, cast, num_programs)
    limit, scale = limit_and_scale(cast, statistics)
    _prenorm_forward_kernel[(num_programs,)](
        x, residual, weight, total, y, y8.rows, scale, y8.peaks, statistics, dropout.seed, dropout.site, num_rows, eps,
        ROWS=rows, STAGES=stages, FULL=full, LIMIT=limit, num_warps=warps, **row_constants(width, dropout.p),
    )  # fmt: skip
    return total, y, statistics, None if cast is None else y8


def add_layernorm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    dropout: Dropout,
    eps: float,
    cast: Cast | None = None,
    *,
    full: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Fp8Rows | None]:
    """The total residual + dropout(x) of rows [T, N]; its LayerNorm, in the dtype of x if `full`; mean and
    1 / deviation of each row for the backward; the LayerNorm in FP8 if `cast`."""
    return _forward(x, residual, weight, dropout, eps, cast, full)


def layernorm_forward(
    total: Tensor, weight: Tensor, eps: float, cast: Cast | None = None, *, full: bool = True
) -> tuple[Tensor, Fp8Rows | None]:
    """The LayerNorm of a total that is stored already: the same bits as of `add_layernorm_forward`."""
    _, y, _, y8 = _forward(None, total, weight, Dropout(0.0, total, 0), eps, cast, full)  # reads no seed
    return y, y8


def add_layernorm_backward(
    dy: Tensor,
    along: Tensor | None,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    dropout: Dropout,
    cast: Cast | None = None,
    *,
    full: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Fp8Rows | None]:
    """Gradients of the residual and of x, partial sums [n, 1, N] of the weight's gradient, and that of x in FP8.

    `dy` is the gradient of the LayerNorm, `along` that of the total. The gradient of x comes in the dtype of x if
    `full`, and in FP8 if `cast`; without dropout, it is that of the residual.
    """
    num_rows, width = total.shape
    dtotal = torch.empty_like(total)
    dx = torch.empty_like(total) if full and dropout.p > 0 else None
    rows, warps, per_multiprocessor, stages = BACKWARD
    num_programs = _num_programs(num_rows, rows, per_multiprocessor, total.device)
    partials = torch.empty(num_programs, 1, width, dtype=torch.float32, device=total.device)
    dx8 = empty_rows(total, cast, num_programs)
    limit, scale = limit_and_scale(cast, statistics)
    _prenorm_backward_kernel[(num_programs,)](
        dy, along, total, weight, statistics, dtotal, dx, dx8.rows, scale, dx8.peaks, partials, dropout.seed,
        dropout.site, num_rows,
        ROWS=rows, STAGES=stages, LIMIT=limit, num_warps=warps, **row_constants(width, dropout.p),
    )  # fmt: skip
    return dtotal, dtotal if dx is None else dx, partials, None if cast is None else dx8
