"""Activation checkpointing of the plain path: what the backward pass computes again instead of keeping it.

Applied to a model from outside; `model/bert.py` knows nothing of it. Dropout is replayed, since a layer runs again
with the generator's state of its first run, so the gradient is the same to the last bit. The fused path has its own
(`model/fused.py`), in which dropout is a function of its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bertrain.model.bert import Bert

DENSE_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def recompute_layers(model: Bert, what: Literal["none", "selective", "full"]) -> None:
    """Have each encoder layer keep its input alone (`full`), or that and its dense products (`selective`)."""
    for layer in model.layers:
        if what != "none":
            layer.forward = partial(_run_again, layer.forward, what == "selective")


def _run_again(forward: Callable[..., Any], keeps_products: bool, *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    if keeps_products:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)
    return checkpoint(forward, *inputs, use_reentrant=False)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Products with weights are kept; GELU, dropout, LayerNorm and attention within sequences are cheap."""
    return CheckpointPolicy.MUST_SAVE if operation in DENSE_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
