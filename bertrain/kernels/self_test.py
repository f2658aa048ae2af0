"""Runs every kernel once beside its twin in plain PyTorch, so that a kernel that fails here never ends a run.

A driver, a Triton or a GPU that nobody has tried can refuse a kernel, miscompile it, or end the process. So a child
process runs each kernel, forward and backward, on a small ragged bin in the sizes of the run, and prints a JSON line
before and after it; `examine` reads the lines. model/fused_self_test.py is that process, and adds a whole model.
Results are kept in the user's cache folder, by GPU, driver, versions, sources and sizes, so a machine pays once: some
seconds, most of them for compilations that the run then finds in Triton's cache.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from bertrain.base.files import cache_folder, write_atomically
from bertrain.base.logs import note
from bertrain.base.machine import read_or_empty
from bertrain.base.schema import JsonError, check_value, load_json
from bertrain.kernels import backend
from bertrain.kernels.self_test_checks import Checks, Result, Sizes

TRANSIENT = ("with code -9", "was not ready", "out of memory", "ALLOC_FAILED")
"""Parts of error texts that do not mean a broken kernel: a killed process, a busy node, a GPU that others fill."""
PATIENCE_S = 600  # for all kernels; a compiler that takes longer is taken to hang


def child_command() -> list[str]:
    return [sys.executable, "-m", "bertrain.model.fused_self_test"]


def examine(sizes: Sizes, device: str) -> tuple[list[Result], str]:
    """Run the child: a result for each kernel that it reached, and what it printed to standard error.

    A child that does not get the GPU, or not enough of its memory, says nothing about kernels.
    """
    given = json.dumps(asdict(sizes) | {"device": device})
    try:
        ended = subprocess.run(
            child_command(), input=given, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        output, errors, ending = ended.stdout, ended.stderr, f"ended its process with code {ended.returncode}"
    except subprocess.TimeoutExpired as slow:
        output, errors = (os.fsdecode(part or b"") for part in (slow.stdout, slow.stderr))
        ending = f"was not ready after {PATIENCE_S} seconds"
    except OSError as error:  # no process could be started
        return [], str(error)
    results, begun = [], ""
    for line in output.splitlines():
        if not line.startswith('{"'):  # a library's word
            continue
        record = json.loads(line)
        begun = record.get("begin", "")
        if "kernel" in record:
            results.append(check_value(record, Result))
    if begun:
        results.append(Result(begun, None, 0.0, ending))
    return results, errors


def cache_file(sizes: Sizes, device: torch.device) -> Path:
    """Where the results for these sizes on this machine are kept; OSError if there is no place."""
    sources = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted([*package.glob("kernels/*.py"), *package.glob("model/*.py")]):
        sources.update(path.read_bytes())
    versions = [torch.__version__, backend.triton.__version__ if backend.triton else "", platform.python_version()]
    gpu: list[str] = []
    if device.type == "cuda":
        gpu = [torch.cuda.get_device_name(device), read_or_empty(Path("/proc/driver/nvidia/version"))]
    key = hashlib.sha256(json.dumps([asdict(sizes), versions, gpu, sources.hexdigest()]).encode()).hexdigest()[:24]
    return cache_folder() / "kernels" / f"{key}.json"


@functools.cache
def results_here(sizes: Sizes, device: torch.device) -> tuple[Result, ...]:
    """The kernels' results on this machine: those kept, or those of a child process started now."""
    try:
        place = cache_file(sizes, device)
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a node wait for the one that runs the kernels
            try:
                return tuple(load_json(place, [Result]))
            except (OSError, JsonError):
                results, is_whole = _examined(sizes, device)
                if is_whole:
                    write_atomically(place, json.dumps([asdict(result) for result in results], indent=1) + "\n")
                return results
    except OSError:  # no folder to keep results in
        return _examined(sizes, device)[0]


def _examined(sizes: Sizes, device: torch.device) -> tuple[tuple[Result, ...], bool]:
    """The results, and whether to keep them: they tell of every kernel, or of one that fails whenever it is tried."""
    note("info", "kernels", f"running every kernel once on {device} before the first step")
    results, errors = examine(sizes, str(device))
    failures = [result.failure for result in results if result.failure]
    is_lasting = not any(sign in failure for failure in failures for sign in TRANSIENT)
    is_whole = is_lasting and bool(failures or len(results) == len(Checks(sizes, "cpu").all()))
    if failures or not is_whole:
        note("warning", "kernels", errors[-20_000:] or "the kernels could not be run before the first step")
    return tuple(results), is_whole


def why_failed(sizes: Sizes, device: torch.device) -> str:
    """The first kernel that does not work on this machine, and why; empty if all do."""
    failed = [result for result in results_here(sizes, device) if result.failure]
    if not failed:
        return ""
    kept = ""
    with suppress(OSError):
        kept = f" (kept in {place})" if (place := cache_file(sizes, device)).is_file() else ""
    return f"the kernel {failed[0].kernel} failed here: {failed[0].failure}{kept}"
