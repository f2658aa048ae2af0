"""ONNX exports: onnxruntime computes what Transformers computes, for every head, shape and precision."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bertrain.cli import weights as cli
from bertrain.config.settings import ModelSettings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.weights import onnx as onnx_folder
from bertrain.weights.export import export
from bertrain.weights.huggingface import to_huggingface, write_folder
from bertrain.weights.onnx_check import check_file, compare, open_session
from bertrain.weights.onnx_graph import HEADS, INPUTS, OPSET, build_graph
from bertrain.weights.tensors import Weights
from tests import helpers

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
transformers = pytest.importorskip("transformers")

CLASSES = {
    "pretrain": "BertForPreTraining",
    "classify": "BertForSequenceClassification",
    "multilabel": "BertForSequenceClassification",
    "regress": "BertForSequenceClassification",
    "span": "BertForQuestionAnswering",
    "tag": "BertForTokenClassification",
    "embed": "BertModel",
    "encoder": "BertModel",
    "encoder without pooler": "BertModel",
}
NAMES = {"logits": "prediction_logits"}  # an output's name here, and in Transformers' model for pre-training


def random_weights(folder: Path, kind: str, *, layers: int = 2, seed: int = 1) -> Weights:
    """A model of odd sizes, every tensor random: three heads of five, seven segments of nothing round."""
    words = tuple(helpers.write_vocabulary(folder / "vocab.txt").read_text().split())
    head = "pretrain" if kind.startswith("encoder") else kind
    settings = ModelSettings(
        vocab_size=len(words), hidden_size=15, num_layers=layers, num_heads=3, intermediate_size=37,
        max_positions=19, head=head, num_labels=3,
    )  # fmt: skip
    tensors = {name: tensor.detach() for name, tensor in helpers.build_model(settings, seed).named_parameters()}
    if kind.startswith("encoder"):
        left_out = ("masked_words.", "next_sentence.classify.") + (("next_sentence.",) if "without" in kind else ())
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
        settings = replace(settings, nsp=False)
    vocabulary = Vocabulary.load(folder / "vocab.txt")
    return Weights(origin=kind, fingerprint="", tensors=tensors, settings=settings, vocabulary=vocabulary)


def padded_inputs(rows: int, columns: int, words: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, columns + 1, rows)
    mask = (np.arange(columns) < lengths[:, None]).astype(np.int64)
    values = draw.integers(0, words, (rows, columns)), mask, draw.integers(0, 2, (rows, columns))
    return dict(zip(INPUTS, values, strict=True))


def assert_same(session: Any, twin: Any, inputs: dict[str, np.ndarray], tolerance: float) -> set[str]:
    """Compare every output on real rows; returns the names."""
    outputs = session.get_outputs()
    found = dict(zip([output.name for output in outputs], session.run(None, inputs), strict=True))
    with torch.no_grad():
        theirs = twin(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    for output in outputs:
        expected = getattr(theirs, output.name, None)
        expected = (getattr(theirs, NAMES[output.name]) if expected is None else expected).numpy()
        assert found[output.name].shape == expected.shape
        assert found[output.name].dtype == np.float32
        rows = inputs["attention_mask"] == 1 if "sequence" in output.shape else slice(None)
        assert np.abs(found[output.name] - expected)[rows].max() <= tolerance, output.name
    return set(found)


@pytest.mark.parametrize("kind", list(CLASSES))
def test_every_head_at_every_shape_equals_transformers(tmp_path: Path, kind: str) -> None:
    weights = random_weights(tmp_path, kind)
    agreement = onnx_folder.write_folder(tmp_path / "onnx", weights, "fp32")
    assert agreement.mean_square_error < 1e-5
    assert agreement.same_choice > 0.99
    write_folder(tmp_path / "theirs", weights)
    twin = getattr(transformers, CLASSES[kind]).from_pretrained(tmp_path / "theirs").eval()
    session = open_session(tmp_path / "onnx" / "model.onnx")
    names = set()
    for rows, columns in itertools.product(range(1, 6), range(1, 20)):
        inputs = padded_inputs(rows, columns, weights.settings.vocab_size, seed=rows * columns)
        names = assert_same(session, twin, inputs, 1e-4)
    assert names == {
        "pretrain": {"logits", "seq_relationship_logits"},
        "span": {"start_logits", "end_logits"},
        "encoder": {"last_hidden_state", "pooler_output"},
        "encoder without pooler": {"last_hidden_state"},
        "embed": {"last_hidden_state"},
    }.get(kind, {"logits"})
    with pytest.raises(Exception, match="20"):  # more columns than positions
        session.run(None, padded_inputs(1, 20, 10))


def test_every_head_has_a_graph() -> None:
    from typing import get_args, get_type_hints

    assert set(HEADS) == set(get_args(get_type_hints(ModelSettings)["head"]))


@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_padding_does_not_change_a_row(tmp_path: Path, precision: onnx_folder.Precision) -> None:
    """Other words in the padding change nothing; in int8 they change only the scale of the batch."""
    weights = random_weights(tmp_path, "classify")
    onnx_folder.write_folder(tmp_path / "onnx", weights, precision)
    session = open_session(tmp_path / "onnx" / "model.onnx")
    inputs = padded_inputs(4, 17, 40)
    (first,) = session.run(None, inputs)
    other = inputs | {"input_ids": np.where(inputs["attention_mask"] == 1, inputs["input_ids"], 41)}
    assert (other["input_ids"] != inputs["input_ids"]).any()
    (second,) = session.run(None, other)
    np.testing.assert_allclose(second, first, atol=0.2 * first.std() if precision == "int8" else 0)
    assert np.isfinite(session.run(None, inputs | {"attention_mask": np.zeros((4, 17), np.int64)})[0]).all()


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("kind", ["pretrain", "regress", "span"])
def test_smaller_precisions(tmp_path: Path, kind: str, precision: onnx_folder.Precision) -> None:
    weights = random_weights(tmp_path, kind)
    agreement = onnx_folder.write_folder(tmp_path / "onnx", weights, precision)
    assert agreement.mean_square_error > 1e-5, "it is not fp32"
    model = onnx.load(tmp_path / "onnx" / "model.onnx")
    types = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    operators = {node.op_type for node in model.graph.node}
    if precision == "fp16":
        assert types == {"FLOAT16", "INT64"}
    else:
        assert {"INT8", "FLOAT"} <= types
        assert {"MatMulInteger", "DynamicQuantizeLinear", "MatMul"} <= operators, "attention stays in fp32"


def test_a_folder_is_found_by_tokenizer_and_config(tmp_path: Path) -> None:
    weights = replace(random_weights(tmp_path, "classify"), labels=("bad", "fair", "good"))
    onnx_folder.write_folder(tmp_path / "onnx", weights, "fp32")
    files = {path.name for path in (tmp_path / "onnx").iterdir()}
    assert files == {"model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    config = transformers.AutoConfig.from_pretrained(tmp_path / "onnx")
    assert config.architectures == ["BertForSequenceClassification"]
    assert config.id2label == {0: "bad", 1: "fair", 2: "good"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "onnx")
    encoded = tokenizer(["bato ketose lida", "nuse"], ["mofu", "rago ra ba"], padding=True, return_tensors="np")
    session = open_session(tmp_path / "onnx" / "model.onnx")
    assert session.run(["logits"], dict(encoded))[0].shape == (2, 3)
    model = onnx.load(tmp_path / "onnx" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, model.opset_import[0].version) == (8, OPSET)
    names = [node.name for node in model.graph.node]
    assert len(names) == len(set(names)), "tools address nodes by name"


@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_a_damaged_graph_is_refused(tmp_path: Path, precision: onnx_folder.Precision) -> None:
    """Rows in a wrong order and a NaN in any precision; a lost or wrong tensor of one layer where bounds are narrow."""
    weights = random_weights(tmp_path, "pretrain")
    tensors = to_huggingface(weights)
    layer, words = "bert.encoder.layer.1", "bert.embeddings.word_embeddings.weight"
    damages = [
        {words: tensors[words].roll(1, 0)},
        {"cls.predictions.bias": torch.full_like(tensors["cls.predictions.bias"], torch.nan)},
    ]
    if precision != "int8":
        damages += [
            {f"{layer}.output.dense.weight": torch.zeros_like(tensors[f"{layer}.output.dense.weight"])},
            {f"{layer}.attention.output.LayerNorm.weight": tensors[f"{layer}.output.LayerNorm.bias"]},
        ]
    for damage in damages:
        float_type: Any = "float16" if precision == "fp16" else "float32"
        model = build_graph(tensors | damage, weights.settings, float_type, "0")
        onnx_folder.save(model, tmp_path / "damaged.onnx", is_quantized=precision == "int8")
        with helpers.refused("export-differs", precision):
            check_file(tmp_path / "damaged.onnx", weights, precision)
    (tmp_path / "damaged.onnx").write_bytes(b"not a graph")
    with helpers.refused("export-differs", "damaged.onnx"):
        check_file(tmp_path / "damaged.onnx", weights, precision)


@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_a_refused_export_leaves_nothing_behind(
    tmp_path: Path, precision: onnx_folder.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lost tensor, whose effect is smaller than int8's rounding, in any precision."""
    weights = random_weights(tmp_path, "pretrain")
    damaged, lost = to_huggingface(weights), "bert.encoder.layer.1.output.dense.weight"
    damaged[lost] = torch.zeros_like(damaged[lost])
    monkeypatch.setattr(onnx_folder, "to_huggingface", lambda _: damaged)
    before = set(tmp_path.iterdir())
    with helpers.refused("export-differs", "fp32"):
        onnx_folder.write_folder(tmp_path / "onnx", weights, precision)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_large_models_keep_tensors_in_a_second_file(
    tmp_path: Path, precision: onnx_folder.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of over 2 GB would."""
    weights = random_weights(tmp_path, "span")
    monkeypatch.setattr(onnx_folder, "MAX_FILE_BYTES", 1000)
    onnx_folder.write_folder(tmp_path / "large", weights, precision)
    assert (tmp_path / "large" / "model.onnx_data").is_file() or precision == "int8"
    (tmp_path / "large").rename(tmp_path / "moved")  # the second file is named relative to the first
    monkeypatch.setattr(onnx_folder, "MAX_FILE_BYTES", 10**9)
    onnx_folder.write_folder(tmp_path / "small", weights, precision)
    assert not list((tmp_path / "small").glob("*data"))
    inputs = padded_inputs(3, 11, 40)
    one, two = (open_session(tmp_path / name / "model.onnx").run(None, inputs) for name in ("moved", "small"))
    for first, second in zip(one, two, strict=True):
        assert np.array_equal(first, second)


def test_command_line_and_refusals(tmp_path: Path) -> None:
    weights = random_weights(tmp_path, "classify")
    write_folder(tmp_path / "weights", weights)
    done = CliRunner().invoke(
        cli.app, ["export", str(tmp_path / "weights"), "--to", "onnx", "--out", str(tmp_path / "onnx")]
    )
    assert done.exit_code == 0, done.output
    assert "of their root mean square" in done.output
    assert compare(tmp_path / "onnx" / "model.onnx", weights).mean_square_error < 1e-5
    with helpers.refused("occupied-folder", tmp_path / "onnx"):
        export(tmp_path / "weights", tmp_path / "onnx", to="onnx")
    with helpers.refused("unknown-precision", "int4", "int8"):
        export(tmp_path / "weights", tmp_path / "new", to="onnx", precision="int4")
    with helpers.refused("conflicting-options", "--pad-vocab-to"):
        export(tmp_path / "weights", tmp_path / "new", to="onnx", pad_vocab_to=8)
    with helpers.refused("conflicting-options", "--precision fp16"):
        export(tmp_path / "weights", tmp_path / "new", precision="fp16")
    (tmp_path / "weights" / "vocab.txt").unlink()
    (tmp_path / "weights" / "tokenizer.json").unlink()
    with helpers.refused("missing-vocabulary"):
        export(tmp_path / "weights", tmp_path / "new", to="onnx")
    assert not (tmp_path / "new").exists()
