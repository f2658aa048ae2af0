"""The fused model of each `model.family`: the one place that chooses it, as families.py chooses the plain one."""

from __future__ import annotations

from typing import Any

from bertrain.model.arena import Arena
from bertrain.model.encoder import EncoderModel
from bertrain.model.fused import FusedModel
from bertrain.model.fused_bert import FusedBert
from bertrain.model.fused_modern import FusedModern

FUSED: dict[str, type[FusedModel]] = {"bert": FusedBert, "modern": FusedModern}


def new_fused(model: EncoderModel, arena: Arena, **options: Any) -> FusedModel:
    """The model on the kernels, on the weights in `arena`; for the options see `FusedModel`."""
    return FUSED[model.settings.family](model, arena, **options)
