"""Rotary positions (RoPE): queries and keys rotated in place, between the product that writes them and attention.

A head's elements i and i + D / 2 are a pair, rotated by position / theta ^ (2 i / D). Cosines and sines come from
tables, made once for each theta. Attention's backward rotates the gradients back before it stores them, so that these
take no pass of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels.arguments import Rotary
from bertrain.kernels.backend import jit, tl


def rotate_plain(qkv: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """The specification, not in place."""
    cosine, sine = (table[positions][:, None, None] for table in rotary)
    left, right = qkv[:, :2].chunk(2, -1)
    return torch.cat([torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1), qkv[:, 2:]], 1)


@jit
def _rotate_kernel(
    qkv, positions, cosines, sines, num_rows, COUNT: tl.constexpr, PITCH: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Each program takes some tokens and reads their angles once, for all heads of queries and keys."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)[None, :]
    exist = rows < num_rows
    angles = tl.load(positions + rows, mask=exist, other=0)[:, None] * HALF + columns
    cosine, sine = tl.load(cosines + angles), tl.load(sines + angles)
    lefts = qkv + (rows.to(tl.int64)[:, None] * PITCH + columns)
    mask = exist[:, None]
    for head in range(COUNT):
        place = lefts + head * (2 * HALF)
        left = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (left * cosine - right * sine).to(qkv.dtype.element_ty), mask=mask)
        tl.store(place + HALF, (right * cosine + left * sine).to(qkv.dtype.element_ty), mask=mask)


ROWS, WARPS = 32, 4


def rotate(qkv: Tensor, positions: Tensor, rotary: Rotary) -> None:
    """Rotate the queries and keys of qkv [T, 3, H, D] in place, by the angles of `positions`, int64 [T]."""
    num_rows, _, num_heads, head_dim = qkv.shape
    _rotate_kernel[(-(-num_rows // ROWS),)](
        qkv, positions, *rotary, num_rows,
        COUNT=2 * num_heads, PITCH=3 * num_heads * head_dim, HALF=head_dim // 2, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
