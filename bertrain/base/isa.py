"""The CPU instruction sets that matrix products may use (train.isa).

Nothing here imports torch: its libraries read the environment once, at their first product, so a cap must be set
before. ATen (everything but products), oneDNN (16-bit products) and MKL (32-bit products) each read a variable.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

from bertrain.base.errors import UserError
from bertrain.base.machine import cpu_flags

Isa = Literal["avx2", "avx512", "amx"]
Wish = Literal["auto", "avx2", "avx512", "amx"]

CAPS: dict[Isa, dict[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # the last before AMX, 16-bit arithmetic of AVX-512 included
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
FLAGS: dict[Isa, str] = {"amx": "amx_tile", "avx512": "avx512bw", "avx2": "avx2"}  # newest first
NEWER: dict[Isa, tuple[Isa, ...]] = {"avx2": ("avx512", "amx"), "avx512": ("amx",), "amx": ()}
ONEDNN_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # as oneDNN reads them: the first that is set counts
ONEDNN_NAMES: dict[str, Isa] = {"AVX512_CORE_AMX": "amx", "AVX512": "avx512", "AVX2": "avx2"}  # beginnings of values
LEFT_OUT = {
    "AVX512_CORE": ("avx512_bf16", "avx512_fp16"),
    "AVX512_CORE_VNNI": ("avx512_bf16", "avx512_fp16"),
    "AVX512_CORE_BF16": ("avx512_fp16",),
    "AVX512_CORE_AMX": ("amx_fp16",),
}  # products of 16 bits that these caps of oneDNN leave out, of those that their instruction set has
ARM_VECTORS = ("sve2", "sve", "asimd")  # newest first; PyTorch uses what is there, without a cap


def newest_of(flags: set[str]) -> Isa | None:
    """The newest of the three instruction sets that a CPU with these flags has, or None."""
    return next((name for name, flag in FLAGS.items() if flag in flags), None)


def usable(wish: Wish) -> Isa | None:
    """The newest instruction set that products will use under `train.isa`; None where the CPU has none of the three."""
    if wish != "auto":
        return wish
    newest, (cap, _) = newest_of(cpu_flags()), capped_outside()
    return cap if newest and cap and newest in NEWER[cap] else newest


def capped_outside() -> tuple[Isa | None, str]:
    """The cap on oneDNN's instruction set in the environment, and its variable; (None, "") without any."""
    for name in ONEDNN_VARIABLES:
        if value := os.environ.get(name, "").upper():
            cap = next((isa for start, isa in ONEDNN_NAMES.items() if value.startswith(start)), None)
            return cap, f"{name}={value}"
    return None, ""


def emulation(precision: str, wish: Wish) -> str:
    """Why this CPU computes products in a 16-bit format by other means than its own instructions; empty if it does not.

    Such products are many times slower than those of fp32.
    """
    if precision not in ("bf16", "fp16"):
        return ""
    flags, newest, (_, cap) = cpu_flags(), usable(wish), capped_outside()
    if newest is None:  # ARM, whose flag for products of 16 bits is bf16
        return "" if "bf16" in flags else "the CPU has no products of 16 bits (bf16)"
    native = [f"{name}_{precision}" for name in ("avx512", "amx") if name == newest or newest == "amx"]
    native = [name for name in native if name not in LEFT_OUT.get(cap.partition("=")[2], ())]
    if flags.intersection(native):
        return ""
    limit = f", limited by {cap}" if cap and wish == "auto" and newest != newest_of(flags) else ""
    return (f"the CPU has no {' or '.join(native)}" if native else f"{newest} has no {precision}") + limit


def cap_isa(wish: Wish) -> None:
    """Limit products of this process, and of those it starts, to instructions no newer than `wish`.

    Call it before torch is imported, as the command line does. Raises UserError if the CPU lacks the instructions, or
    if torch is loaded and may have chosen already.
    """
    if wish == "auto":
        return
    flags = cpu_flags()
    if FLAGS[wish] not in flags:
        newest = newest_of(flags) or "none of these instruction sets"
        raise UserError("unsupported-isa", f"train.isa is {wish}, but this CPU has {newest}; use --train.isa auto")
    outside, variable = capped_outside()
    if outside and wish in NEWER[outside] and wish not in CAPS:
        raise UserError("isa-capped", f"the environment variable {variable} disables train.isa {wish}; unset it")
    cap = CAPS.get(wish, {})
    if all(os.environ.get(name) == value for name, value in cap.items()):
        return
    if "torch" in sys.modules:
        variables = " ".join(f"{name}={value}" for name, value in cap.items())
        raise UserError(
            "isa-too-late",
            f"train.isa {wish} must be set before torch is imported; call bertrain.base.isa.cap_isa({wish!r}) earlier, "
            f"or set {variables} in the environment",
        )
    os.environ.update(cap)


def describe(wish: Wish, precision: str = "") -> str:
    """The newest instructions that products in this precision use, and what limits them."""
    newest = usable(wish)
    if precision == "fp16" and newest == "amx" and "amx_fp16" not in cpu_flags():
        return "instructions up to avx512 (this CPU has no AMX for fp16)"
    is_capped = newest != newest_of(cpu_flags())
    reason = "train.isa" if wish != "auto" else capped_outside()[1] if is_capped else "all this CPU has"
    if newest is None:
        on_arm = next((name for name in ARM_VECTORS if name in cpu_flags()), None)
        return f"instructions up to {on_arm} (all this CPU has)" if on_arm else "no known vector instructions"
    return f"instructions up to {newest} ({reason})"
