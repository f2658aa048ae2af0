"""Which numbers are computed in which format, and what determinism asks of the library."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch

from bertrain.settings import TrainSettings


def choose_precision(device: torch.device) -> tuple[Literal["fp32", "bf16"], str]:
    """What `train.precision auto` means on this machine, and why."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return "bf16", "the GPU multiplies bf16"
        return "fp32", "the GPU has no bf16"
    if "amx_bf16" in cpu_flags():
        return "bf16", "the CPU multiplies bf16 on AMX"
    return "fp32", "the CPU has no AMX"


def cpu_flags() -> set[str]:
    """The instruction sets that Linux reports; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[None]:
    """The context of a plain forward pass: bf16 products unless fp32 was asked for; weights and sums in fp32 always."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision != "fp32")


def make_deterministic(settings: TrainSettings) -> None:
    """Under train.deterministic, refuse every algorithm whose sums depend on timing."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    # Filling fresh memory is a debugging aid of that switch; every row here is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
