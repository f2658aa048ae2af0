"""`bertrain doctor`: the hardware and software of this machine, how bertrain uses it, and what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from bertrain.base import hardware
from bertrain.base.extras import EXTRAS, is_installed
from bertrain.base.files import existing_parent
from bertrain.base.formatting import GIB, counted
from bertrain.base.machine import cpu_flags, cpu_name, free_memory, read_or_empty, total_memory


@dataclass(frozen=True)
class Finding:
    """One line of the report. `verdict` is ok, note (it works, but could be better) or missing."""

    subject: str
    found: str
    verdict: str
    consequence: str


def doctor(folder: str | Path = ".") -> list[Finding]:
    """Examine this machine; `folder` is where runs will be written."""
    python = Finding("python", platform.python_version(), "ok", "3.11 or later is needed")
    findings = [python, _packages(), _extras(), _cores(), _vector_units(), _memory(), _disk(Path(folder))]
    return [*findings, *_gpus(), _compiler(), _triton()]


def _packages() -> Finding:
    names = ("torch", "numpy", "pyarrow", "tokenizers", "safetensors", "rich", "sentencex")
    absent = [name for name in names if not is_installed(name)]
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names if name not in absent)
    if absent:
        return Finding("packages", found, "missing", f"install {', '.join(absent)}: pip install bertrain")
    return Finding("packages", found, "ok", "everything a run needs; torch 2.11 to 2.13, newer ones once tested")


def _extras() -> Finding:
    absent = {extra: user for module, (extra, user) in EXTRAS.items() if not is_installed(module)}
    found = ", ".join(sorted({extra for extra, _ in EXTRAS.values()} - absent.keys())) or "none"
    advice = f"pip install 'bertrain[{','.join(absent)}]' adds {', '.join(absent.values())}"
    return Finding("extras", found, "note" if absent else "ok", advice if absent else "all are installed")


def _cores() -> Finding:
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    limit = _cgroup_cores()
    found = f"{usable} of {all_cores} cores usable" + (f", {limit:g} by cgroup quota" if limit else "")
    threads = counted(usable, "thread")
    return Finding("cores", found, "ok", f"one rank uses {threads}; change with --train.threads or --nproc")


def _cgroup_cores() -> float | None:
    quota, _, period = read_or_empty(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def _vector_units() -> Finding:
    flags, model = cpu_flags(), cpu_name()
    if not flags:
        return Finding("cpu", model, "note", "/proc/cpuinfo does not list its instructions")
    names = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "sve2", "bf16")
    units = [name for name in names if name in flags]
    found = f"{model}: {' '.join(units) or 'no vector units'}"
    if "amx_bf16" in flags:
        return Finding("cpu", found, "ok", "bf16 and bf32 run on AMX: --train.precision auto takes bf16")
    if "avx512f" in flags:
        return Finding("cpu", found, "ok", "fp32 products use AVX-512; bf16 gains little, bf32 needs AMX")
    if "asimd" in flags or "sve" in flags:
        advice = "training uses plain PyTorch, in fp32 unless set otherwise: the kernels for CPUs need AMX"
        return Finding("cpu", found, "note", advice)
    return Finding("cpu", found, "note", "training on this CPU is slow")


def _memory() -> Finding:
    total, free = total_memory(), free_memory()
    if total is None or free is None:
        return Finding("memory", "unknown", "note", "no /proc/meminfo to read it from")
    fits = "BERT-Large (16 bytes a parameter, and activations)"
    if free < 12 * GIB:
        fits = "BERT-Base" if free > 4 * GIB else "BERT-Tiny"
    verdict = "ok" if free > 2 * GIB else "note"
    found = f"{free / GIB:.1f} GiB free here, of {total / GIB:.1f} of the machine"
    return Finding("memory", found, verdict, f"enough to train {fits}")


def _disk(folder: Path) -> Finding:
    existing = existing_parent(folder.resolve())
    free = shutil.disk_usage(existing).free / GIB
    enough = f"a BERT-Large checkpoint takes 4 GiB, and checkpoint.keep is 3: {int(free // 12)} such runs fit"
    return Finding("disk", f"{free:.1f} GiB free at {existing}", "ok" if free > 12 else "note", enough)


def _gpus() -> list[Finding]:
    try:
        import torch
    except ImportError:
        return [Finding("gpu", "unknown", "missing", "torch finds the GPUs, and is not installed")]
    if not torch.cuda.is_available():
        row = hardware.of_cpu(cpu_flags())
        return [
            Finding("gpu", "none that torch sees", "note", f"training runs on the CPU; {row.family}: {row.engines}")
        ]
    findings = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        capability = f"compute capability {facts.major}.{facts.minor}"
        found = f"{facts.name}, {facts.total_memory / GIB:.0f} GiB, {capability}"
        row = hardware.of_gpu((facts.major, facts.minor), is_amd=bool(torch.version.hip))
        verdict = "note" if row.kernels == "none" else "ok"
        findings.append(Finding(f"gpu {number}", found, verdict, f"{row.family}: {row.engines}"))
    return findings


def _compiler() -> Finding:
    found = [name for name in ("cc", "gcc", "clang", "c++", "g++") if shutil.which(name)]
    if found:
        return Finding("compilers", " ".join(found), "ok", "kernels for GPUs and for CPUs with AMX can be built")
    return Finding("compilers", "none", "note", "kernels for GPUs and for CPUs with AMX need one: install gcc")


def _triton() -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        advice = "only the fused GPU kernels need it; torch's CUDA build brings it"
        return Finding("triton", "not installed", "note", advice)
    return Finding("triton", version, "ok", "the fused GPU kernels can be built")
