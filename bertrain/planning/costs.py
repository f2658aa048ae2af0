"""Operations and bytes of each part of a training step, by arithmetic.

Operations are those of matrix products; bytes count one access for each tensor that a part reads or writes. `profiling`
compares them with measured times, `planning` predicts times from them.

Letters as in bert.py: T tokens of a step, P predictions, S sequences, E hidden size, F intermediate size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bertrain.config.model_size import attended_pairs, count_parameters
from bertrain.config.settings import Settings
from bertrain.optim import muon
from bertrain.optim.registry import OPTIMIZERS

QKV, ATTENTION, ATTENTION_OUT = "query, key, value", "attention", "attention output"
FEED_FORWARD, GELU, NORM = "feed-forward", "GELU", "dropout, residual, LayerNorm"
EMBEDDINGS, HEADS, OPTIMIZER = "embeddings", "heads", "clipping and optimizer"
Cost = npt.NDArray[np.float64]  # operations of matrix products, and bytes read from and written to memory
Widths = tuple[int, int]  # bytes per element of a product's operands, and of an activation
NARROW: dict[str, Widths] = {"bf16": (2, 2), "fp16": (2, 2), "fp8": (1, 2)}


@dataclass(frozen=True)
class WorkSize:
    """The size of the work of one device, padding included."""

    tokens: float = 0
    pairs: float = 0  # the sum of the squared sequence lengths
    predictions: float = 0
    sequences: float = 0


def linear(rows: float, inputs: int, outputs: int, widths: Widths) -> Cost:
    """A linear layer: forward, and the gradients of its input and its weight."""
    x, y, weight = rows * inputs, rows * outputs, inputs * outputs
    operand, activation = widths
    read, written = 2 * operand * (x + y + weight), activation * (x + y) + 4 * weight  # fp32 gradient
    return np.array([6.0 * rows * weight, read + written])


def elementwise(elements: float, tensors: int, widths: Widths) -> Cost:
    """An operation that only reads and writes `tensors` tensors of `elements` elements each."""
    return np.array([0.0, elements * tensors * widths[1]])


def required_costs(settings: Settings, size: WorkSize, *, is_fused: bool) -> dict[str, Cost]:
    """The cost of each part of a step. The fused path computes the last layer only for the rows that the heads read."""
    model, widths = settings.model, NARROW.get(settings.train.precision, (4, 4))
    width, inner, vocabulary = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    tokens = size.tokens
    rows = [tokens] * model.num_layers
    if is_fused and not model.rtd:
        rows[-1] = size.predictions + (size.sequences if model.nsp else 0)
    all_rows = sum(rows)

    def over_layers(inputs: int, outputs: int) -> Cost:
        return np.sum([linear(count, inputs, outputs, widths) for count in rows], axis=0)

    wide = widths[1], widths[1]  # the heads stay in 16 bits when the rest is in FP8
    heads = linear(size.predictions, width, width, wide) + linear(size.predictions, width, vocabulary, wide)
    heads += elementwise(size.predictions * vocabulary, 2, wide) + elementwise(size.predictions * width, 10, wide)
    if model.nsp:
        heads += linear(size.sequences, width, width, wide)
    if model.rtd:
        heads += linear(tokens, width, width, wide) + elementwise(tokens * width, 8, wide)
    attention = np.array([12.0 * attended_pairs(model, tokens, size.pairs) * width, 0.0])
    gated = inner if model.family == "bert" else 2 * inner  # outputs of the first feed-forward product
    parameters, _ = count_parameters(model)
    buffers = len(OPTIMIZERS[settings.optimizer.name].BUFFERS)
    update = 4 + 4 + 8 + 8 * buffers + (2 if is_fused else 0)  # norm; gradient; values and buffers, both ways; copy
    products = muon.operations(model.num_layers, width, inner, gated) if settings.optimizer.name == "muon" else 0.0
    return {
        # Read and write a row; read two gradients and the row, write one.
        EMBEDDINGS: elementwise(tokens * width, 6, widths),
        QKV: linear(tokens, width, 3 * width, widths) * model.num_layers,
        # q, k, v and the output; then these with the output's gradient, and the gradients of q, k and v.
        ATTENTION: attention + elementwise(tokens * width, 12, widths) * model.num_layers,
        ATTENTION_OUT: over_layers(width, width),
        FEED_FORWARD: over_layers(width, gated) + over_layers(inner, width),
        NORM: elementwise(all_rows * width, 2 * 9, widths),  # 2 in, 1 out; 4 in, 2 out; twice
        # Its input and output; these with the output's gradient, and the input's. A gate is input and gradient too.
        GELU: elementwise(all_rows * inner, 5 if gated == inner else 8, widths),
        HEADS: heads,
        OPTIMIZER: np.array([products, parameters * update]),
    }
