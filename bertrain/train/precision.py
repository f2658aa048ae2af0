"""Which numbers are computed in which format, and what determinism asks of the library."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch

from bertrain.config import TrainSettings


def autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[None]:
    """The context of a forward pass: bf16 products on request, weights and sums in fp32 always."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")


def make_deterministic(settings: TrainSettings) -> None:
    """Under train.deterministic, refuse every algorithm whose sums depend on timing."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    # Filling fresh memory is a debugging aid of that switch; every row here is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
