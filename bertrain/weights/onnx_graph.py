"""BERT as an ONNX graph on padded input, written node by node from tensors under Hugging Face's names.

Exporters trace a model, so their graphs change with the versions of torch and of the exporter. This graph changes only
with this file. It is that of `model/bert.py`, with the names of inputs and outputs that Transformers and Optimum use:

- inputs `input_ids`, `attention_mask` and `token_type_ids`, int64, [batch, sequence]
- outputs by the head; see `HEADS`. They are float32 in every precision

Operators are those of opset 17, the first with LayerNormalization, which every runtime in use has. Query, key and value
stay three products and GELU stays in its parts: onnxruntime's optimizer recognizes and fuses these patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor

from bertrain.base.extras import import_extra
from bertrain.config.settings import ModelSettings

OPSET = 17
IR_VERSION = 8  # that of opset 17; the newest one of the installed onnx would shut out older runtimes
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
MASK_BIAS = -10000.0  # Google's: exp() of it is 0, fp16 can hold it, and a row of padding alone is finite
FloatType = Literal["float32", "float16"]


class Graph:
    """Nodes and tensors of a graph. A method that adds nodes returns the name of their output."""

    def __init__(self, tensors: Mapping[str, Tensor], settings: ModelSettings, float_type: FloatType) -> None:
        self.tensors, self.settings, self._float_type = tensors, settings, float_type
        self._onnx = import_extra("onnx")
        self._nodes: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: dict[str, Any] = {}

    def add(self, operator: str, *inputs: str, scope: str, count: int = 1, **attributes: Any) -> Any:
        """Add a node; returns the name of its output, or of each if `count` is more than one."""
        name = f"{scope}/{operator}"
        used = sum(node.op_type == operator and node.name.startswith(name) for node in self._nodes[-40:])
        name = f"{name}_{used}" if used else name
        outputs = [name if count == 1 else f"{name}:{number}" for number in range(count)]
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, outputs, name=name, **attributes))
        return outputs[0] if count == 1 else outputs

    def constant(self, name: str, values: np.ndarray) -> str:
        """A tensor of the graph; floats in the graph's precision. It is stored once for each name."""
        if name not in self._constants:
            values = values.astype(self._float_type) if values.dtype.kind == "f" else values
            self._constants[name] = self._onnx.numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def weight(self, name: str, *, transposed: bool = False) -> str:
        values = self.tensors[name].numpy()
        return self.constant(name, values.T if transposed else values)

    def number(self, value: float) -> str:
        return self.constant(f"number {value}", np.array(value, dtype=self._float_type))

    def integers(self, *values: int) -> str:
        return self.constant(f"integers {' '.join(map(str, values))}", np.array(values, dtype=np.int64))

    def cast(self, x: str, scope: str) -> str:
        """`x` as floats in the graph's precision."""
        kind = self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self._float_type))
        return self.add("Cast", x, scope=scope, to=kind)

    def dense(self, x: str, layer: str) -> str:
        product = self.add("MatMul", x, self.weight(f"{layer}.weight", transposed=True), scope=layer)
        return self.add("Add", product, self.weight(f"{layer}.bias"), scope=layer)

    def norm(self, x: str, layer: str) -> str:
        """LayerNorm; the mean and the variance are in float32 in every precision, by the operator's default."""
        weight, bias = self.weight(f"{layer}.weight"), self.weight(f"{layer}.bias")
        epsilon = self.settings.layer_norm_eps
        return self.add("LayerNormalization", x, weight, bias, scope=layer, axis=-1, epsilon=epsilon)

    def gelu(self, x: str, scope: str) -> str:
        """The exact GELU, x (1 + erf(x / sqrt(2))) / 2."""
        scaled = self.add("Div", x, self.number(2**0.5), scope=scope)
        shifted = self.add("Add", self.add("Erf", scaled, scope=scope), self.number(1), scope=scope)
        return self.add("Mul", self.add("Mul", x, shifted, scope=scope), self.number(0.5), scope=scope)

    def output(self, name: str, x: str, *shape: str | int) -> None:
        """Make `x` an output of the graph, of float32."""
        onnx = self._onnx
        kind = onnx.TensorProto.FLOAT
        self._nodes.append(onnx.helper.make_node("Cast", [x], [name], name=f"{name}/Cast", to=kind))
        self._outputs.append(onnx.helper.make_tensor_value_info(name, kind, shape))

    def model(self, version: str) -> Any:
        """The whole graph as a ModelProto."""
        helper = self._onnx.helper
        ids = self._onnx.TensorProto.INT64
        inputs = [helper.make_tensor_value_info(name, ids, ["batch", "sequence"]) for name in INPUTS]
        graph = helper.make_graph(self._nodes, "bert", inputs, self._outputs, list(self._constants.values()))
        opset = helper.make_operatorsetid("", OPSET)
        return helper.make_model(
            graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="bertrain", producer_version=version
        )


def build_graph(tensors: Mapping[str, Tensor], settings: ModelSettings, float_type: FloatType, version: str) -> Any:
    """The ModelProto of an encoder with its head, from tensors under Hugging Face's names."""
    graph = Graph(tensors, settings, float_type)
    hidden = _embed(graph)
    bias = _mask_bias(graph)
    for number in range(settings.num_layers):
        hidden = _add_layer(graph, hidden, bias, f"bert.encoder.layer.{number}")
    HEADS[settings.head](graph, hidden)
    return graph.model(version)


