"""Weights of TensorFlow, NVIDIA and Hugging Face in all their spellings: the same tensors, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bertrain.cli import weights
from bertrain.training.fill_mask import fill_mask
from bertrain.weights.export import export, import_weights
from bertrain.weights.huggingface import write_folder
from bertrain.weights.inspect import compare_weights, is_same, show_weights
from bertrain.weights.source import open_source, read_weights
from tests import helpers

GOLDEN = Path(__file__).parents[1] / "golden"
GOOGLE, MLPERF = GOLDEN / "tf1-google", GOLDEN / "tf1-mlperf"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLPerf's miniature as NVIDIA's converter would write it."""
    return export(MLPERF, tmp_path_factory.mktemp("nvidia") / "split", to="nvidia")


@pytest.fixture(scope="module")
def state(split: Path) -> Tensors:
    return torch.load(split / "model.ckpt-28252.pt", weights_only=True)["model"]


def tensorflow_name(name: str) -> str:
    """Hugging Face's name in TensorFlow, by the rules of google-research/bert's variable scopes."""
    special = {
        "cls.predictions.bias": "cls/predictions/output_bias",
        "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
        "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
        "cls.predictions.decoder.weight": "bert/embeddings/word_embeddings",
    }
    if name in special:
        return special[name]
    name = name.replace("encoder.layer.", "encoder.layer_")
    if "LayerNorm" in name:
        name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
    name = name.replace("embeddings.weight", "embeddings").replace(".weight", ".kernel")
    return name.replace(".", "/")


