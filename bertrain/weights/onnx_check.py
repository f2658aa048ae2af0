"""Run a written ONNX file in onnxruntime against our own model, in fp32 on the CPU, and refuse it if the two differ.

The inputs are random words in rows of different lengths. Padding holds random words too, so a mask that lets any of it
through shows. Errors are relative to the root mean square of our outputs. The rounding of 8 bits would hide a wrong row
of a matrix in them, so every stored tensor is compared with ours, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.data.feed.assemble import assemble_batch
from bertrain.data.feed.batching import Capacity, choose_policy
from bertrain.data.formats.block import Block, Masks, flat_ranges
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.encoder import EncoderModel
from bertrain.model.families import new_model
from bertrain.model.heads import SentenceHead
from bertrain.model.pooling import pool
from bertrain.weights.huggingface import to_huggingface
from bertrain.weights.onnx_graph import INPUTS, VECTOR
from bertrain.weights.tensors import Weights

SHAPES = ((1, 1), (1, 7), (5, 33), (2, 128), (1, 777))
"""Rows and columns of the inputs; columns beyond the model's positions are cut off. BERT's longest are 512."""


@dataclass(frozen=True)
class Bound:
    """The largest errors that an export may have, relative to the root mean square of our outputs."""

    mean_square: float  # of all values: the root of the mean squared error
    largest: float  # of any single value
    same_choice: float  # least share of rows whose largest value is at the same place


BOUNDS = {"fp32": Bound(1e-4, 1e-3, 0.99), "fp16": Bound(0.03, 0.6, 0.9), "int8": Bound(0.3, 4.5, 0.6)}
"""By precision: two to three times the errors of trained models in 16 and 8 bits, a hundred times those in fp32.

