"""Which instructions products on a CPU may use. Nothing here imports torch: its libraries read the environment once,
at their first product, so a cap has to be there before.

ATen (all that is not a product), oneDNN (products of 16 bits) and MKL (products of 32) each have a variable.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Literal

from bertrain.base.errors import UserError

Isa = Literal["avx2", "avx512", "amx"]
Wish = Literal["auto", "avx2", "avx512", "amx"]

CAPS: dict[str, dict[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # the last before AMX, 16-bit arithmetic of AVX-512 included
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
FLAGS = {"avx2": "avx2", "avx512": "avx512bw", "amx": "amx_tile"}
ARM_VECTORS = ("sve2", "sve", "asimd")  # newest first; there is nothing to cap, PyTorch takes what is there
ARM_CORES = {  # by implementer and part: on ARM, Linux gives no name
    "0x41 0xd07": "Cortex-A57",
    "0x41 0xd08": "Cortex-A72",
    "0x41 0xd0c": "Neoverse N1",
    "0x41 0xd40": "Neoverse V1",
    "0x41 0xd49": "Neoverse N2",
    "0x41 0xd4f": "Neoverse V2",
    "0x41 0xd83": "Neoverse V3AE",
    "0x41 0xd84": "Neoverse V3",
    "0x41 0xd8e": "Neoverse N3",
    "0x46 0x001": "A64FX",
    "0xc0 0xac3": "Ampere-1",
    "0xc0 0xac4": "Ampere-1a",
}


def cpu_flags() -> set[str]:
    """The instruction sets that Linux reports, on x86 and on ARM; empty elsewhere."""
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())


def cpu_name() -> str:
    """What the processor calls itself, or where it does not, its kind."""
    core = f"{_cpuinfo('CPU implementer')} {_cpuinfo('CPU part')}"
    return _cpuinfo("model name") or ARM_CORES.get(core) or platform.processor() or platform.machine() or "cpu"


def _cpuinfo(field: str) -> str:
    """A field of the first core; empty where Linux does not give it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def newest_of(flags: set[str]) -> Isa | None:
    """The newest of the three that a CPU with these flags has; None for none of them."""
    newest_first: tuple[Isa, ...] = ("amx", "avx512", "avx2")
    return next((name for name in newest_first if FLAGS[name] in flags), None)


def usable(wish: Wish) -> Isa | None:
    """The newest instructions that products will use under `train.isa`; None where the CPU has none of the three."""
    return _capped_outside() or newest_of(cpu_flags()) if wish == "auto" else wish


def _capped_outside() -> Isa | None:
    """The cap that the environment sets, whoever put it there."""
    capped: tuple[Isa, ...] = ("avx2", "avx512")
    return next((name for name in capped if CAPS[name].items() <= os.environ.items()), None)


def cap_isa(wish: Wish) -> None:
    """Let the products of this process, and of those it starts, use nothing newer than `wish`.

    Call it before torch computes anything, as the command line does. Raises UserError where the CPU lacks the
    instructions, or where torch is loaded and may have chosen already.
    """
    if wish == "auto":
        return
    flags = cpu_flags()
    if FLAGS[wish] not in flags:
        raise UserError(
            f"train.isa {wish} is not possible here: this CPU has {newest_of(flags) or 'no such instructions'}; "
            "use --train.isa auto"
        )
    cap = CAPS.get(wish, {})
    if all(os.environ.get(name) == value for name, value in cap.items()):
        return
    if "torch" in sys.modules:
        variables = " ".join(f"{name}={value}" for name, value in cap.items())
        raise UserError(
            f"train.isa {wish} comes too late: torch is loaded, and may have chosen its instructions; call "
            f"bertrain.cap_isa({wish!r}) before it is imported, or set {variables} in the environment"
        )
    os.environ.update(cap)


def describe(wish: Wish, precision: str = "") -> str:
    """What products on this CPU may use, and by whose word; what they cannot use in this precision."""
    newest = usable(wish)
    if precision == "fp16" and newest == "amx" and "amx_fp16" not in cpu_flags():
        return "instructions up to avx512 (this CPU has no AMX for fp16)"
    reason = "train.isa" if wish != "auto" else "the environment's cap" if _capped_outside() else "all this CPU has"
    if newest is None:
        on_arm = next((name for name in ARM_VECTORS if name in cpu_flags()), None)
        return f"instructions up to {on_arm} (all this CPU has)" if on_arm else "no vector instructions that we know of"
    return f"instructions up to {newest} ({reason})"
