"""Float32 gradients of parameters: sums over tokens, and matrix products; also products of FP8 operands.

Each program of a kernel that sums over tokens (gradients of biases and of LayerNorm's parameters) writes a partial row.
`column_sums` adds them in a fixed order, not with atomics, so that two runs are bitwise equal.

Triton's interpreter runs on a CPU, where PyTorch multiplies neither FP8 nor 16 bits into float32: there, operands are
converted to float32 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.backend import INTERPRETED, jit, on_cpu, tl


@jit
def _column_sum_kernel(
    partials, out0, out1, out2, out3, num_rows, width, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    inside = columns < width
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        pointers = partials + rows[:, None] * num_columns + which * width + columns[None, :]
        total += tl.load(pointers, mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
    out = out0
    if which == 1:
        out = out1
    if which == 2:
        out = out2
    if which == 3:
        out = out3
    sums = tl.sum(total, axis=0)
    if ACCUMULATE:
        sums += tl.load(out + columns, mask=inside, other=0.0)
    tl.store(out + columns, sums, mask=inside)


@on_cpu(cpu.column_sums)
def column_sums(partials: Tensor, outs: list[Tensor], *, accumulate: bool = False) -> None:
    """Sum float32 partials [n, k, width] in a fixed order into k float32 rows, k at most 4, or add them to these."""
    num_rows, count, width = partials.shape
    rows = [*outs, outs[0], outs[0], outs[0]][:4]
    grid = ((width + 15) // 16, count)
    _column_sum_kernel[grid](
        partials, *rows, num_rows, width, count * width, ROWS=64, COLUMNS=16, ACCUMULATE=accumulate, num_warps=4
    )


@on_cpu(cpu.row_sum)
def row_sum(x: Tensor) -> Tensor:
    """The sum of 16-bit rows in float32."""
    return x.sum(0, dtype=torch.float32)


def write_gradient(into: Tensor, value: Tensor, accumulate: bool) -> None:
    (into.add_ if accumulate else into.copy_)(value)


@on_cpu(cpu.weight_gradient)
def weight_gradient(dy: Tensor, x: Tensor, gradient: Tensor, *, accumulate: bool) -> None:
    """Write dy' x to `gradient` [N, K] in float32, or add it; dy [T, N] and x [T, K] have 16 bits."""
    if INTERPRETED:
        write_gradient(gradient, dy.t().float() @ x.float(), accumulate)
    elif accumulate:
        torch.addmm(gradient, dy.t(), x, out_dtype=torch.float32, out=gradient)
    else:
        torch.mm(dy.t(), x, out_dtype=torch.float32, out=gradient)


def fp8_product(
    x: Tensor, x_inverse_scale: Tensor, matrix: Tensor, matrix_inverse_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x matrix' + bias in bf16, of FP8 [T, K] and [N, K]."""
    if INTERPRETED:
        product = (x.float() * x_inverse_scale) @ (matrix.float() * matrix_inverse_scale).t()
        return product if bias is None else product + bias
    return torch._scaled_mm(
        x, matrix.t(), x_inverse_scale, matrix_inverse_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def fp8_weight_gradient(
    dy_columns: Tensor, dy_inverse_scale: Tensor, x_columns: Tensor, x_inverse_scale: Tensor, gradient: Tensor,
    *, accumulate: bool,
) -> None:  # fmt: skip
    """The same as `weight_gradient`, of FP8 operands that are transposed: dy' [N, T] and x' [K, T]."""
    if INTERPRETED:
        wide = dy_columns.float() * dy_inverse_scale, x_columns.float() * x_inverse_scale
        write_gradient(gradient, wide[0] @ wide[1].t(), accumulate)
        return
    # The sum over all tokens is long: use_fast_accum would keep it in fewer bits than float32.
    out = torch.empty_like(gradient) if accumulate else gradient
    torch._scaled_mm(
        dy_columns, x_columns.t(), dy_inverse_scale, x_inverse_scale,
        out_dtype=torch.float32, use_fast_accum=False, out=out,
    )  # fmt: skip
    if accumulate:
        gradient.add_(out)