A trained model in 8 bits with one matrix set to zero, or its rows moved by one, is beyond them."""
HALF_STEP = 0.5 / 63  # the largest rounding to 7 bits, relative to the largest weight of a channel


@dataclass(frozen=True)
class Agreement:
    """How close the outputs of a file are to ours, over all inputs and outputs."""

    outputs: tuple[str, ...]
    largest_difference: float
    largest_error: float  # the largest difference, relative to the root mean square of our outputs
    mean_square_error: float  # the root of the mean squared difference, relative to the same
    same_choice: float  # share of rows whose largest value is at the same place

    def describe(self) -> str:
        names = ", ".join(self.outputs)
        errors = f"{self.mean_square_error:.1e} of their root mean square, a value by at most {self.largest_error:.1e}"
        choices = f"{self.same_choice:.1%} of rows have their largest value at the same place"
        return f"{names} differ from bertrain's by {errors} (absolute: {self.largest_difference:.1e}); {choices}"


def check_file(path: Path, weights: Weights, precision: str) -> Agreement:
    """Compare a file with the weights it was made of; raises if it is not within the bound of its precision."""
    agreement = compare(path, weights)
    bound = BOUNDS[precision]
    is_close = (  # false for NaN too
        agreement.mean_square_error <= bound.mean_square
        and agreement.largest_error <= bound.largest
        and agreement.same_choice >= bound.same_choice
    )
    if not is_close:
        limits = f"{bound.mean_square:g} and {bound.largest:g}, and the same in {bound.same_choice:.0%}"
        cure = "report it as a bug" if precision == "fp32" else "use --precision fp32"
        raise UserError("export-differs", f"{agreement.describe()}; the limits for {precision} are {limits}; {cure}")
    _check_tensors(path, weights, precision)
    return agreement


def _check_tensors(path: Path, weights: Weights, precision: str) -> None:
    """Refuse a file with a tensor that is not ours, rounded to its precision."""
    onnx = import_extra("onnx")
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(str(path)).graph.initializer}
    for name, tensor in to_huggingface(weights).items():
        ours, quantized = tensor.numpy(), stored.get(f"{name}_quantized")
        if quantized is not None:  # [inputs, outputs], with a scale and a zero for each output
            zeros = stored[f"{name}_zero_point"].astype(np.float32)
            theirs = (quantized.astype(np.float32) - zeros) * stored[f"{name}_scale"]
            is_ours = bool((np.abs(theirs - ours.T) <= HALF_STEP * np.abs(ours).max(1)).all())
        elif name in stored:
            theirs, ours = stored[name], ours.astype(stored[name].dtype)
            is_ours = np.array_equal(theirs, ours) or np.array_equal(theirs, ours.T)
        else:
            continue  # of a head that the graph does not have
        if not is_ours:
            wrong = f"{path.name} holds another {name} than {weights.origin}, even rounded to {precision}"
            raise UserError("export-differs", f"{wrong}; report it as a bug")


@torch.no_grad()
def compare(path: Path, weights: Weights) -> Agreement:
    model = new_model(replace(weights.settings, nsp=True))
    model.load_state_dict(weights.tensors, strict=False)  # heads that the weights lack are not outputs of the file
    session = open_session(path)
    outputs = {output.name: "sequence" in output.shape for output in session.get_outputs()}  # name: has a row per token
    draw = np.random.default_rng(0)
    ours: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
    theirs: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
    for rows, columns in SHAPES:
        batch, inputs = random_inputs(weights, rows, min(columns, weights.settings.max_positions), draw)
        fed = {value.name: inputs[value.name] for value in session.get_inputs()}
        found = dict(zip(outputs, session.run(None, fed), strict=True))
        for name, values in our_outputs(model.eval(), batch, list(outputs), weights.normalizes).items():
            is_token = inputs["attention_mask"] == 1
            ours[name].append((values if outputs[name] else values[batch.is_real]).numpy())
            theirs[name].append(found[name][is_token] if outputs[name] else found[name])
    return _summarize(ours, theirs)


def open_session(path: Path) -> Any:
    """A session on the CPU whose threads sleep while they have nothing to do."""
    runtime = import_extra("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each failure, with Exception as their only base
        raise UserError("export-differs", f"onnxruntime cannot load {path.name}: {error}") from None


def random_inputs(
    weights: Weights, rows: int, columns: int, draw: np.random.Generator
) -> tuple[Batch, dict[str, np.ndarray]]:
    """The same sequences as our flat batch and as padded input; the first row is full."""
    lengths = draw.integers(1, columns + 1, rows)
    lengths[0] = columns
    starts = draw.integers(1, lengths + 1)  # of the second segment
    words = draw.integers(0, weights.settings.vocab_size, (rows, columns))
    places = np.arange(columns)
    mask = places < lengths[:, None]
    # Real tokens have the segment of their place; padding has any.
    segments = np.where(mask, places >= starts[:, None], draw.integers(0, 2, (rows, columns)))
    positions = flat_ranges(np.zeros_like(lengths), lengths)
    masks = Masks(lengths, positions, np.full(len(positions), IGNORED))  # every token is a prediction
    block = Block(words[mask], lengths, starts, np.zeros_like(lengths), masks)
    shape = Capacity(len(positions), rows, len(positions))
    policy = choose_policy("budget")
    batch = assemble_batch(
        block, policy=policy, shape=shape, max_seq_length=columns, pad_id=0, dropout_seed=0,
        num_segments=weights.settings.num_segments,
    )  # fmt: skip
    return batch, dict(zip(INPUTS, (words, mask.astype(np.int64), segments.astype(np.int64)), strict=True))


def our_outputs(model: EncoderModel, batch: Batch, names: list[str], normalizes: bool) -> dict[str, Tensor]:
    """Our values of the outputs with these names: a row for each token, or for each sequence slot."""
    if "last_hidden_state" in names:
        hidden = model.encode(batch)
        found: dict[str, Tensor | None] = {"last_hidden_state": hidden}
        if "pooler_output" in names:
            assert isinstance(model.next_sentence, SentenceHead)
            found["pooler_output"] = torch.tanh(model.next_sentence.pool(hidden[batch.cls_positions]))
        if VECTOR in names:  # as `embed` computes it
            vectors = pool(hidden, batch, model.settings.pooling)
            found[VECTOR] = torch.nn.functional.normalize(vectors) if normalizes else vectors
    else:
        outputs = model(batch)
        found = {"logits": outputs.mlm_logits, "seq_relationship_logits": outputs.nsp_logits}
        if outputs.answers is not None:
            found = dict(zip(names, outputs.answers.unbind(-1) if len(names) > 1 else (outputs.answers,), strict=True))
    return {name: value for name in names if (value := found[name]) is not None}


def _summarize(ours: dict[str, list[np.ndarray]], theirs: dict[str, list[np.ndarray]]) -> Agreement:
    """The worst of all outputs, each relative to its own values."""
    differences, largest, squares, choices = [], [], [], []
    for name, expected in ours.items():
        scale = max(float(np.sqrt(np.mean([np.mean(np.square(value)) for value in expected]))), 1e-30)
        apart = [actual - value for actual, value in zip(theirs[name], expected, strict=True)]
        differences.append(max(float(np.abs(value).max()) for value in apart))
        largest.append(differences[-1] / scale)
        squares.append(float(np.sqrt(np.mean([np.mean(np.square(value)) for value in apart]))) / scale)
        pairs = zip(theirs[name], expected, strict=True)
        choices += [np.mean(actual.argmax(-1) == value.argmax(-1)) for actual, value in pairs]
    return Agreement(tuple(ours), max(differences), max(largest), max(squares), float(np.mean(choices)))
