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
ARM_VECTORS = ("sve2", "sve", "asimd")  # newest first; PyTorch uses what is there, without a cap


def newest_of(flags: set[str]) -> Isa | None:
    """The newest of the three instruction sets that a CPU with these flags has, or None."""
    return next((name for name, flag in FLAGS.items() if flag in flags), None)


def usable(wish: Wish) -> Isa | None:
    """The newest instruction set that products will use under `train.isa`; None where the CPU has none of the three."""
    return _capped_outside() or newest_of(cpu_flags()) if wish == "auto" else wish


def _capped_outside() -> Isa | None:
    """The cap that environment variables set, whoever set them."""
    return next((name for name, cap in CAPS.items() if cap.items() <= os.environ.items()), None)


def cap_isa(wish: Wish) -> None:
    """Limit products of this process, and of those it starts, to instructions no newer than `wish`.

    Call it before torch is imported, as the command line does. Raises UserError if the CPU lacks the instructions, or
    if torch is loaded and may have chosen already.
    """
    if wish == "auto":
        return
    flags = cpu_flags()
    if FLAGS[wish] not in flags:
        newest = newest_of(flags) or "no such instructions"
        raise UserError("unsupported-isa", f"this CPU has {newest}, not train.isa {wish}; use --train.isa auto")
    cap = CAPS.get(wish, {})
    if all(os.environ.get(name) == value for name, value in cap.items()):
        return
    if "torch" in sys.modules:
        variables = " ".join(f"{name}={value}" for name, value in cap.items())
        raise UserError(
            "isa-too-late",
            f"train.isa {wish} comes too late: torch is loaded; call bertrain.base.isa.cap_isa({wish!r}) before "
            f"torch is imported, or set {variables} in the environment",
        )
    os.environ.update(cap)


def describe(wish: Wish, precision: str = "") -> str:
    """The newest instructions that products in this precision use, and what limits them."""
    newest = usable(wish)
    if precision == "fp16" and newest == "amx" and "amx_fp16" not in cpu_flags():
        return "instructions up to avx512 (this CPU has no AMX for fp16)"
    reason = "train.isa" if wish != "auto" else "the environment's cap" if _capped_outside() else "all this CPU has"
    if newest is None:
        on_arm = next((name for name in ARM_VECTORS if name in cpu_flags()), None)
        return f"instructions up to {on_arm} (all this CPU has)" if on_arm else "no known vector instructions"
    return f"instructions up to {newest} ({reason})"
