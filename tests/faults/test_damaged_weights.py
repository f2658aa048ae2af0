"""Somebody's weights, damaged, hostile or of another model: one sentence that says what, and nothing runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bertrain.base.errors import UserError
from bertrain.weights.export import export, import_weights
from bertrain.weights.inspect import show_weights
from bertrain.weights.source import read_weights
from tests import helpers

GOLDEN = Path(__file__).parents[1] / "golden"
GOOGLE, MLPERF = GOLDEN / "tf1-google", GOLDEN / "tf1-mlperf"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "google"
    import_weights(GOOGLE, folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "damaged"))


def check_refused(code: str, source: Path, *named: object) -> None:
    """Reading `source` is refused with this code, in one line that names these values."""
    with helpers.refused(code, *named) as caught:
        read_weights(source)
    assert "\n" not in str(caught.value)


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- pickles ----------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled plainly, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("how", ["archive", "legacy", "bare pickle"])
def test_a_pickle_that_wants_to_run_something_is_refused_and_runs_nothing(how: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    path, mark = folder / "pytorch_model.bin", folder / "it-ran"
    content = {"model": {"bert.pooler.dense.bias": torch.zeros(4)}, "args": Bomb(mark)}
    if how == "bare pickle":
        path.write_bytes(pickle.dumps(content["args"], protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "archive")
    check_refused("unsafe-pickle", folder, path, "posix.mkdir")
    assert not mark.exists()
    pickle.loads(pickle.dumps(content["args"]))
    assert mark.exists(), "the same pickle, opened plainly, does run"


def test_a_few_bytes_that_describe_a_huge_tensor_are_refused(folder: Path) -> None:
    huge = torch.zeros(1).expand(1 << 20, 1 << 20)
    (folder / "model.safetensors").unlink()
    torch.save({"bert.embeddings.word_embeddings.weight": huge}, folder / "pytorch_model.bin")
    check_refused("damaged-weights", folder, (1 << 20, 1 << 20))


@pytest.mark.parametrize("is_archive", [True, False])
def test_damaged_pickles(is_archive: bool, folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    tensors = load_file(folder / "model.safetensors")
    words = tensors["bert.embeddings.word_embeddings.weight"]
    torch.save(tensors, path, _use_new_zipfile_serialization=is_archive)
    (folder / "model.safetensors").unlink()
    content = path.read_bytes()
    for length in (0, 1, 2, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=str(path)):
            read_weights(folder)
    if is_archive:  # only archives have checksums
        for part in (words.numpy().tobytes(), b"bert.pooler"):  # of the data, and of the program that describes it
            place = content.index(part) + 5
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            check_refused("damaged-weights", folder, path, "checksum")
    for odd in ([torch.zeros(2)], {1: torch.zeros(2)}, {"model": {1: torch.zeros(2)}}, {"text": "only"}):
        torch.save(odd, path)
        check_refused("no-state-dict", folder, path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_an_archive_with_a_damaged_entry(method: int, folder: Path) -> None:
    """Whatever its entries are compressed with, and whatever the decompressor raises."""
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    noise = random.Random(1).randbytes(3000)
    with zipfile.ZipFile(path, "w", compression=method) as archive:
        archive.writestr("archive/data.pkl", noise)
    content = path.read_bytes()
    for place in range(60, 2600, 97):
        path.write_bytes(content[:place] + bytes(40) + content[place + 40 :])
        check_refused("damaged-weights", folder, path)


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_to_an_old_pickle_ends_in_a_sentence(data: st.DataObject, whole: Path) -> None:
    """Bare pickles have no checksums: what is read may be wrong, but nothing else happens."""
    path = whole.parent / "fuzzed.bin"
    torch.save({"bert.pooler.dense.bias": torch.zeros(4)}, path, _use_new_zipfile_serialization=False)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        show_weights(path)
    except UserError as error:
        assert str(error)  # noqa: PT017 - either outcome is right


# --- safetensors, configs, vocabularies -------------------------------------------------------------------


def test_damaged_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 7, 100, len(content) - 1):
        path.write_bytes(content[:length])
        check_refused("damaged-weights", folder, path)


def test_what_lies_beside_the_weights(folder: Path) -> None:
    config, vocabulary, tokenizer = (folder / name for name in ("config.json", "vocab.txt", "tokenizer_config.json"))
    described = json.loads(config.read_text())
    for changes, code, *named in (
        ({"model_type": "xlm-roberta", "type_vocab_size": 1}, "not-bert", config, "xlm-roberta"),
        ({"model_type": "deberta-v2"}, "not-bert", config, "deberta-v2"),
        ({"position_embedding_type": "relative_key"}, "not-bert", config, "relative_key"),
        ({"embedding_size": 2, "hidden_act": "gelu_new"}, "factorized-embedding", config, "embedding_size 2", "ALBERT"),
        ({"num_hidden_layers": 10**9}, "bad-config", "1,000,000,000"),
        ({"hidden_size": 2**40}, "bad-config", "1,099,511,627,776"),
        ({"hidden_size": 2**70}, "bad-config", folder),
    ):
        config.write_text(json.dumps(described | changes))
        check_refused(code, folder, *named)
    for changes in ({"hidden_act": "relu"}, {"num_attention_heads": 3}, {"hidden_size": "wide"}):
        config.write_text(json.dumps(described | changes))
        with pytest.raises(UserError, match=str(*changes.values())):
            read_weights(folder)
    for content in (b"\xff\xfe{}", b"{", b"[]", b"[" * 100_000):
        config.write_bytes(content)
        with pytest.raises(UserError, match=str(config)):
            read_weights(folder)
    config.unlink()
    check_refused("missing-config", folder, folder)
    config.write_text(json.dumps(described))

    words = vocabulary.read_bytes()
    vocabulary.write_bytes(words + b"\xff\n")
    with pytest.raises(UserError, match=str(vocabulary)):
        read_weights(folder)
    vocabulary.write_bytes(words + b"more\n")
    check_refused("vocabulary-mismatch", folder, 16, 15)
    vocabulary.write_bytes(words)
    tokenizer.write_bytes(b"\xff")
    check_refused("not-utf8", folder, tokenizer)


def test_weights_of_another_shape_are_named_one_and_all(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 30522, "intermediate_size": 8}))
    (folder / "vocab.txt").unlink()
    check_refused(
        "shape-mismatch",
        folder,
        "bert.embeddings.word_embeddings.weight is (15, 4), not (30522, 4)",
        "bert.encoder.layer.1.intermediate.dense.weight is (16, 4), not (8, 4)",
        "cls.predictions.bias is (15,), not (30522,)",
    )
    (folder / "bert_config.json").write_text(json.dumps(described | {"intermediate_size": 8}))
    for path in GOOGLE.glob("bert_model.ckpt.*"):
        shutil.copy(path, folder)
    expected = "bert/encoder/layer_0/intermediate/dense/kernel is (4, 16), not (4, 8)"
    check_refused("shape-mismatch", folder / "bert_model.ckpt", expected)


def test_weights_that_are_not_whole(folder: Path, tmp_path: Path) -> None:
    resave(folder, lambda tensors: tensors.pop("bert.encoder.layer.1.attention.self.key.weight"))
    weights = read_weights(folder)
    assert weights.missing == ["layers.1.qkv.weight"]
    assert weights.left_over == tuple(
        f"bert.encoder.layer.1.attention.self.{part}.weight" for part in ("query", "value")
    )
    for make in (import_weights, export):
        with helpers.refused("missing-tensors", "1 tensor", "layers.1.qkv.weight"):
            make(folder, tmp_path / "out")  # type: ignore[operator]
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_tied_is_another_model(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.update({"cls.predictions.decoder.weight": torch.zeros(15, 4)}))
    check_refused("untied-weights", folder, "cls.predictions.decoder.weight")


def test_a_tensor_in_two_shards_that_differ(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "bert.pooler.dense.bias"
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] + 1}, folder / "model-00002-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    index["weight_map"]["another"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_refused("untied-weights", folder, f"two different tensors {name}")


def test_integers_are_no_weights(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.update({"bert.pooler.dense.bias": torch.zeros(4, dtype=torch.int64)}))
    check_refused("shape-mismatch", folder, "bert.pooler.dense.bias", "I64")


def test_the_verbs_end_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing")
    done = helpers.bertrain("weights", "show", folder, check=False)
    assert done.returncode == 2
    assert "[damaged-weights]" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    (tmp_path / "notes.txt").write_text("notes")
    for source, code in (
        (tmp_path / "notes.txt", "unknown-format"),
        (tmp_path / "nowhere", "missing-weights"),
        (tmp_path, "missing-weights"),
    ):
        check_refused(code, source, source)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes(b"")
    check_refused("ambiguous-weights", tmp_path, "a.pt, b.pt")


@pytest.mark.parametrize("to", ["huggingface", "nvidia"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(to: str, tmp_path: Path) -> None:
    """The nearest thing to one: the system refuses to write a file of more than 2,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UserError, match=str(tmp_path / "out")):
            export(GOOGLE, tmp_path / "out", to=to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for to in ("huggingface", "nvidia"):
        with pytest.raises(UserError, match=str(tmp_path / "file" / "out")):
            export(GOOGLE, tmp_path / "file" / "out", to=to)
    with pytest.raises(UserError, match=str(tmp_path)):
        export(GOOGLE, tmp_path, to="nvidia")
    with helpers.refused("missing-vocabulary", MLPERF):
        export(MLPERF, tmp_path / "out")
