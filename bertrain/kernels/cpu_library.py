"""Compiles cpu.c with the user's C compiler, keeps the library in the user's cache, and calls it through ctypes.

PyTorch's wheel offers no way to write a fused kernel for a CPU, and its own compiler needs gcc too. A C file without
PyTorch's headers takes two seconds to compile and shares PyTorch's OpenMP threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from bertrain.base.files import cache_folder

SOURCE = Path(__file__).with_name("cpu.c")
NEEDED = ("avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16")  # by their names in /proc/cpuinfo
FLAGS = (
    *("-std=c11", "-O3", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-fopenmp"),
    *("-march=skylake-avx512", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
FLOAT, DOUBLE, LONG, INT = ctypes.c_float, ctypes.c_double, ctypes.c_long, ctypes.c_int
UINT32, SEED = ctypes.c_uint32, ctypes.c_int64


class UnavailableError(Exception):
    """The reason why the C kernels cannot run, in a few words."""


@functools.cache
def available() -> tuple[bool, str]:
    """Whether the C kernels can run on this CPU, and the reason in one line. Compiles them if the cache has none."""
    try:
        compiler = _load()[1]
    except UnavailableError as error:
        return False, str(error)
    return True, f"AMX kernels, compiled by {compiler}"


@functools.cache
def _load() -> tuple[ctypes.CDLL, str]:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        raise UnavailableError("the C kernels need Linux") from None
    if missing := [flag for flag in NEEDED if not re.search(rf"^flags\s.*\b{flag}\b", cpuinfo, re.MULTILINE)]:
        raise UnavailableError(f"this CPU has no {missing[-1]}")
    try:
        compiler, version = find_compiler()
        compiled = compile_source(compiler, version)
    except OSError as error:  # no folder for them, a full disk, or a compiler that cannot start
        raise UnavailableError(f"the C kernels cannot be compiled: {error}") from None
    try:
        library = ctypes.CDLL(str(compiled))
    except OSError as error:  # cut off, or of another machine that shares the folder
        with suppress(OSError):
            compiled.unlink()  # the next start compiles it again
        raise UnavailableError(f"the compiled C kernels cannot be loaded: {error}") from None
    if library.request_tiles() != 0:
        raise UnavailableError("Linux refuses AMX to this process")
    return library, version


def find_compiler() -> tuple[str, str]:
    """The path of the C compiler, and its version line."""
    for name in (os.environ.get("CC", ""), "gcc", "cc", "clang"):
        if name and (path := shutil.which(name)):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return path, done.stdout.partition("\n")[0].strip() or name
    raise UnavailableError("the C kernels need a C compiler: put gcc on the PATH")


def openmp_runtime() -> str:
    """The file of the OpenMP runtime that PyTorch has loaded; a second runtime would start more threads."""
    loaded = re.findall(r"\S+/lib(?:gomp|iomp5|omp)\b[^/\s]*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if not loaded:
        raise UnavailableError("PyTorch was built without OpenMP")
    return min(loaded, key=lambda path: "gomp" not in path)  # prefer gomp, which a preloaded runtime also provides


def compile_source(compiler: str, version: str) -> Path:
    """The shared library of this source, compiler and runtime; compiles it if the cache has none."""
    runtime, source = openmp_runtime(), SOURCE.read_bytes()
    name = hashlib.sha256(b"\0".join([source, version.encode(), runtime.encode(), *map(str.encode, FLAGS)])).hexdigest()
    path = cache_folder() / f"kernels-{name[:16]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # ranks may compile at the same time: each renames
        compiled, linked = Path(folder) / "cpu.o", Path(folder) / path.name
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), runtime, "-lm", "-o", str(linked)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                problem = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
                raise UnavailableError(f"{Path(compiler).name} could not compile the C kernels: {problem[:200]}")
        os.replace(linked, path)
    return path


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library; tensors must be contiguous and in CPU memory, and become pointers."""
    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.device.type == "cpu", f"{name}: a tensor on {argument.device}"
            assert argument.is_contiguous(), f"{name}: a tensor that is not contiguous"
            values.append(ctypes.c_void_p(argument.data_ptr()))
        else:
            values.append(ctypes.c_void_p() if argument is None else argument)
    # For PyTorch's profiler, this is an operator like any other, with the sizes of its tensors.
    with _RecordFunctionFast(f"_{name}", [one for one in arguments if isinstance(one, Tensor)]):
        code = getattr(_load()[0], name)(*values)
    if code != 0:
        raise MemoryError(f"the kernel {name} cannot allocate its working memory")


def thread_count() -> int:
    """Threads that a kernel uses, each with partial sums of its own."""
    return _load()[0].thread_count()
