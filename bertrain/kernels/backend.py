"""Which kernels run on a device: Triton's, or those in C where a function names one (`on_cpu`).

Kernel modules import `jit`, `tl` and `triton` from this file only, so that `import bertrain.kernels.attention`
works on a machine without Triton.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # no Triton wheel for this platform
    triton = None
    tl = None

    def jit(function: Callable | None = None, **_options: Any) -> Any:
        """Return the function unchanged; it cannot be launched."""
        return function if function is not None else lambda inner: inner


__all__ = ["INTERPRETED", "available", "generation", "jit", "num_multiprocessors", "on_cpu", "tl", "triton"]

P = ParamSpec("P")
R = TypeVar("R")
# Triton reads this variable once, at import.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_cpu(c_kernel: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the launcher of a Triton kernel: for tensors in CPU memory, `c_kernel` runs instead.

    The first argument (the first member, if it is a tuple) decides. Under Triton's interpreter, Triton kernels run on
    CPU tensors too.
    """

    def decorate(triton_kernel: Callable[P, R]) -> Callable[P, R]:
        if INTERPRETED:
            return triton_kernel

        @functools.wraps(triton_kernel)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            is_on_gpu = (first[0] if isinstance(first, tuple) else first).is_cuda
            return (triton_kernel if is_on_gpu else c_kernel)(*args, **kwargs)

        return run

    return decorate


def available(device: torch.device | str) -> tuple[bool, str]:
    """Whether Triton kernels can run on `device`, and the reason in one line."""
    device = torch.device(device)
    if triton is None:
        return False, "triton is not installed"
    if INTERPRETED:
        return True, "triton interpreter (TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return False, f"triton kernels need a CUDA device, not {device.type}"
    if torch.version.hip:
        return False, "the kernels are for NVIDIA GPUs"
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
    tested = "" if major == 9 else "; tested on compute capability 9.0 only"
    return True, f"triton {triton.__version__} on {name}{tested}"


@functools.cache
def generation(device: torch.device) -> int:
    """The major compute capability: 8 Ampere and Ada, 9 Hopper (also without a GPU), 10 and 12 Blackwell."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors, which sizes a persistent grid (2 under the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
