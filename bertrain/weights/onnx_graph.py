"""An ONNX graph on padded input, written node by node from tensors under Hugging Face's names.

Exporters trace a model, so their graphs change with the versions of torch and of the exporter. Ours change only with
these files: this one has what the families share, onnx_bert.py and onnx_modern.py have a graph each. Inputs and outputs
have the names that Transformers and Optimum use:

- inputs `input_ids`, `attention_mask` and, of BERT, `token_type_ids`, int64, [batch, sequence]
- outputs by the head; see `HEADS` of each file. They are float32 in every precision

Operators are those of opset 17, the first with LayerNormalization, which every runtime in use has. GELU stays in its
parts: onnxruntime's optimizer recognizes and fuses this pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor

from bertrain.base.extras import import_extra
from bertrain.config.settings import ModelSettings

OPSET = 17
IR_VERSION = 8  # that of opset 17; the newest one of the installed onnx would shut out older runtimes
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
VECTOR = "sentence_embedding"  # the output with one vector for each text; the name that Optimum uses
MASK_BIAS = -10000.0  # Google's: exp() of it is 0, fp16 can hold it, and a row of padding alone is finite
FloatType = Literal["float32", "float16"]


class Graph:
    """Nodes and tensors of a graph. A method that adds nodes returns the name of their output."""

    def __init__(
        self, tensors: Mapping[str, Tensor], settings: ModelSettings, float_type: FloatType, *, normalizes: bool = True
    ) -> None:
        """`float_type` is that of weights and products; with `normalizes`, the vectors of texts have length 1."""
        self.tensors, self.settings, self._float_type, self._normalizes = tensors, settings, float_type, normalizes
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
        """A tensor of the graph, stored once for each name."""
        if name not in self._constants:
            self._constants[name] = self._onnx.numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def weight(self, name: str, *, transposed: bool = False) -> str:
        values = self.tensors[name].numpy().astype(self._float_type)
        return self.constant(name, values.T if transposed else values)

    def number(self, value: float) -> str:
        return self.constant(f"number {value}", np.array(value, dtype=self._float_type))

    def integers(self, *values: int) -> str:
        return self.constant(f"integers {' '.join(map(str, values))}", np.array(values, dtype=np.int64))

    def cast(self, x: str, scope: str, float_type: FloatType | None = None) -> str:
        """`x` as floats, by default in the graph's precision."""
        kind = self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(float_type or self._float_type))
        return self.add("Cast", x, scope=scope, to=kind)

    def dense(self, x: str, layer: str) -> str:
        """A dense layer, with a bias if the weights have one."""
        product = self.add("MatMul", x, self.weight(f"{layer}.weight", transposed=True), scope=layer)
        bias = f"{layer}.bias"
        return self.add("Add", product, self.weight(bias), scope=layer) if bias in self.tensors else product

    def norm(self, x: str, layer: str) -> str:
        """LayerNorm; the mean and the variance are in float32 in every precision, by the operator's default."""
        names = [name for name in (f"{layer}.weight", f"{layer}.bias") if name in self.tensors]
        parameters, epsilon = [self.weight(name) for name in names], self.settings.layer_norm_eps
        return self.add("LayerNormalization", x, *parameters, scope=layer, axis=-1, epsilon=epsilon)

    def gelu(self, x: str, scope: str) -> str:
        """The exact GELU, x (1 + erf(x / sqrt(2))) / 2."""
        scaled = self.add("Div", x, self.number(2**0.5), scope=scope)
        shifted = self.add("Add", self.add("Erf", scaled, scope=scope), self.number(1), scope=scope)
        return self.add("Mul", self.add("Mul", x, shifted, scope=scope), self.number(0.5), scope=scope)

    def first_rows(self, table: str, scope: str) -> str:
        """The first rows of a table, as many as the input has columns. A longer input fails where they are used."""
        columns = self.add("Shape", "input_ids", scope=scope, start=1, end=2)
        return self.add("Slice", table, self.integers(0), columns, self.integers(0), scope=scope)

    def mask_bias(self) -> str:
        """[batch, 1, 1, sequence]: 0 for a token, MASK_BIAS for padding, to be added to attention scores."""
        scope = "attention_mask"
        rows = self.add("Unsqueeze", "attention_mask", self.integers(1), scope=scope)
        mask = self.cast(self.add("Unsqueeze", rows, self.integers(2), scope=scope), scope)
        padding = self.add("Sub", self.number(1), mask, scope=scope)
        return self.add("Mul", padding, self.number(MASK_BIAS), scope=scope)

    def attend(self, query: str, key: str, value: str, bias: str, scope: str) -> str:
        """Attention of queries to keys [batch, heads, head size, sequence]; returns [batch, sequence, hidden]."""
        scale, width = self.number(self.settings.head_size**0.5), self.settings.hidden_size
        scores = self.add("Div", self.add("MatMul", query, key, scope=scope), scale, scope=scope)
        probabilities = self.add("Softmax", self.add("Add", scores, bias, scope=scope), scope=scope, axis=-1)
        mixed = self.add("MatMul", probabilities, value, scope=scope)
        joined = self.add("Transpose", mixed, scope=scope, perm=(0, 2, 1, 3))
        return self.add("Reshape", joined, self.integers(0, 0, width), scope=scope)

    def decode(self, x: str, words: str, bias: str) -> None:
        """Scores of words, by embeddings that are transposed by a node: so the file holds them once."""
        scope = bias.rpartition(".")[0]
        product = self.add("MatMul", x, self.add("Transpose", words, scope=scope, perm=(1, 0)), scope=scope)
        scores = self.add("Add", product, self.weight(bias), scope=scope)
        self.output("logits", scores, "batch", "sequence", self.settings.vocab_size)

    def split_ends(self, scores: str, scope: str) -> None:
        """The outputs of a head for spans: the two scores of each token."""
        ends = self.add("Split", scores, scope=scope, count=2, axis=-1)
        for name, end in zip(("start_logits", "end_logits"), ends, strict=True):
            self.output(name, self.add("Squeeze", end, self.integers(-1), scope=scope), "batch", "sequence")

    def pool(self, hidden: str) -> str:
        """The vector of each text by `model.pooling`, [batch, hidden]; in float32 in every precision."""
        scope = "pooling"
        if self.settings.pooling == "cls":
            first = self.constant("first", np.array(0))  # a number, so that Gather drops the axis
            return self.cast(self.add("Gather", hidden, first, scope=scope, axis=1), scope, "float32")
        hidden, mask = self.cast(hidden, scope, "float32"), self.cast("attention_mask", scope, "float32")
        if self.settings.pooling == "max":
            is_token = self.add("Unsqueeze", mask, self.integers(2), scope=scope)
            is_token = self.add("Cast", is_token, scope=scope, to=self._onnx.TensorProto.BOOL)
            lowest = self.constant("lowest", np.array(np.finfo(np.float32).min))
            masked = self.add("Where", is_token, hidden, lowest, scope=scope)
            return self.add("ReduceMax", masked, scope=scope, axes=[1], keepdims=0)
        count = self.add("ReduceSum", mask, self.integers(1), scope=scope, keepdims=1)
        count = self.add("Max", count, self.constant("one", np.array(1, np.float32)), scope=scope)
        row = self.add("Unsqueeze", mask, self.integers(1), scope=scope)
        total = self.add("Squeeze", self.add("MatMul", row, hidden, scope=scope), self.integers(1), scope=scope)
        return self.add("Div", total, count, scope=scope)

    def embed(self, hidden: str) -> None:
        """The outputs of an embedding model: the vector of each text, and those of its tokens."""
        scope, vector = "normalization", self.pool(hidden)
        if self._normalizes:
            length = self.add("ReduceL2", vector, scope=scope, axes=[1], keepdims=1)
            length = self.add("Max", length, self.constant("shortest", np.array(1e-12, np.float32)), scope=scope)
            vector = self.add("Div", vector, length, scope=scope)
        self.output(VECTOR, vector, "batch", self.settings.hidden_size)
        self.output("last_hidden_state", hidden, "batch", "sequence", self.settings.hidden_size)

    def output(self, name: str, x: str, *shape: str | int) -> None:
        """Make `x` an output of the graph, of float32."""
        onnx = self._onnx
        kind = onnx.TensorProto.FLOAT
        self._nodes.append(onnx.helper.make_node("Cast", [x], [name], name=f"{name}/Cast", to=kind))
        self._outputs.append(onnx.helper.make_tensor_value_info(name, kind, shape))

    def model(self, version: str) -> Any:
        """The whole graph as a ModelProto, with the inputs that its nodes read."""
        helper = self._onnx.helper
        ids = self._onnx.TensorProto.INT64
        read = {name for node in self._nodes for name in node.input}
        inputs = [helper.make_tensor_value_info(name, ids, ["batch", "sequence"]) for name in INPUTS if name in read]
        graph = helper.make_graph(self._nodes, "bert", inputs, self._outputs, list(self._constants.values()))
        opset = helper.make_operatorsetid("", OPSET)
        return helper.make_model(
            graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="bertrain", producer_version=version
        )
