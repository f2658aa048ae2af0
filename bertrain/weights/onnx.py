"""Write a folder for onnxruntime: model.onnx, config.json and the tokenizer; complete and checked, or not at all.

- fp32: the weights as they are.
- fp16: weights and products in 16 bits; inputs and outputs stay those of fp32, so a program can change files.
- int8: onnxruntime's dynamic quantization. The matrices of dense layers are stored in 8 bits with a scale for each
  output channel; their inputs are quantized at run time, with one scale for the whole batch. The word embeddings, the
  decoder that shares them and the products within attention stay in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from torch import Tensor

from bertrain import __version__
from bertrain.base.extras import import_extra
from bertrain.base.files import new_folder, refuse_occupied
from bertrain.config.settings import ModelSettings
from bertrain.weights import onnx_bert, onnx_modern
from bertrain.weights.huggingface import to_huggingface, write_companions
from bertrain.weights.onnx_check import Agreement, check_file
from bertrain.weights.onnx_graph import FloatType, Graph
from bertrain.weights.tensors import Weights

MODEL = "model.onnx"
EXTERNAL_SUFFIX = "_data"  # tensors beside the graph; Optimum and Transformers.js look for this name
MAX_FILE_BYTES = 2_000_000_000  # a protobuf message must be smaller than 2 GiB, and the nodes need some of it
Precision = Literal["fp32", "fp16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FAMILIES = {"bert": onnx_bert, "modern": onnx_modern}


def write_folder(out: Path, weights: Weights, precision: Precision) -> Agreement:
    """Write the folder, and run its model against ours; refused if the two differ by more than the bound."""
    refuse_occupied(out)
    tensors = to_huggingface(weights)
    with new_folder(out) as folder:
        forms: dict[Precision, None] = dict.fromkeys(("fp32", precision))
        for form in forms:  # fp32 first: the rounding of fewer bits would hide an error of the graph itself
            for written in folder.iterdir():
                written.unlink()
            float_type: FloatType = "float16" if form == "fp16" else "float32"
            model = build_graph(tensors, weights.settings, float_type, normalizes=weights.normalizes)
            save(model, folder / MODEL, is_quantized=form == "int8")
            agreement = check_file(folder / MODEL, weights, form)
        write_companions(folder, weights, weights.settings)
        return agreement


def build_graph(
    tensors: Mapping[str, Tensor], settings: ModelSettings, float_type: FloatType, *, normalizes: bool = True
) -> Any:
    """The ModelProto of an encoder with its head, from tensors under Hugging Face's names."""
    graph, family = Graph(tensors, settings, float_type, normalizes=normalizes), FAMILIES[settings.family]
    hidden = family.encode(graph)
    if settings.head == "pretrain":
        family.add_pretraining_heads(graph, hidden)
    elif settings.head == "embed":
        graph.embed(hidden)
    else:
        _add_finetuned_head(graph, family, hidden)
    return graph.model(__version__)


def _add_finetuned_head(graph: Graph, family: ModuleType, hidden: str) -> None:
    """The outputs' names and shapes are all that the check needs to know."""
    if graph.settings.head == "span":
        scope = "qa_outputs" if "qa_outputs.bias" in graph.tensors else "classifier"
        graph.split_ends(graph.dense(family.each_token(graph, hidden), scope), scope)
        return
    of_words = graph.settings.head == "tag"
    read = (family.each_token if of_words else family.whole_text)(graph, hidden)
    shape = ("batch", "sequence") if of_words else ("batch",)
    graph.output("logits", graph.dense(read, "classifier"), *shape, len(graph.tensors["classifier.bias"]))


def save(model: Any, path: Path, *, is_quantized: bool = False) -> None:
    """Write a ModelProto to a file, its tensors to a second one if they are too large for protobuf."""
    onnx = import_extra("onnx")
    is_large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_FILE_BYTES
    if is_quantized:
        _quantize(model, path, is_large)
    elif is_large:
        # Small tensors stay in the graph: the shapes among them must be known when it is loaded.
        location = path.name + EXTERNAL_SUFFIX
        onnx.save_model(model, str(path), save_as_external_data=True, location=location, size_threshold=1024)
    else:
        onnx.save_model(model, str(path))


def _quantize(model: Any, path: Path, is_large: bool) -> None:
    quantization = import_extra("onnxruntime.quantization")
    root = logging.getLogger()
    level = root.level
    # It advises to optimize the graph first, which onnxruntime does when it loads the file.
    root.setLevel(logging.ERROR)
    try:
        quantization.quantize_dynamic(
            model,
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            # 7 bits for weights: with 8, sums of pairs overflow 16 bits on x86 CPUs without VNNI, and only there.
            reduce_range=True,
            use_external_data_format=is_large,
        )
    finally:
        root.setLevel(level)
