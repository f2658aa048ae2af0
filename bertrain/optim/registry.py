"""The optimizers by the names of `optimizer.name`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bertrain.config.settings import OptimizerSettings
from bertrain.model.arena import Arena
from bertrain.optim.muon import Muon
from bertrain.optim.optimizer import Optimizer
from bertrain.optim.rules import AcClip, AdamW, Lamb, Madgrad, StableAdamW

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "lamb": Lamb, "adamw": AdamW, "stableadamw": StableAdamW, "muon": Muon, "madgrad": Madgrad, "acclip": AcClip,
}  # fmt: skip


def build_optimizer(
    arena: Arena,
    settings: OptimizerSettings,
    *,
    span: range | None = None,
    sum_over_ranks: Callable[[Tensor], None] = lambda tensor: None,
) -> Optimizer:
    """Build the optimizer that `settings` name, over the whole arena or a range of it."""
    return OPTIMIZERS[settings.name](arena, settings, span=span, sum_over_ranks=sum_over_ranks)
