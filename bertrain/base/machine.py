"""Facts about this machine and this process: memory, processor, GPUs, rank. Nothing here imports torch."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ARM_CORES = {  # by implementer and part: on ARM, Linux gives no name
    "0x41 0xd07": "Cortex-A57", "0x41 0xd08": "Cortex-A72", "0x41 0xd0c": "Neoverse N1", "0x41 0xd40": "Neoverse V1",
    "0x41 0xd49": "Neoverse N2", "0x41 0xd4f": "Neoverse V2", "0x41 0xd83": "Neoverse V3AE",
    "0x41 0xd84": "Neoverse V3", "0x41 0xd8e": "Neoverse N3", "0x46 0x001": "A64FX", "0xc0 0xac3": "Ampere-1",
    "0xc0 0xac4": "Ampere-1a",
}  # fmt: skip


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def under_launcher() -> bool:
    """Whether torchrun, or a launcher like it, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def total_memory() -> int | None:
    """Bytes of memory; None where Linux does not report it."""
    return _meminfo("MemTotal")


def free_memory() -> int | None:
    """Bytes that this process can use without swapping, on the machine and in its cgroup; None if both are unknown."""
    found = (_meminfo("MemAvailable"), cgroup_memory(Path("/sys/fs/cgroup")))
    return min((size for size in found if size is not None), default=None)


def cgroup_memory(root: Path, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes left in the tightest cgroup of this process, such as its container; None without a limit."""
    lines = read_or_empty(own).splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = root / path.lstrip("/")
    left = [_memory_in(place) for place in (folder, *folder.parents) if place.is_relative_to(root)]
    return min((size for size in left if size is not None), default=None)


def _memory_in(cgroup: Path) -> int | None:
    try:
        limit, used = (cgroup / "memory.max").read_text(), int((cgroup / "memory.current").read_text())
        if limit.strip() == "max":
            return None
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(statistics["inactive_file"]))  # file pages can be reclaimed
    except (OSError, ValueError, KeyError):
        return None


def _meminfo(field: str) -> int | None:
    lines = read_or_empty(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


def cpu_flags() -> set[str]:
    """The instruction sets that Linux reports, on x86 and on ARM; empty elsewhere."""
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())


def cpu_name() -> str:
    """The processor's name, or its architecture where it has none."""
    core = f"{_cpuinfo('CPU implementer')} {_cpuinfo('CPU part')}"
    return _cpuinfo("model name") or ARM_CORES.get(core) or platform.processor() or platform.machine() or "cpu"


def _cpuinfo(field: str) -> str:
    """A field of the first core; empty where Linux does not report it."""
    lines = read_or_empty(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


SMI_FIELDS = ("index", "name", "temperature.gpu", "ecc.errors.uncorrected.volatile.total")


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as its driver reports it, in the order of SMI_FIELDS; a number that it does not report is 0."""

    number: int
    name: str
    temperature: int = 0
    errors: int = 0  # uncorrected memory errors since the driver was loaded


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs of this machine."""
    return parse_gpus(_nvidia_smi("query-gpu", *SMI_FIELDS))


def gpu_processes() -> dict[int, str]:
    """The processes on the NVIDIA GPUs of this machine, in words, by number."""
    return parse_gpu_processes(_nvidia_smi("query-compute-apps", "pid", "process_name", "used_memory"))


def _nvidia_smi(query: str, *fields: str) -> str:
    """nvidia-smi's answer to a query, as CSV without header and units; nothing where it is not installed."""
    words = ["nvidia-smi", f"--{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's answer to a query of SMI_FIELDS; other lines are left out."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(SMI_FIELDS) and row[0].isdigit():
            number, name, *values = row
            found.append(Gpu(int(number), name, *(int(value) if value.isdigit() else 0 for value in values)))
    return tuple(found)


def parse_gpu_processes(text: str) -> dict[int, str]:
    """The processes in nvidia-smi's answer to a query of pid, process_name and used_memory."""
    names: dict[int, str] = {}
    megabytes: Counter[int] = Counter()
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 3 and row[0].isdigit():  # a process has a row for each of its GPUs
            names[int(row[0])] = row[1]
            megabytes[int(row[0])] += int(row[2]) if row[2].isdigit() else 0
    return {number: f"{name} ({number}, {megabytes[number]} MB)" for number, name in names.items()}