# --- TensorFlow 1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "step"), [(GOOGLE, 20), (MLPERF, 28252)])
def test_tensorflow_into_transformers_tensor_by_tensor(checkpoint: Path, step: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import BertForPreTraining

    done = import_weights(checkpoint, tmp_path / "out")
    assert (done.kind, done.global_step, done.missing, done.left_over) == ("tf1", step, (), ())
    model, info = BertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    values = np.load(checkpoint / "values.npz")
    used = set()
    for name, parameter in model.named_parameters():
        theirs = tensorflow_name(name)
        expected = values[theirs].T if theirs.endswith("/kernel") else values[theirs]
        assert np.array_equal(parameter.detach().numpy(), expected), name
        used.add(theirs)
    assert used | set(done.skipped) == set(values), "every variable is taken or named as skipped"
    assert not used & set(done.skipped)


def test_every_way_to_name_a_checkpoint(tmp_path: Path) -> None:
    prefix = GOOGLE / "bert_model.ckpt"
    wholes = [
        read_weights(source)
        for source in (GOOGLE, prefix, f"{prefix}.index", f"{prefix}.data-00000-of-00001", f"{prefix}.meta")
    ]
    assert len({weights.fingerprint for weights in wholes}) == 1
    assert wholes[0].settings.num_layers == 2
    for name in ("one", "two"):
        shutil.copy(f"{prefix}.index", tmp_path / f"{name}.index")
    with helpers.refused("ambiguous-weights", tmp_path, "one, two"):
        read_weights(tmp_path)


# --- NVIDIA -----------------------------------------------------------------------------------------------


def test_the_file_is_as_nvidias_converter_writes_it(split: Path, state: Tensors) -> None:
    values = np.load(MLPERF / "values.npz")
    assert len(state) == sum(not name.endswith(("LAMB", "LAMB_1", "_power", "global_step")) for name in values) + 1
    for name, tensor in state.items():
        theirs = tensorflow_name(name)
        expected = values[theirs].T if theirs.endswith("/kernel") else values[theirs]
        assert np.array_equal(tensor.numpy()[: len(expected)], expected), name
        if len(tensor) != len(expected):
            assert len(tensor) == 32, "30 words, padded to a multiple of 8"
            assert not tensor[30:].any(), "with zeros"
    assert json.loads((split / "bert_config.json").read_text())["vocab_size"] == 30
    assert read_weights(split).global_step == 28252


def fused_attention(state: Tensors) -> Tensors:
    """As apex's multi-head attention has them."""
    spellings = {
        "attention.self.query.": "attention.multi_head_attention.q_",
        "attention.self.key.": "attention.multi_head_attention.k_",
        "attention.self.value.": "attention.multi_head_attention.v_",
        "attention.output.dense.": "attention.multi_head_attention.out_proj_",
        "attention.output.LayerNorm.": "attention.layer_norm.",
    }
    renamed = {}
    for name, tensor in state.items():
        for ours, theirs in spellings.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def segmented_fmha(state: Tensors) -> Tensors:
    """As the model in two segments with FMHA has them: QKV in one buffer, and views into it beside."""
    out = {}
    for name, tensor in state.items():
        if "attention.self." in name:
            stem, part, kind = name.rsplit(".", 2)
            out[f"{stem}.{'W' if kind == 'weight' else 'B'}{part[0]}"] = tensor
            if part == "query":
                parts = [state[f"{stem}.{third}.{kind}"] for third in ("query", "key", "value")]
                out[f"{stem}.{'W' if kind == 'weight' else 'B'}qkv"] = torch.cat(parts)
        else:
            out[name] = tensor
    return {f"{'bert_model' if name.startswith('bert') else 'heads_only'}_segment.{name}": out[name] for name in out}


def only_fused(state: Tensors) -> Tensors:
    return {
        name: tensor
        for name, tensor in segmented_fmha(state).items()
        if not name.endswith(("Wq", "Wk", "Wv", "Bq", "Bk", "Bv"))
    }


def fused_feed_forward(state: Tensors) -> Tensors:
    """As the fused GEMM+GELU and the fused loss head have them, under DDP."""
    out = {}
    for name, tensor in state.items():
        if ".output.dense." in name and "attention" not in name:
            name = name.replace("output.dense", "intermediate.dense") + "2"
        elif ".intermediate.dense." in name:
            name += "1"
        out["module." + name.replace("cls.predictions.bias", "cls.predictions.decoder.bias")] = tensor
    return out


def linear_activations(state: Tensors) -> Tensors:
    """As NVIDIA's DeepLearningExamples have them."""
    names = ("intermediate.dense", "pooler.dense", "transform.dense")
    return {
        next((name.replace(part, f"{part}_act") for part in names if part in name), name): tensor
        for name, tensor in state.items()
    }


@pytest.mark.parametrize(
    "spelled", [fused_attention, segmented_fmha, only_fused, fused_feed_forward, linear_activations]
)
def test_fused_models_are_read_as_the_same(split: Path, state: Tensors, spelled: Any, tmp_path: Path) -> None:
    content = {"model": spelled(state), "optimizer": {"state": {0: {"step": 7}}}, "master params": [torch.zeros(2)]}
    torch.save(content, tmp_path / "phase2_ckpt_7.pt")
    shutil.copy(split / "bert_config.json", tmp_path)
    compared = compare_weights(MLPERF, tmp_path / "phase2_ckpt_7.pt")
    assert len(compared) == 50
    assert {tensor.verdict for tensor in compared} == {"equal"}
    weights = read_weights(tmp_path)
    assert (weights.kind, weights.left_over, weights.skipped) == ("nvidia", (), ("master params", "optimizer"))


# --- Hugging Face -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "google"
    import_weights(GOOGLE, folder)
    return folder


def companions(imported: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        shutil.copy(imported / name, folder)
    return folder


def test_what_was_imported_serves_transformers(imported: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModel, AutoTokenizer, pipeline

    assert AutoModel.from_pretrained(imported).config.hidden_size == 4
    assert AutoTokenizer.from_pretrained(imported)("all work and no play")["input_ids"] == [2, 5, 6, 7, 8, 9, 3]
    sentence = "all work and no [MASK] makes jack a dull boy"
    theirs = pipeline("fill-mask", model=str(imported), tokenizer=str(imported), top_k=15)(sentence)
    ours = fill_mask(GOOGLE, [sentence], top=15)[0][0]
    assert [guess["token_str"] for guess in theirs] == [guess.word for guess in ours]
    assert [guess["score"] for guess in theirs] == pytest.approx([guess.probability for guess in ours], rel=1e-5)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "legacy", "old names", "no prefix", "beside TensorFlow's"])
def test_spellings_of_hugging_face(imported: Path, name: str, tmp_path: Path) -> None:
    folder = companions(imported, tmp_path / "folder")
    tensors = load_file(imported / "model.safetensors")
    left = set()
    if name == "old names":
        tensors = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for key, tensor in tensors.items()
        }
    if name == "no prefix":  # the encoder alone, with an old version's constant beside it
        tensors = {key[5:]: tensor for key, tensor in tensors.items() if key.startswith("bert.")}
        tensors["embeddings.position_ids"] = torch.arange(16)[None]
        left = {tensor.name for tensor in compare_weights(imported, imported) if "masked" in tensor.name}
        left |= {"next_sentence.classify.weight", "next_sentence.classify.bias"}
    if name == "beside TensorFlow's":  # as some publish both
        shutil.copy(MLPERF / "model.ckpt-28252.index", folder)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=name != "legacy")
    compared = compare_weights(imported, folder)
    assert {tensor.name for tensor in compared if tensor.verdict == "only in A"} == left
    assert all(tensor.verdict == "equal" for tensor in compared if tensor.name not in left)
    assert is_same(compared) == (not left)
    assert read_weights(folder).left_over == ()
    done = import_weights(folder, tmp_path / "again")
    assert set(done.missing) == left, "what was not there is named, and nothing is put in its place"
    assert is_same(compare_weights(folder, tmp_path / "again"))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_models_in_several_files(imported: Path, suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import BertForPreTraining

    folder = companions(imported, tmp_path / "folder")
    BertForPreTraining.from_pretrained(imported).save_pretrained(folder, max_shard_size="2KB")
    index = folder / "model.safetensors.index.json"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    if suffix == ".bin":
        for path in list(folder.glob("model-*.safetensors")):
            torch.save(load_file(path), folder / f"pytorch_{path.stem}.bin")
            path.unlink()
        places = json.loads(index.read_text())["weight_map"]
        renamed = {name: f"pytorch_{Path(file).stem}.bin" for name, file in places.items()}
        index.unlink()
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": renamed}))
    assert is_same(compare_weights(imported, folder))

    places = json.loads(index.read_text())["weight_map"]
    (folder / next(iter(places.values()))).unlink()
    with helpers.refused("missing-parts", folder, next(iter(places.values()))):
        read_weights(folder)
    for name in ("../elsewhere.safetensors", "x" * 3000):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with helpers.refused("bad-index", name[:30]):
            read_weights(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_widened(imported: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = companions(imported, tmp_path / "folder")
    narrow = {name: tensor.to(dtype) for name, tensor in load_file(imported / "model.safetensors").items()}
    save_file(narrow, folder / "model.safetensors")
    assert {tensor.dtype for tensor in show_weights(folder).tensors} == {str(dtype)[6:]}
    assert show_weights(folder).nbytes == show_weights(imported).nbytes // 2
    import_weights(folder, tmp_path / "wide")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[name], tensor.float()) for name, tensor in narrow.items())


def test_weights_of_half_the_size(imported: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import BertForPreTraining

    export(imported, tmp_path / "half", precision="fp16")
    theirs = BertForPreTraining.from_pretrained(tmp_path / "half", dtype="auto").state_dict()
    whole = BertForPreTraining.from_pretrained(imported).state_dict()
    for name, tensor in whole.items():
        assert theirs[name].dtype == torch.float16
        assert torch.equal(theirs[name], tensor.half())
    assert {tensor.dtype for tensor in read_weights(tmp_path / "half").tensors.values()} == {torch.float32}


def test_a_weight_that_fp16_cannot_hold(imported: Path, tmp_path: Path) -> None:
    large = read_weights(imported)
    next(iter(large.tensors.values())).view(-1)[3] = 1e5
    with helpers.refused("too-large-for-fp16", "fp32"):
        write_folder(tmp_path / "half", large, as_fp16=True)
    assert not (tmp_path / "half").exists()


def test_the_rule_of_cases_follows_the_words(imported: Path, tmp_path: Path) -> None:
    folder = companions(imported, tmp_path / "folder")
    shutil.copy(imported / "model.safetensors", folder)
    (folder / "tokenizer_config.json").unlink()
    weights = read_weights(folder)
    assert weights.vocabulary is not None
    assert weights.vocabulary.lower_case
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace("jack", "Jack"))
    weights = read_weights(folder)
    assert weights.vocabulary is not None
    assert not weights.vocabulary.lower_case


def test_padding_of_the_vocabulary(imported: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForMaskedLM, pipeline

    import_weights(GOOGLE, tmp_path / "padded", pad_vocab_to=64)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "padded").config.vocab_size == 64
    words = load_file(tmp_path / "padded" / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert words.shape == (64, 4)
    assert not words[15:].any()
    assert is_same(compare_weights(imported, tmp_path / "padded")), "padding is no difference"
    guesses = fill_mask(tmp_path / "padded", ["all [MASK]"], top=100)[0][0]
    assert len(guesses) == 15, "and never guessed"
    theirs = pipeline("fill-mask", model=str(tmp_path / "padded"), top_k=15)("all [MASK]")
    assert [guess["token_str"] for guess in theirs] == [guess.word for guess in guesses], "nor by Transformers"
    assert [guess["score"] for guess in theirs] == pytest.approx([guess.probability for guess in guesses], rel=1e-5)
    with helpers.refused("bad-padding", "--pad-vocab-to", 7, "1, 8, 64"):
        import_weights(GOOGLE, tmp_path / "x", pad_vocab_to=7)


def test_padding_is_told_from_words_that_the_config_does_not_have(split: Path, tmp_path: Path) -> None:
    assert import_weights(split, tmp_path / "in").padding == 2, "30 words, padded to a multiple of 8"
    import_weights(MLPERF, tmp_path / "wider", pad_vocab_to=8)
    assert is_same(compare_weights(MLPERF, tmp_path / "wider")), "without a vocabulary, too"
    config = json.loads((MLPERF / "bert_config.json").read_text()) | {"vocab_size": 27}
    (tmp_path / "bert_config.json").write_text(json.dumps(config))
    with helpers.refused("shape-mismatch", "word_embeddings", "(30, 8)", "(27, 8)"):
        import_weights(MLPERF, tmp_path / "x", config=tmp_path / "bert_config.json")


def test_what_has_64_bits_is_rounded_and_said(imported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(imported, tmp_path / "wide")
    tensors = load_file(folder / "model.safetensors")
    name = "bert.pooler.dense.bias"
    tensors[name] = tensors[name].double() + 1e-12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    printed = said("import", folder, "--out", tmp_path / "in")
    assert "  rounded from 64 bits to 32: 1 tensor (each by its name with --json)\n" in printed
    assert import_weights(folder, tmp_path / "again").rounded == (name,)
    assert import_weights(tmp_path / "in", tmp_path / "narrow").rounded == ()


def test_a_head_of_several_labels_is_not_one_of_single_labels(imported: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    folder = companions(imported, tmp_path / "several")
    described = json.loads((folder / "config.json").read_text())
    described |= {"problem_type": "multi_label_classification", "num_labels": 3}
    BertForSequenceClassification(BertConfig.from_dict(described)).save_pretrained(folder)
    read = read_weights(folder)
    assert (read.settings.head, read.settings.num_labels, read.thresholds) == ("multilabel", 3, {})
    assert read.left_over == ()
    read_config = json.loads((folder / "config.json").read_text())
    for thresholds, expected in (({"LABEL_0": 0.1, "LABEL_1": 0.2, "LABEL_2": 0.3}, 3), ({"LABEL_0": 0.1}, 0), (5, 0)):
        (folder / "config.json").write_text(json.dumps(read_config | {"thresholds": thresholds}))
        assert len(read_weights(folder).thresholds) == expected
    single = json.loads((folder / "config.json").read_text()) | {"problem_type": "single_label_classification"}
    (folder / "config.json").write_text(json.dumps(single))
    assert (read_weights(folder).settings.head, read_weights(folder).settings.num_labels) == ("classify", 3)


def test_a_given_config_replaces_all_of_the_folders(imported: Path, tmp_path: Path) -> None:
    """Its labels, too."""
    folder = companions(imported, tmp_path / "labeled")
    shutil.copy(imported / "model.safetensors", folder)
    names = {"id2label": {"0": "no", "1": "yes"}, "thresholds": {"no": 0.5, "yes": 0.2}}
    described = json.loads((folder / "config.json").read_text()) | names
    (folder / "config.json").write_text(json.dumps(described | {"bertrain": {"model.head": "pretrain"}}))
    opened = open_source(folder)
    assert (opened.labels, opened.thresholds) == (("no", "yes"), names["thresholds"])
    assert opened.finetuned_as == {"model.head": "pretrain"}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(described | {"id2label": {"0": "a", "1": "b"}, "thresholds": {"a": 0.1, "b": 0.3}}))
    opened = open_source(folder, config=other)
    assert (opened.labels, opened.thresholds) == (("a", "b"), {"a": 0.1, "b": 0.3})
    assert opened.finetuned_as == {}


def test_words_that_transformers_saved_come_back(imported: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    AutoModelForMaskedLM.from_pretrained(imported).save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(imported).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "vocab.txt").unlink(missing_ok=True)  # some versions write it, some do not
    assert read_weights(tmp_path / "saved").vocabulary == read_weights(imported).vocabulary
    described = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    described["model"]["vocab"]["jack"] = 99
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps(described))
    with helpers.refused("bad-vocabulary", "tokenizer.json"):
        read_weights(tmp_path / "saved")


@pytest.mark.parametrize("rule", ["strip_accents", "tokenize_chinese_chars"])
def test_a_tokenizer_with_rules_of_its_own_is_refused(imported: Path, rule: str, tmp_path: Path) -> None:
    folder = companions(imported, tmp_path / "folder")
    shutil.copy(imported / "model.safetensors", folder)
    rules = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(rules | {rule: False}))
    with helpers.refused("other-tokenizer", f"{rule} is false"):
        read_weights(folder)
    done = import_weights(folder, tmp_path / "out", vocab=folder / "vocab.txt")
    assert done.lower_case


def test_a_missing_third_is_named(imported: Path, tmp_path: Path) -> None:
    folder = companions(imported, tmp_path / "folder")
    tensors = load_file(imported / "model.safetensors")
    del tensors["bert.encoder.layer.0.attention.self.key.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert show_weights(folder).missing == ("layers.0.qkv.weight",)
    with helpers.refused("missing-tensors", "1 tensor", "self.query.weight", "self.value.weight"):
        import_weights(folder, tmp_path / "x")


def test_what_is_no_weights_is_said_to_be_none(imported: Path, split: Path, tmp_path: Path) -> None:
    def check(code: str, source: Path, *named: str, which: str = "newest") -> None:
        with helpers.refused(code, source, *named):
            read_weights(source, which)

    check("not-a-run", MLPERF, "best", which="best")
    check("not-a-run", split, "999", which="999")
    check("not-a-folder", Path("/dev/null"))
    check("unreadable-file", tmp_path / ("x" * 300), "File name too long")
    (tmp_path / "empty").mkdir()
    check("missing-weights", tmp_path / "empty")
    check("missing-weights", companions(imported, tmp_path / "no-weights"), "config.json")
    (tmp_path / "no-weights" / "model.onnx").touch()
    check("missing-weights", tmp_path / "no-weights", "ONNX", "onnxruntime")
    data = shutil.copy(MLPERF / "model.ckpt-28252.data-00000-of-00002", tmp_path / "empty")
    check("missing-parts", tmp_path / "empty", ".index")
    check("missing-parts", Path(data), ".index")
    torch.save(torch.zeros(3), tmp_path / "bare.pt")
    check("no-state-dict", tmp_path / "bare.pt", "Tensor")
    torch.save({"a": torch.zeros(3)}, tmp_path / "other.pt", pickle_protocol=4)
    check("unsafe-pickle", tmp_path / "other.pt")
    torch.save({"state_dict": {"a": torch.zeros(3)}}, tmp_path / "deep.pt")
    check("no-state-dict", tmp_path / "deep.pt", "'state_dict'")
    folder = companions(imported, tmp_path / "decoder")
    shutil.copy(imported / "model.safetensors", folder)
    config = json.loads((folder / "config.json").read_text()) | {"is_decoder": True}
    (folder / "config.json").write_text(json.dumps(config))
    check("not-bert", folder, "is_decoder")


# --- show and compare -------------------------------------------------------------------------------------


def test_show_counts_what_is_there(imported: Path, split: Path) -> None:
    values = np.load(GOOGLE / "values.npz")
    shown = show_weights(GOOGLE)
    assert shown.nbytes == sum(value.nbytes for value in values.values())
    assert shown.parameters == sum(value.size for name, value in values.items() if "adam" not in name) - 1
    assert {tensor.name: tensor.shape for tensor in shown.tensors} == {name: values[name].shape for name in values}
    assert (shown.kind, shown.global_step, shown.words, shown.missing) == ("tf1", 20, 15, ())
    assert show_weights(imported).parameters == shown.parameters
    with_padding = sum(tensor.numel() for tensor in read_weights(MLPERF).tensors.values()) + 2 * 8 + 2
    assert show_weights(split).parameters == with_padding, "the tied decoder counts once"


def said(*arguments: object) -> str:
    """What a command of `bertrain weights` prints, in this process."""
    done = CliRunner().invoke(weights.app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_compare_sees_what_is_no_number(imported: Path, tmp_path: Path) -> None:
    folder = companions(imported, tmp_path / "other")
    tensors = load_file(imported / "model.safetensors")
    tensors["bert.pooler.dense.bias"][1] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    (worst,) = [tensor for tensor in compare_weights(imported, folder, tolerance=1e9) if tensor.verdict != "equal"]
    assert (worst.verdict, worst.largest_absolute) == ("different", float("inf"))
    (itself,) = [tensor for tensor in compare_weights(folder, folder) if tensor.verdict != "equal"]
    assert (itself.verdict, itself.largest_absolute) == ("close", 0.0)
