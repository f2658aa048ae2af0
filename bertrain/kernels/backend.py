"""Whether Triton kernels can run here, and stand-ins that let kernel files be imported where they cannot.

Kernel modules import `jit`, `tl` and `triton` from this file only, so that `import bertrain.kernels.attention`
works on a machine without Triton; such a machine then runs the plain-PyTorch twins.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # no Triton wheel for this platform: the twins run instead
    triton = None
    tl = None

    def jit(function: Callable | None = None, **_options: Any) -> Any:
        """Leave a kernel as the plain function it is; nothing may launch it."""
        return function if function is not None else lambda inner: inner


__all__ = ["INTERPRETED", "available", "jit", "num_multiprocessors", "tl", "triton"]

# Triton decides at import whether kernels are compiled or interpreted; reading it later would be a lie.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def available(device: torch.device | str) -> tuple[bool, str]:
    """Return whether the kernels can run on `device`, and the reason in one line."""
    device = torch.device(device)
    if triton is None:
        return False, "triton is not installed"
    if INTERPRETED:
        return True, "triton interpreter (TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return False, f"triton kernels need a CUDA device, not {device.type}"
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    return _cuda_available(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _cuda_available(index: int) -> tuple[bool, str]:
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    if major < 8:
        return False, f"{name} has compute capability {major}.{minor}; bf16 kernels need 8.0 or newer"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return False, "triton needs a C compiler: put gcc or clang on the PATH"
    tried = "" if major == 9 else "; tried by us on compute capability 9.0 only"
    return True, f"triton {triton.__version__} on {name}{tried}"


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors to size a persistent grid by (a small constant under the interpreter)."""
    if device.type != "cuda":
        return 2
    return _multiprocessors(device.index if device.index is not None else torch.cuda.current_device())
