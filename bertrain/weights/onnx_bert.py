"""The ONNX graph of `model/bert.py`.

Query, key and value stay three products: onnxruntime's optimizer recognizes and fuses this pattern.
"""

from __future__ import annotations

import numpy as np

from bertrain.weights.onnx_graph import Graph


def encode(graph: Graph) -> str:
    """Add the encoder; returns the last layer's output, [batch, sequence, hidden]."""
    hidden = _embed(graph)
    bias = graph.mask_bias()
    for number in range(graph.settings.num_layers):
        hidden = _add_layer(graph, hidden, bias, f"bert.encoder.layer.{number}")
    return hidden


def _embed(graph: Graph) -> str:
    scope = "bert.embeddings"
    words = graph.add("Gather", graph.weight(f"{scope}.word_embeddings.weight"), "input_ids", scope=scope)
    table = graph.weight(f"{scope}.token_type_embeddings.weight")
    segment = graph.integers(0) if graph.settings.num_segments == 1 else "token_type_ids"
    segments = graph.add("Gather", table, segment, scope=scope)
    positions = graph.first_rows(graph.weight(f"{scope}.position_embeddings.weight"), scope)
    total = graph.add("Add", graph.add("Add", words, segments, scope=scope), positions, scope=scope)
    return graph.norm(total, f"{scope}.LayerNorm")


def _add_layer(graph: Graph, x: str, bias: str, layer: str) -> str:
    attended = graph.dense(_attend(graph, x, bias, f"{layer}.attention.self"), f"{layer}.attention.output.dense")
    scope = f"{layer}.attention.output"
    x = graph.norm(graph.add("Add", attended, x, scope=scope), f"{scope}.LayerNorm")
    expanded = graph.gelu(graph.dense(x, f"{layer}.intermediate.dense"), f"{layer}.intermediate")
    contracted = graph.dense(expanded, f"{layer}.output.dense")
    return graph.norm(graph.add("Add", contracted, x, scope=f"{layer}.output"), f"{layer}.output.LayerNorm")


def _attend(graph: Graph, x: str, bias: str, scope: str) -> str:
    heads, head_size = graph.settings.num_heads, graph.settings.head_size

    def split_heads(name: str, order: tuple[int, ...]) -> str:
        shape = graph.integers(0, 0, heads, head_size)  # 0: as in the input
        split = graph.add("Reshape", graph.dense(x, f"{scope}.{name}"), shape, scope=f"{scope}.{name}")
        return graph.add("Transpose", split, scope=f"{scope}.{name}", perm=order)

    query, value = split_heads("query", (0, 2, 1, 3)), split_heads("value", (0, 2, 1, 3))
    return graph.attend(query, split_heads("key", (0, 2, 3, 1)), value, bias, scope)


def each_token(graph: Graph, hidden: str) -> str:
    """What a head for tokens reads."""
    return hidden


def whole_text(graph: Graph, hidden: str) -> str:
    """What a head for texts reads: the pooler's output."""
    scope = "bert.pooler"
    index = graph.constant("first", np.array(0, dtype=np.int64))  # a number, so that Gather drops the axis
    first = graph.add("Gather", hidden, index, scope=scope, axis=1)
    return graph.add("Tanh", graph.dense(first, f"{scope}.dense"), scope=scope)


def add_pretraining_heads(graph: Graph, hidden: str) -> None:
    """The heads that the weights have; without the one for masked words, the outputs of Transformers' BertModel."""
    scope = "cls.predictions"
    has_pooler = "bert.pooler.dense.weight" in graph.tensors
    if f"{scope}.bias" not in graph.tensors:
        width = graph.settings.hidden_size
        graph.output("last_hidden_state", hidden, "batch", "sequence", width)
        if has_pooler:
            graph.output("pooler_output", whole_text(graph, hidden), "batch", width)
        return
    transformed = graph.gelu(graph.dense(hidden, f"{scope}.transform.dense"), f"{scope}.transform")
    transformed = graph.norm(transformed, f"{scope}.transform.LayerNorm")
    graph.decode(transformed, "bert.embeddings.word_embeddings.weight", f"{scope}.bias")
    if has_pooler and "cls.seq_relationship.weight" in graph.tensors:
        follows = graph.dense(whole_text(graph, hidden), "cls.seq_relationship")
        graph.output("seq_relationship_logits", follows, "batch", 2)
