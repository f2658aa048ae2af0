"""Matrix products whose result is a float32 gradient, and products of FP8 operands.

Triton's interpreter runs on a CPU, where PyTorch multiplies neither FP8 nor 16 bits into float32: there, operands are
converted to float32 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.backend import INTERPRETED, on_cpu
from bertrain.kernels.reduction import write_gradient


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
