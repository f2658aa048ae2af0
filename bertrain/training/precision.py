"""Number formats, and PyTorch's switches for them and for determinism.

    format   tensors   products of            device
    fp32     32 bits   32 bits                everywhere
    tf32     32 bits   10-bit mantissas       GPUs from compute capability 8.0 on
    bf32     32 bits   bf16                   CPUs with AMX; products narrower than 32 stay in fp32
    bf16     16 bits   bf16                   GPUs from capability 8.0 on; CPUs, fast with AVX-512 or AMX for BF16
    fp16     16 bits   fp16, loss scaled      GPUs; CPUs with AVX-512 or AMX for FP16
    fp8      8 bits    see kernels/fp8.py     GPUs from compute capability 8.9 on

Weights, moments, gradients of weights and sums have 32 bits in all of them.
"""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager
from typing import Literal

import torch

from bertrain.base import isa
from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.config.settings import TrainSettings

SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def choose_precision(settings: TrainSettings, device: torch.device) -> tuple[Literal["fp32", "bf16"], str]:
    """The format that `train.precision auto` stands for on this machine, and the reason."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return "bf16", "the GPU multiplies bf16"
        return "fp32", "the GPU has no bf16"
    if isa.usable(settings.isa) != "amx":
        return "fp32", "the CPU has no AMX" if settings.isa == "auto" else f"train.isa {settings.isa} leaves out AMX"
    return "bf16", "the CPU multiplies bf16 on AMX"


def check_precision(settings: TrainSettings, device: torch.device) -> None:
    """Refuse a format, or instructions, that this device does not have."""
    if device.type == "cpu":
        isa.cap_isa(settings.isa)
    elif settings.isa != "auto":
        unfit = f"train.isa {settings.isa} selects CPU instructions, but this run uses a GPU"
        raise UserError("isa-on-gpu", f"{unfit}; use --train.isa auto")
    reason, instead = _why_impossible(settings, device)
    if reason:
        why = f"train.precision {settings.precision} is not possible here ({reason})"
        raise UserError("precision-not-possible", f"{why}; use --train.precision {instead}")


def warn_of_emulation(settings: TrainSettings, device: torch.device) -> None:
    """Warn of bf16 on a CPU that has no instructions for it; fp16 is refused there."""
    if device.type == "cpu" and (reason := isa.emulation(settings.precision, settings.isa)):
        slow = f"train.precision {settings.precision} is many times slower than fp32 here"
        warn(f"{slow}: {reason}; use --train.precision fp32")


def _why_impossible(settings: TrainSettings, device: torch.device) -> tuple[str, str]:
    """Why the format is not possible, and which one to use instead; empty if it is."""
    precision = settings.precision
    if device.type == "cpu":
        if precision == "tf32":
            return "CPUs have no TF32", "bf32"
        newest = isa.usable(settings.isa)
        if precision == "bf32" and newest != "amx":  # without it oneDNN takes the permission and multiplies fp32
            found = newest or "no such instructions"
            return f"bf16 products of fp32 tensors need AMX, and this run has {found}", "fp32"
        # Emulated, it takes 15 to 60 times as long as fp32.
        reason = isa.emulation(precision, settings.isa) if precision == "fp16" else ""
        return reason, "fp32"
    name = torch.cuda.get_device_name(device)
    if precision == "bf32":
        return "bf32 is for CPUs", "tf32"
    if precision in ("tf32", "bf16") and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{name} has no {precision}", "fp16"
    return "", ""


def set_precision(settings: TrainSettings) -> None:
    """Set how products of fp32 tensors are computed, for the whole process, forward and backward."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if settings.precision == "bf32" else "ieee"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "tf32" if settings.precision == "tf32" else "ieee"
    if _onednn_lacks_bf16():
        torch.backends.mkldnn.enabled = settings.precision != "bf16"  # type: ignore[assignment]


def _onednn_lacks_bf16() -> bool:
    """Whether this is an ARM CPU without bf16. There, PyTorch catches an exception, warns with a C++ stack, and leaves
    oneDNN off for the rest of the process, so that the next run computes other bits."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    return is_arm and torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[None]:
    """The context of a plain forward pass: products in 16 bits if selected; weights and sums stay fp32."""
    narrow = SIXTEEN_BITS.get(settings.precision)
    return torch.autocast(device.type, narrow or torch.bfloat16, enabled=narrow is not None)


def make_deterministic(settings: TrainSettings) -> None:
    """With train.deterministic, refuse every algorithm whose sums depend on timing."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As torch.use_deterministic_algorithms, which also imports torch's compiler to set a flag there, for seconds.
    torch.set_deterministic_debug_mode("error" if settings.deterministic else "default")
    # That switch also fills new memory, as a debugging aid; here, every row is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
