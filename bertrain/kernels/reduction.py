"""Second stage of a column sum: adds the partial sums of many programs in a fixed order.

Each program of a kernel that sums over tokens (gradients of biases and of LayerNorm's parameters) writes a partial row.
Adding them here, and not with atomics, makes two runs bitwise equal.
"""

from __future__ import annotations

import torch

from bertrain.kernels import cpu
from bertrain.kernels.backend import jit, on_cpu, tl


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
def column_sums(partials: torch.Tensor, outs: list[torch.Tensor], *, accumulate: bool = False) -> None:
    """Sum float32 partials [num_partials, k, width] over the first dimension into k float32 rows, k at most 4.

    `accumulate` adds to what the rows hold. The order of addition is fixed.
    """
    num_rows, count, width = partials.shape
    rows = [*outs, outs[0], outs[0], outs[0]][:4]
    grid = ((width + 15) // 16, count)
    _column_sum_kernel[grid](
        partials, *rows, num_rows, width, count * width, ROWS=64, COLUMNS=16, ACCUMULATE=accumulate, num_warps=4
    )


@on_cpu(cpu.row_sum)
def row_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of 16-bit rows in float32."""
    return x.sum(0, dtype=torch.float32)


def write_gradient(into: torch.Tensor, value: torch.Tensor, accumulate: bool) -> None:
    """Write a gradient, or add it to the values in `into`."""
    if accumulate:
        into.add_(value)
    else:
        into.copy_(value)