def _embed(graph: Graph) -> str:
    scope = "bert.embeddings"
    words = graph.add("Gather", graph.weight(f"{scope}.word_embeddings.weight"), "input_ids", scope=scope)
    segments = graph.add("Gather", graph.weight(f"{scope}.token_type_embeddings.weight"), "token_type_ids", scope=scope)
    # The first rows, as many as the input has columns. A longer input than there are rows fails at the addition.
    columns = graph.add("Shape", "input_ids", scope=scope, start=1, end=2)
    table = graph.weight(f"{scope}.position_embeddings.weight")
    positions = graph.add("Slice", table, graph.integers(0), columns, graph.integers(0), scope=scope)
    total = graph.add("Add", graph.add("Add", words, segments, scope=scope), positions, scope=scope)
    return graph.norm(total, f"{scope}.LayerNorm")


def _mask_bias(graph: Graph) -> str:
    """[batch, 1, 1, sequence]: 0 for a token, MASK_BIAS for padding, to be added to attention scores."""
    scope = "attention_mask"
    rows = graph.add("Unsqueeze", "attention_mask", graph.integers(1), scope=scope)
    mask = graph.cast(graph.add("Unsqueeze", rows, graph.integers(2), scope=scope), scope)
    return graph.add("Mul", graph.add("Sub", graph.number(1), mask, scope=scope), graph.number(MASK_BIAS), scope=scope)


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
    scores = graph.add("MatMul", query, split_heads("key", (0, 2, 3, 1)), scope=scope)
    scores = graph.add("Add", graph.add("Div", scores, graph.number(head_size**0.5), scope=scope), bias, scope=scope)
    mixed = graph.add("MatMul", graph.add("Softmax", scores, scope=scope, axis=-1), value, scope=scope)
    joined = graph.add("Transpose", mixed, scope=scope, perm=(0, 2, 1, 3))
    return graph.add("Reshape", joined, graph.integers(0, 0, graph.settings.hidden_size), scope=scope)


def _pool(graph: Graph, hidden: str) -> str:
    scope = "bert.pooler"
    index = graph.constant("first", np.array(0, dtype=np.int64))  # a number, so that Gather drops the axis
    first = graph.add("Gather", hidden, index, scope=scope, axis=1)
    return graph.add("Tanh", graph.dense(first, f"{scope}.dense"), scope=scope)


def _add_pretraining_heads(graph: Graph, hidden: str) -> None:
    """The heads that the weights have; without the one for masked words, the outputs of Transformers' BertModel."""
    scope = "cls.predictions"
    has_pooler = "bert.pooler.dense.weight" in graph.tensors
    if f"{scope}.bias" not in graph.tensors:
        width = graph.settings.hidden_size
        graph.output("last_hidden_state", hidden, "batch", "sequence", width)
        if has_pooler:
            graph.output("pooler_output", _pool(graph, hidden), "batch", width)
        return
    transformed = graph.gelu(graph.dense(hidden, f"{scope}.transform.dense"), f"{scope}.transform")
    transformed = graph.norm(transformed, f"{scope}.transform.LayerNorm")
    # Transposed by a node, so that the file holds the word embeddings once.
    decoder = graph.add("Transpose", "bert.embeddings.word_embeddings.weight", scope=scope, perm=(1, 0))
    scores = graph.add("MatMul", transformed, decoder, scope=scope)
    scores = graph.add("Add", scores, graph.weight(f"{scope}.bias"), scope=scope)
    graph.output("logits", scores, "batch", "sequence", graph.settings.vocab_size)
    if has_pooler and "cls.seq_relationship.weight" in graph.tensors:
        follows = graph.dense(_pool(graph, hidden), "cls.seq_relationship")
        graph.output("seq_relationship_logits", follows, "batch", 2)


def _add_sequence_classifier(graph: Graph, hidden: str) -> None:
    width = len(graph.tensors["classifier.bias"])
    graph.output("logits", graph.dense(_pool(graph, hidden), "classifier"), "batch", width)


def _add_tag_head(graph: Graph, hidden: str) -> None:
    width = len(graph.tensors["classifier.bias"])
    graph.output("logits", graph.dense(hidden, "classifier"), "batch", "sequence", width)


def _add_span_head(graph: Graph, hidden: str) -> None:
    scope = "qa_outputs"
    ends = graph.add("Split", graph.dense(hidden, scope), scope=scope, count=2, axis=-1)
    for name, scores in zip(("start_logits", "end_logits"), ends, strict=True):
        graph.output(name, graph.add("Squeeze", scores, graph.integers(-1), scope=scope), "batch", "sequence")


HEADS: dict[str, Callable[[Graph, str], None]] = {
    "pretrain": _add_pretraining_heads,
    "classify": _add_sequence_classifier,
    "multilabel": _add_sequence_classifier,
    "regress": _add_sequence_classifier,
    "span": _add_span_head,
    "tag": _add_tag_head,
    "embed": _add_pretraining_heads,  # which the weights lack: the outputs of the encoder, to be pooled
}
"""What adds each `model.head` to the encoder. The outputs' names and shapes are all that the check needs to know."""
