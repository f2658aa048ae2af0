"""The ONNX graph of `model/modern.py`.

Positions are a table, so that a longer input than the model's fails, as BERT's does. Angles are computed in float32 in
every precision: 16 bits cannot tell apart the positions of a long text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from bertrain.weights.onnx_graph import MASK_BIAS, Graph

WORDS = "model.embeddings.tok_embeddings.weight"


class Reach(NamedTuple):
    """What layers with the same window share."""

    bias: str  # added to attention scores: [batch, 1, 1, sequence], with a window [batch, 1, sequence, sequence]
    cosine: str  # of each element's angle, [sequence, 1, head size]
    sine: str  # the same; negative in the first half of a head


def encode(graph: Graph) -> str:
    """Add the encoder; returns the output of its last norm, [batch, sequence, hidden]."""
    windows = graph.settings.windows
    table = graph.constant("positions", np.arange(graph.settings.max_positions))
    positions = graph.first_rows(table, "positions")
    padding = graph.mask_bias()
    reaches = {window: _reach(graph, positions, padding, window) for window in dict.fromkeys(windows)}
    words = graph.add("Gather", graph.weight(WORDS), "input_ids", scope="model.embeddings")
    x = graph.norm(words, "model.embeddings.norm")
    for number, window in enumerate(windows):
        x = _add_layer(graph, x, reaches[window], number)
    return graph.norm(x, "model.final_norm")


def _reach(graph: Graph, positions: str, padding: str, window: int | None) -> Reach:
    settings, scope = graph.settings, "global" if window is None else "local"
    theta = settings.global_theta if window is None else settings.local_theta
    exponents = torch.arange(0, settings.head_size, 2, dtype=torch.float32) / settings.head_size
    frequencies = graph.constant(f"{scope} frequencies", (theta**-exponents).tile(2).numpy())
    column = graph.cast(graph.add("Unsqueeze", positions, graph.integers(1, 2), scope=scope), scope, "float32")
    angles = graph.add("Mul", column, frequencies, scope=scope)
    cosine = graph.cast(graph.add("Cos", angles, scope=scope), scope)
    signs = graph.constant("signs", np.repeat(np.array([-1, 1], np.float32), len(exponents)))
    sine = graph.cast(graph.add("Mul", graph.add("Sin", angles, scope=scope), signs, scope=scope), scope)
    if window is None:
        return Reach(padding, cosine, sine)
    rows = graph.add("Unsqueeze", positions, graph.integers(1), scope=scope)
    distances = graph.add("Abs", graph.add("Sub", rows, positions, scope=scope), scope=scope)
    is_far = graph.cast(graph.add("Greater", distances, graph.integers(window), scope=scope), scope)
    far = graph.add("Mul", is_far, graph.number(MASK_BIAS), scope=scope)
    return Reach(graph.add("Add", padding, far, scope=scope), cosine, sine)


def _add_layer(graph: Graph, x: str, reach: Reach, number: int) -> str:
    layer = f"model.layers.{number}"
    normed = graph.norm(x, f"{layer}.attn_norm") if number else x  # the embeddings end with one
    attended = graph.dense(_attend(graph, normed, reach, f"{layer}.attn"), f"{layer}.attn.Wo")
    x = graph.add("Add", x, attended, scope=f"{layer}.attn")
    scope = f"{layer}.mlp"
    expanded, gate = graph.add(
        "Split", graph.dense(graph.norm(x, f"{layer}.mlp_norm"), f"{scope}.Wi"), scope=scope, count=2, axis=-1
    )
    gated = graph.add("Mul", graph.gelu(expanded, f"{scope}.gelu"), gate, scope=scope)
    return graph.add("Add", x, graph.dense(gated, f"{scope}.Wo"), scope=scope)


def _attend(graph: Graph, x: str, reach: Reach, scope: str) -> str:
    heads, head_size = graph.settings.num_heads, graph.settings.head_size
    shape = graph.integers(0, 0, 3 * heads, head_size)  # 0: as in the input
    qkv = graph.add("Reshape", graph.dense(x, f"{scope}.Wqkv"), shape, scope=scope)
    both, value = graph.add("Split", qkv, graph.integers(2 * heads, heads), scope=f"{scope}.qkv", count=2, axis=2)
    left, right = graph.add("Split", both, scope=f"{scope}.rotary", count=2, axis=-1)
    swapped = graph.add("Concat", right, left, scope=f"{scope}.rotary", axis=-1)
    rotated = graph.add(
        "Add",
        graph.add("Mul", both, reach.cosine, scope=f"{scope}.rotary"),
        graph.add("Mul", swapped, reach.sine, scope=f"{scope}.rotary"),
        scope=f"{scope}.rotary",
    )
    query, key = graph.add("Split", rotated, scope=f"{scope}.rotated", count=2, axis=2)
    query = graph.add("Transpose", query, scope=f"{scope}.query", perm=(0, 2, 1, 3))
    key = graph.add("Transpose", key, scope=f"{scope}.key", perm=(0, 2, 3, 1))
    value = graph.add("Transpose", value, scope=f"{scope}.value", perm=(0, 2, 1, 3))
    return graph.attend(query, key, value, reach.bias, scope)


def each_token(graph: Graph, x: str) -> str:
    """What a head for tokens reads: the transform of each."""
    return graph.norm(graph.gelu(graph.dense(x, "head.dense"), "head"), "head.norm")


def whole_text(graph: Graph, hidden: str) -> str:
    """What a head for texts reads."""
    return each_token(graph, graph.cast(graph.pool(hidden), "pooling"))


def add_pretraining_heads(graph: Graph, hidden: str) -> None:
    """The head of masked words; without it in the weights, the output of Transformers' ModernBertModel."""
    if "decoder.bias" in graph.tensors:
        graph.decode(each_token(graph, hidden), WORDS, "decoder.bias")
    else:
        graph.output("last_hidden_state", hidden, "batch", "sequence", graph.settings.hidden_size)
