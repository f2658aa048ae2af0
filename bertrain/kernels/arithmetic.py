"""Single hardware instructions for 2**x, 1/x and log2(x), which Triton has no functions for.

`tl.exp2` and division handle numbers below 2**-126, at three and eight extra instructions; `tl.log2` takes twenty. The
kernels here are bound by instructions, and such small numbers count as zero.
"""

from __future__ import annotations

from bertrain.kernels.backend import INTERPRETED, jit, tl

LOG2_E = 1.4426950408889634  # log2(e)
HAS_ASSEMBLY = tl.constexpr(not INTERPRETED) if tl is not None else False
KERNEL_LOG2_E = tl.constexpr(LOG2_E) if tl is not None else LOG2_E  # a global that kernels may read


@jit
def exp2(x):
    """2 ** x, zero where that is below 2**-126; relative error under 2**-22."""
    if HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@jit
def reciprocal(x):
    """1 / x, zero where x is beyond 2**126; relative error under 2**-23."""
    if HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@jit
def log2(x):
    """log2(x) for x above 2**-126; the absolute or relative error, whichever is larger, is under 2**-22."""
    if HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)
