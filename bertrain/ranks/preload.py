"""Preloads the memory allocator and the OpenMP runtime of a run on a CPU.

A library can replace malloc, or PyTorch's OpenMP, only when a process starts. So the command line looks for them and,
if it finds one, restarts itself with LD_PRELOAD. Ranks inherit it. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

from bertrain.base.errors import UserError
from bertrain.base.machine import read_or_empty

Allocator = Literal["auto", "jemalloc", "tcmalloc", "system"]
OpenMP = Literal["auto", "intel", "gnu"]
STARTED_AGAIN = "BERTRAIN_PRELOADED"  # set in a process that was restarted for this
FILES = {
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
    "tcmalloc": ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libtcmalloc.so"),
    "intel": ("libiomp5.so", "libomp.so.5", "libomp.so"),  # LLVM's is Intel's under another name
}
PACKAGES = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4", "intel": "libomp5"}
VARIABLES = {
    # The next step needs the memory that a step frees: keep it for ten seconds, in huge pages, instead of zeroing new
    # pages. Keeping it forever, as Intel's scripts do, took up to a quarter more memory and was no faster.
    "jemalloc": {
        "MALLOC_CONF": "oversize_threshold:0,background_thread:true,metadata_thp:auto,thp:always,"
        "dirty_decay_ms:10000,muzzy_decay_ms:10000"
    },
    "tcmalloc": {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": "1099511627776"},
    "intel": {"KMP_BLOCKTIME": "1"},
}


def library_folders() -> list[Path]:
    """The folders to search for shared libraries, in order: the environment's own, then the system's."""
    named = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    own = [f"{prefix}/lib" for prefix in (sys.prefix, os.environ.get("CONDA_PREFIX")) if prefix]
    system = [f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib"]
    return [Path(folder) for folder in (*named, *own, *system)]


def find(name: str) -> Path | None:
    """The file of a library; None if it is not installed."""
    places = (folder / file for folder in library_folders() for file in FILES[name])
    return next((place for place in places if place.exists()), None)


def choose(allocator: Allocator, openmp: OpenMP) -> dict[str, str]:
    """The environment variables that preload libraries beside those in LD_PRELOAD; what the user has set stays.

    Raises UserError if a library that the settings name is missing.
    """
    before, libraries = os.environ.get("LD_PRELOAD", ""), dict[str, Path]()
    if not re.search("jemalloc|tcmalloc|mimalloc", before):
        wished = {"auto": ("jemalloc", "tcmalloc"), "system": ()}.get(allocator, (allocator,))
        libraries |= _first(wished, "train.allocator", allocator)
    if openmp == "intel" and not re.search("libi?omp", before):
        libraries |= _first(("intel",), "train.openmp", openmp)
    if not libraries:
        return {}
    loaded = [*map(str, libraries.values()), *filter(None, before.replace(" ", ":").split(":"))]
    needed = {key: value for name in libraries for key, value in VARIABLES[name].items() if key not in os.environ}
    return {"LD_PRELOAD": ":".join(loaded)} | needed


def _first(wished: tuple[str, ...], setting: str, value: str) -> dict[str, Path]:
    for name in wished:
        if place := find(name):
            return {name: place}
    if wished and value != "auto":
        cure = f"install it (Debian's package is {PACKAGES[value]}), or use --{setting} auto"
        raise UserError("missing-library", f"{setting} {value}: {FILES[value][0]} is not installed; {cure}")
    return {}


def start_again(device: str, allocator: Allocator, openmp: OpenMP) -> None:
    """Restart this command with the libraries to preload, unless it has them or computes on a GPU."""
    # `python [-u] -m bertrain`, or the script that pip made; not a program that uses the package.
    is_command = any(Path(word).name == "bertrain" for word in sys.orig_argv[1:4])
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())  # torch is not imported yet
    if not is_command or not on_cpu or sys.platform != "linux":
        return
    environment = {} if STARTED_AGAIN in os.environ else choose(allocator, openmp)
    if environment:
        sys.stdout.flush()
        sys.stderr.flush()
        variables = {**os.environ, **environment, STARTED_AGAIN: "1"}
        # Ctrl-C waits until the new process can handle it (__main__.py): a starting Python prints a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)
    if "malloc" not in os.environ.get("LD_PRELOAD", ""):
        keep_memory()


def keep_memory() -> None:
    """Make the C library keep freed memory: the next step needs it, and new pages must be zeroed first."""
    with suppress(OSError):  # another C library than glibc
        library = ctypes.CDLL("libc.so.6")
        for number, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            library.mallopt(number, value)


def describe() -> str:
    """The memory allocator and the OpenMP runtime that this process has loaded."""
    loaded = read_or_empty(Path("/proc/self/maps"))
    if not loaded:
        return "memory and threads as the system has them"
    names = ("jemalloc", "tcmalloc", "mimalloc")
    allocator = next((name for name in names if f"lib{name}" in loaded), "the C library")
    threads = "Intel's OpenMP" if re.search(r"lib(iomp5|omp)\.so", loaded) else "GNU's OpenMP"
    return f"memory from {allocator}, threads from {threads}"
