"""geglu(x): GELU of the first half of each row times its second half, the gate, then dropout; one pass each way.

GELU is that of gelu.py. The backward recomputes everything from x and writes the gradients of both halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels.arguments import Cast, Dropout, Fp8Copy
from bertrain.kernels.backend import jit, num_multiprocessors, tl
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
from bertrain.kernels.gelu import _distribution, _slope
from bertrain.kernels.random import dropout_threshold, load_stream_key, rows_keep, rows_keep_mask


def geglu_plain(x: Tensor, dropout: Dropout) -> Tensor:
    """The specification, in the dtype of its input: [T, 2 N] -> [T, N]."""
    expanded, gate = x.chunk(2, -1)
    y = torch.nn.functional.gelu(expanded) * gate
    if dropout.p > 0:
        keep = rows_keep_mask(dropout.seed, dropout.site, y.shape[0], y.shape[1], dropout.p)
        y = torch.where(keep, y / (1 - dropout.p), 0)
    return y


@jit
def _dropped(values, key, rows, columns, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr):
    if THRESHOLD > 0:
        values = tl.where(rows_keep(key, rows, columns, THRESHOLD), values * INVERSE_KEEP, 0.0)
    return values


@jit
def _gradients(v, gate, dy):
    """Gradients of both halves: of GELU's argument v, and of its gate."""
    return dy * gate * _slope(v, 1.0, -1.3257480647361595), dy * (v * _distribution(v, 1.0))


