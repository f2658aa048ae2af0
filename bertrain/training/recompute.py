"""Activation checkpointing of the plain engine: the backward pass recomputes tensors instead of saving them.

A layer runs again with the random generator's state of its first run, so dropout and the gradient are the same to the
last bit. The fused path has its own activation checkpointing (`model/fused_layer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bertrain.model.encoder import EncoderModel

DENSE_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def recompute_layers(model: EncoderModel, what: Literal["none", "selective", "full"]) -> None:
    """Make each encoder layer save only its input (`full`), or its input and its dense products (`selective`)."""
    if what != "none":
        for layer in model.layers:
            layer.forward = partial(_checkpointed, layer.forward, what == "selective")


def _checkpointed(forward: Callable[..., Any], saves_products: bool, *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    options: dict[str, Any] = {"use_reentrant": False}
    if saves_products:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(forward, *inputs, **options)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Save products with weights; recompute GELU, dropout, LayerNorm and attention, which are cheap."""
    return CheckpointPolicy.MUST_SAVE if operation in DENSE_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
