"""Second stage of a column sum: partial sums of many programs become one row, always in the same order.

Kernels that sum over tokens (gradients of biases and of LayerNorm's parameters) let each program write its own
partial row; adding them here, instead of with atomics, makes two runs bitwise equal.
"""

from __future__ import annotations

import torch

from bertrain.kernels.backend import jit, tl


@jit
def _column_sum_kernel(partials, sums, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        pointers = partials + rows[:, None] * num_columns + columns[None, :]
        total += tl.load(pointers, mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
    tl.store(sums + columns, tl.sum(total, axis=0), mask=inside)


def column_sum(partials: torch.Tensor) -> torch.Tensor:
    """Sum float32 partials [num_partials, ...] over the first dimension, deterministically."""
    sums = torch.empty(partials.shape[1:], dtype=torch.float32, device=partials.device)
    num_columns = sums.numel()
    grid = ((num_columns + 15) // 16,)
    _column_sum_kernel[grid](partials, sums, partials.shape[0], num_columns, ROWS=64, COLUMNS=16, num_warps=4)
    return sums
