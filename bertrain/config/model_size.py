"""Count a model's parameters by arithmetic, without building it or importing torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from bertrain.config.settings import ModelSettings


def count_parameters(model: ModelSettings) -> tuple[int, int]:
    """Parameters of the whole model, and of the weight matrices of its encoder layers."""
    return (_count_bert if model.family == "bert" else _count_modern)(model)


def _count_bert(model: ModelSettings) -> tuple[int, int]:
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    embeddings = (vocab + model.max_positions + model.num_segments + 2) * width
    matrices = model.num_layers * (4 * width * width + 2 * width * inner)
    other = model.num_layers * (9 * width + inner)
    match model.head:
        case "pretrain":
            heads = width * width + 3 * width + vocab + (width * width + 3 * width + 2 if model.nsp else 0)
            heads += width * width + 2 * width + 1 if model.rtd else 0
        case "span":
            heads = 2 * width + 2
        case "tag":
            heads = model.num_labels * (width + 1)
        case "embed":
            heads = 0
        case _:
            labels = model.num_labels if model.head in ("classify", "multilabel") else 1
            heads = width * width + width + labels * (width + 1)
    return embeddings + matrices + other + heads, matrices


def _count_modern(model: ModelSettings) -> tuple[int, int]:
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    matrices = model.num_layers * (4 * width * width + 3 * width * inner)
    norms = (2 * model.num_layers + 1) * width  # two a layer, but one in the first; of the embeddings; the last
    match model.head:
        case "pretrain":
            heads = width * width + width + vocab
        case "embed":
            heads = 0
        case _:
            outputs = {"regress": 1, "span": 2}.get(model.head, model.num_labels)
            heads = width * width + width + outputs * (width + 1)
    return vocab * width + matrices + norms + heads, matrices


def attended_pairs(model: ModelSettings, tokens: Any, pairs: Any) -> Any:
    """Pairs of tokens that attend to each other, over all layers, for numbers or arrays of them.

    `pairs`: of tokens in the same sequence, all of which attend to each other in a layer without a window.
    """
    everywhere = model.windows.count(None)
    if everywhere == model.num_layers:
        return everywhere * pairs
    nearby = tokens * (2 * (model.local_window // 2) + 1)
    return everywhere * pairs + (model.num_layers - everywhere) * np.minimum(pairs, nearby)


def multiply_adds(model: ModelSettings, tokens: Any, pairs: Any, predictions: Any) -> Any:
    """Multiply-adds of the matrix products of a forward pass, for numbers or arrays; a backward pass has twice as many.

    Per token: the matrices of the layers; per pair of tokens: two products of attention; per prediction: the transform
    and the vocabulary. The rest (next sentence, LayerNorm) is negligible. `pairs` as in `attended_pairs`.
    """
    width = model.hidden_size
    layers = count_parameters(model)[1] * tokens + 2 * width * attended_pairs(model, tokens, pairs)
    outputs = width + model.padded_vocab_size if model.head == "pretrain" else model.num_labels
    return layers + predictions * width * outputs


def training_flops(model: ModelSettings, tokens: float, predictions: float, pairs: float) -> float:
    """Floating-point operations of forward and backward pass."""
    return 6 * float(multiply_adds(model, tokens, pairs, predictions))
