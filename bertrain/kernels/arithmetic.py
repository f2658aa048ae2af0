"""Instructions that Triton does not hand out bare.

`tl.exp2` and a division take care of numbers below 2**-126, at three and eight instructions extra, and `tl.log2` is
computed in twenty; where such a number means zero anyway, and where instructions are what a kernel waits for, the bare
ones do.
"""

from __future__ import annotations

from bertrain.kernels.backend import INTERPRETED, jit, tl

HAS_ASSEMBLY = tl.constexpr(not INTERPRETED) if tl is not None else False


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
    """The logarithm to base 2 of a number above 2**-126; error under 2**-22, relative where that is more."""
    if HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)