@jit(do_not_specialize=["site"])
def _geglu_forward_kernel(
    x, y, seed, site, num_rows, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (rows < num_rows) & (columns < N)
    place = x + (rows.to(tl.int64) * (2 * N) + columns)
    v = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    result = v * _distribution(v, 1.0) * tl.load(place + N, mask=mask, other=0.0).to(tl.float32)
    result = _dropped(result, load_stream_key(seed, site), rows, columns, THRESHOLD, INVERSE_KEEP)
    tl.store(y + (rows.to(tl.int64) * N + columns), result.to(y.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["site"])
def _geglu_backward_kernel(
    dy, x, dx, seed, site, num_rows, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (rows < num_rows) & (columns < N)
    gradient = tl.load(dy + (rows.to(tl.int64) * N + columns), mask=mask, other=0.0).to(tl.float32)
    gradient = _dropped(gradient, load_stream_key(seed, site), rows, columns, THRESHOLD, INVERSE_KEEP)
    place = rows.to(tl.int64) * (2 * N) + columns
    v = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + place + N, mask=mask, other=0.0).to(tl.float32)
    dexpanded, dgate = _gradients(v, gate, gradient)
    tl.store(dx + place, dexpanded.to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + place + N, dgate.to(dx.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["site"])
def _geglu_forward_fp8_kernel(
    x, y, y8, y8_t, scale, largest, seed, site, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    STAGES: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Each program walks down a strip of columns of both halves, four rows per thread."""
    first_column = tl.program_id(0) * COLUMNS
    key, factor = load_stream_key(seed, site), tl.load(scale)
    unit = 1 / factor
    peak = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    columns, quads = (first_column + tl.arange(0, COLUMNS))[None, :], 4 * tl.arange(0, QUADS)[:, None]
    step = tl.num_programs(1) * 4 * QUADS
    for first in tl.range(tl.program_id(1) * 4 * QUADS, num_rows, step, num_stages=STAGES):
        a, b, c, d = load_four(x, first, first_column, num_rows, 2 * N, QUADS, COLUMNS)
        ga, gb, gc, gd = load_four(x, first, N + first_column, num_rows, 2 * N, QUADS, COLUMNS)
        a, b, c, d = widen(a), widen(b), widen(c), widen(d)
        a, b = a * _distribution(a, unit) * widen(ga), b * _distribution(b, unit) * widen(gb)
        c, d = c * _distribution(c, unit) * widen(gc), d * _distribution(d, unit) * widen(gd)
        a = _dropped(a, key, first + quads, columns, THRESHOLD, INVERSE_KEEP)
        b = _dropped(b, key, first + quads + 1, columns, THRESHOLD, INVERSE_KEEP)
        c = _dropped(c, key, first + quads + 2, columns, THRESHOLD, INVERSE_KEEP)
        d = _dropped(d, key, first + quads + 3, columns, THRESHOLD, INVERSE_KEEP)
        if FULL:
            store_four(y, a * unit, b * unit, c * unit, d * unit, first, first_column, num_rows, N, QUADS, COLUMNS)
        store_both_ways(y8, y8_t, a, b, c, d, first, first_column, num_rows, N, QUADS, COLUMNS, LIMIT)
        peak = tl.maximum(peak, peak_of_four(a, b, c, d))
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0) * unit)


@jit(do_not_specialize=["site"])
def _geglu_backward_fp8_kernel(
    dy, x, dx, dx8, dx8_t, scale, largest, seed, site, num_rows,
    N: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    STAGES: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The same for the gradients of both halves."""
    first_column = tl.program_id(0) * COLUMNS
    key, factor = load_stream_key(seed, site), tl.load(scale)
    unit = 1 / factor
    peak = tl.zeros([QUADS, COLUMNS], dtype=tl.float32)
    columns, quads = (first_column + tl.arange(0, COLUMNS))[None, :], 4 * tl.arange(0, QUADS)[:, None]
    step = tl.num_programs(1) * 4 * QUADS
    for first in tl.range(tl.program_id(1) * 4 * QUADS, num_rows, step, num_stages=STAGES):
        va, vb, vc, vd = load_four(x, first, first_column, num_rows, 2 * N, QUADS, COLUMNS)
        ga, gb, gc, gd = load_four(x, first, N + first_column, num_rows, 2 * N, QUADS, COLUMNS)
        a, b, c, d = load_four(dy, first, first_column, num_rows, N, QUADS, COLUMNS)
        a = _dropped(widen(a) * factor, key, first + quads, columns, THRESHOLD, INVERSE_KEEP)
        b = _dropped(widen(b) * factor, key, first + quads + 1, columns, THRESHOLD, INVERSE_KEEP)
        c = _dropped(widen(c) * factor, key, first + quads + 2, columns, THRESHOLD, INVERSE_KEEP)
        d = _dropped(widen(d) * factor, key, first + quads + 3, columns, THRESHOLD, INVERSE_KEEP)
        a, ga = _gradients(widen(va), widen(ga), a)
        b, gb = _gradients(widen(vb), widen(gb), b)
        c, gc = _gradients(widen(vc), widen(gc), c)
        d, gd = _gradients(widen(vd), widen(gd), d)
        if FULL:
            store_four(dx, a * unit, b * unit, c * unit, d * unit, first, first_column, num_rows, 2 * N, QUADS, COLUMNS)
            store_four(
                dx, ga * unit, gb * unit, gc * unit, gd * unit, first, N + first_column, num_rows, 2 * N, QUADS, COLUMNS
            )
        store_both_ways(dx8, dx8_t, a, b, c, d, first, first_column, num_rows, 2 * N, QUADS, COLUMNS, LIMIT)
        store_both_ways(
            dx8, dx8_t, ga, gb, gc, gd, first, N + first_column, num_rows, 2 * N, QUADS, COLUMNS, LIMIT
        )  # fmt: skip
        peak = tl.maximum(peak, tl.maximum(peak_of_four(a, b, c, d), peak_of_four(ga, gb, gc, gd)))
    largest += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest, tl.max(tl.max(peak, axis=1), axis=0) * unit)


# Rows (FP8: groups of four rows), columns and warps of a block; FP8: programs per multiprocessor, pipeline stages.
FORWARD = (8, 512, 4)
BACKWARD = (8, 512, 8)
FORWARD_FP8 = (8, 128, 8, 4, 3)
BACKWARD_FP8 = (8, 128, 8, 4, 3)


def _grid(num_rows: int, width: int, block: tuple[int, int, int]) -> tuple[int, int]:
    rows, columns, _ = block
    return -(-width // columns), -(-num_rows // rows)


def _strips(x: Tensor, block: tuple[int, int, int, int, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants of the FP8 kernels. A strip's columns divide the width, so that it has none of both halves."""
    quads, columns, warps, per_multiprocessor, stages = block
    num_rows, width = x.shape[0], x.shape[1] // 2
    columns = min(columns, width & -width)
    grid = grid_of(num_rows, width, 4 * quads, columns, num_multiprocessors(x.device) * per_multiprocessor)
    return grid, {"QUADS": quads, "COLUMNS": columns, "STAGES": stages, "num_warps": warps}


def geglu_forward(
    x: Tensor, dropout: Dropout, cast: Cast | None = None, *, full: bool = True
) -> tuple[Tensor, Fp8Copy | None]:
    """dropout(GELU(x[:, :N]) * x[:, N:]) of rows [T, 2 N]: in the dtype of x if `full`, in FP8 if `cast` (then T and N
    are multiples of 16)."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_rows, width, dtype=x.dtype, device=x.device) if full else x
    constants = {"N": width, "THRESHOLD": dropout_threshold(dropout.p), "INVERSE_KEEP": 1 / (1 - dropout.p)}
    if cast is None:
        rows, columns, warps = FORWARD
        _geglu_forward_kernel[_grid(num_rows, width, FORWARD)](
            x, y, dropout.seed, dropout.site, num_rows, ROWS=rows, COLUMNS=columns, num_warps=warps, **constants
        )
        return y, None
    y8 = empty_both_ways(x[:, :width], cast)
    grid, block = _strips(x, FORWARD_FP8)
    _geglu_forward_fp8_kernel[grid](
        x, y, *y8, cast.scale, cast.largest, dropout.seed, dropout.site, num_rows,
        FULL=full, LIMIT=LARGEST[cast.dtype], **constants, **block,
    )  # fmt: skip
    return y, y8


def geglu_backward(
    dy: Tensor, x: Tensor, dropout: Dropout, cast: Cast | None = None, *, full: bool = True
) -> tuple[Tensor, Fp8Copy | None]:
    """Gradient of x [T, 2 N], in the dtype of x if `full` and in FP8 if `cast`."""
    num_rows, width = dy.shape
    dx = torch.empty_like(x) if full else x
    constants = {"N": width, "THRESHOLD": dropout_threshold(dropout.p), "INVERSE_KEEP": 1 / (1 - dropout.p)}
    if cast is None:
        rows, columns, warps = BACKWARD
        _geglu_backward_kernel[_grid(num_rows, width, BACKWARD)](
            dy, x, dx, dropout.seed, dropout.site, num_rows, ROWS=rows, COLUMNS=columns, num_warps=warps, **constants
        )
        return dx, None
    dx8 = empty_both_ways(x, cast)
    grid, block = _strips(x, BACKWARD_FP8)
    _geglu_backward_fp8_kernel[grid](
        dy, x, dx, *dx8, cast.scale, cast.largest, dropout.seed, dropout.site, num_rows,
        FULL=full, LIMIT=LARGEST[cast.dtype], **constants, **block,
    )  # fmt: skip
    return dx, dx8
