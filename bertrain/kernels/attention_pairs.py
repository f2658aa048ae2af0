"""Attention dropout on two weights at a time.

A thread holds two neighboring elements of a tile. As bf16 they fit into one register, and a pair of masks selects both.
One instruction makes both masks: it compares the two halves of a random word as 16-bit floats without their signs.
Halves that are NaN compare as too large, so this needs dropout of at least 1/32. Other dtypes, smaller rates and the
interpreter take one weight at a time, which is the same function up to rounding.
"""

from __future__ import annotations

import torch

from bertrain.kernels.arithmetic import HAS_ASSEMBLY
from bertrain.kernels.backend import jit, tl
from bertrain.kernels.random import attention_keep

INFINITY_BITS = 0x7C00  # of a 16-bit float; larger ones are NaN


def uses_pairs(dtype: torch.dtype, keep: int) -> bool:
    """Whether weights of this dtype are dropped in pairs; `keep` is the threshold of `attention_threshold`."""
    return bool(HAS_ASSEMBLY) and dtype == torch.bfloat16 and keep <= INFINITY_BITS


@jit
def drop(weights, words, columns, TYPE: tl.constexpr, KEEP: tl.constexpr, PAIRS: tl.constexpr):
    """Weights of a tile of queries x keys in 16 bits, zero where dropped."""
    if PAIRS:
        below = tl.full([1, 1], KEEP * 0x10001, tl.int32)
        return tl.inline_asm_elementwise(
            """{ .reg .b32 bits, keep, pair;
            cvt.rn.bf16x2.f32 pair, $2, $1;
            abs.f16x2 bits, $3;
            set.lt.u32.f16x2 keep, bits, $5;
            and.b32 $0, pair, keep; }""",
            "=r,f,f,r,r,r,r", [weights, words, below], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return tl.where(attention_keep(words, columns, KEEP), weights, 0.0).to(TYPE)


@jit
def drop_gradient(
    weights, gradient, delta, words, columns, TYPE: tl.constexpr, KEEP: tl.constexpr, PAIRS: tl.constexpr
):
    """The gradient of a tile of scores, queries x keys, in 16 bits."""
    if PAIRS:
        below = tl.full([1, 1], KEEP * 0x10001, tl.int32)
        return tl.inline_asm_elementwise(
            """{ .reg .f32 low, high; .reg .b32 bits, keep, pair, kept, dropped, zero;
            mov.b32 zero, 0x80008000;
            cvt.rn.bf16x2.f32 pair, $2, $1;
            add.f32 low, $3, $5;
            add.f32 high, $4, $6;
            cvt.rn.bf16x2.f32 kept, high, low;
            cvt.rn.bf16x2.f32 dropped, $6, $5;
            abs.f16x2 bits, $7;
            set.lt.u32.f16x2 keep, bits, $9;
            lop3.b32 kept, keep, kept, dropped, 0xca;
            fma.rn.bf16x2 $0, pair, kept, zero; }""",
            "=r,f,f,f,f,f,f,r,r,r,r", [weights, gradient, delta, words, below],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return (weights * (tl.where(attention_keep(words, columns, KEEP), gradient, 0.0) + delta)).to(TYPE)


@jit
def drop_both(weights, gradient, delta, words, keys, TYPE: tl.constexpr, KEEP: tl.constexpr, PAIRS: tl.constexpr):
    """Dropped weights and the gradient of the scores of a tile of keys x queries, both in 16 bits.

    Here the two elements are neighboring queries, with a random word each; both take the half of their key.
    """
    if PAIRS:
        below = tl.full([1, 1], KEEP * 0x10001, tl.int32)
        half = tl.where((keys & 1) == 0, 0x5410, 0x7632)
        return tl.inline_asm_elementwise(
            """{ .reg .f32 low, high; .reg .b32 bits, keep, pair, kept, dropped, zero;
            mov.b32 zero, 0x80008000;
            prmt.b32 bits, $8, $9, $10;
            abs.f16x2 bits, bits;
            set.lt.u32.f16x2 keep, bits, $12;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            and.b32 $0, pair, keep;
            add.f32 low, $4, $6;
            add.f32 high, $5, $7;
            cvt.rn.bf16x2.f32 kept, high, low;
            cvt.rn.bf16x2.f32 dropped, $7, $6;
            lop3.b32 kept, keep, kept, dropped, 0xca;
            fma.rn.bf16x2 $1, pair, kept, zero; }""",
            "=&r,=r,f,f,f,f,f,f,r,r,r,r,r,r", [weights, gradient, delta, words, half, below],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    is_kept = attention_keep(words, keys, KEEP)
    dscores = weights * (tl.where(is_kept, gradient, 0.0) + delta)
    return tl.where(is_kept, weights, 0.0).to(TYPE), dscores.to(TYPE)
