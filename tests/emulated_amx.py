"""The C kernels on CPUs that have AVX-512 but not AMX: `emulated_amx.h` computes the same, many times slower.

For tests alone, so nothing in the package knows of this. A test asks for the fixture `c_kernels`, a process that it
starts for `within`. On a CPU with AMX neither changes anything: the kernels run as users run them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bertrain.base import isa, machine
from bertrain.kernels import cpu_library

HEADER = Path(__file__).with_name("emulated_amx.h")
EMULATED = frozenset(("avx512_bf16", "amx_tile", "amx_bf16"))
LACKING = EMULATED - machine.cpu_flags()
# New caches, so that what is loaded here is not found by others, nor what was loaded before found here.
load, available = (functools.cache(cached.__wrapped__) for cached in (cpu_library._load, cpu_library.available))


def flags() -> tuple[str, ...]:
    """For the compiler; the header's hash is there for the library's name in the cache."""
    kept = (flag for flag in cpu_library.FLAGS if not flag.startswith(("-mavx512bf16", "-mamx")))
    version = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:8]
    return (*kept, "-include", str(HEADER), f"-DEMULATED_BY=0x{version}")


@contextmanager
def within() -> Iterator[None]:
    """Until the end of the block, this CPU has AMX, as far as the package can tell."""
    with pytest.MonkeyPatch.context() as patch:
        if LACKING:
            patch.setattr(cpu_library, "FLAGS", flags())
            patch.setattr(cpu_library, "NEEDED", tuple(flag for flag in cpu_library.NEEDED if flag not in EMULATED))
            patch.setattr(cpu_library, "_load", load)
            patch.setattr(cpu_library, "available", available)
            patch.setattr(isa, "cpu_flags", lambda: machine.cpu_flags() | EMULATED)
        yield


@functools.cache
def why_not() -> str:
    """Why the kernels cannot run here, neither on AMX nor on AVX-512; empty if they can."""
    with within():
        usable, reason = cpu_library.available()
    return "" if usable else reason
