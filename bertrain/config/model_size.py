"""Count a model's parameters by arithmetic, without building it or importing torch."""

from __future__ import annotations

from bertrain.config.settings import ModelSettings


def count_parameters(model: ModelSettings) -> tuple[int, int]:
    """Parameters of the whole model, and of the weight matrices of its encoder layers."""
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    embeddings = (vocab + model.max_positions + model.num_segments + 2) * width
    matrices = model.num_layers * (4 * width * width + 2 * width * inner)
    other = model.num_layers * (9 * width + inner)
    match model.head:
        case "pretrain":
            heads = width * width + 3 * width + vocab + (width * width + 3 * width + 2 if model.nsp else 0)
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


def training_flops(model: ModelSettings, tokens: float, predictions: float, pairs: float) -> float:
    """Floating-point operations of forward and backward pass; `pairs`: of tokens that attend to each other."""
    layers = count_parameters(model)[1] * tokens
    attention = 2 * model.num_layers * model.hidden_size * pairs  # scores and weighted sum
    outputs = model.padded_vocab_size + model.hidden_size if model.head == "pretrain" else model.num_labels
    head = model.hidden_size * outputs * predictions
    return 6 * (layers + attention + head)
