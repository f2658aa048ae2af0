"""Weights out and in: Transformers reads what we write, we read what it writes, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from bertrain.base.errors import UserError
from bertrain.config.resolve import resolve
from bertrain.run.folder import Run
from bertrain.run.stream import read_metrics
from bertrain.training.fill_mask import fill_mask
from bertrain.training.start import pretrain
from bertrain.weights.card import model_card
from bertrain.weights.export import export
from bertrain.weights.source import build_model, read_weights
from tests import helpers


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    data = helpers.make_data(folder)
    shape = {"train__max_steps": 5, "model__pad_vocab_to": 64, "optimizer__learning_rate": 0.01}
    settings = helpers.tiny_settings(evaluate__data=str(data), evaluate__every_samples=40, **shape)
    pretrain(settings, data, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return export(run, run.parent / "exported")


SENTENCE = "bato [MASK] ratose . lida [MASK]"


def test_transformers_gives_the_same_logits(run: Path, exported: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    theirs = AutoModelForMaskedLM.from_pretrained(exported).eval()
    encoded = tokenizer(SENTENCE, return_tensors="pt")
    tokens = encoded["input_ids"][0].tolist()
    positions = [index for index, token in enumerate(tokens) if token == tokenizer.mask_token_id]
    assert len(positions) == 2
    with torch.no_grad():
        expected = theirs(**encoded).logits[0, positions]
        actual = build_model(read_weights(run))(helpers.one_sequence(tokens, positions)).mlm_logits
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5


def test_transformers_loads_every_tensor(exported: Path) -> None:
    from transformers import BertForPreTraining

    _, info = BertForPreTraining.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_what_comes_back_is_bitwise_what_went_out(run: Path, exported: Path) -> None:
    ours, back = read_weights(run), read_weights(exported)
    assert ours.tensors.keys() == back.tensors.keys()
    for name, tensor in back.tensors.items():
        assert torch.equal(tensor, ours.tensors[name][: len(tensor)]), name
    assert back.vocabulary == ours.vocabulary
    assert back.settings.vocab_size == ours.settings.vocab_size
    assert back.left_over == ()


def test_a_run_has_a_card_with_what_it_learned(run: Path, exported: Path, tmp_path: Path) -> None:
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: fill-mask\n")
    table = read_metrics(run / "metrics.jsonl")
    early, late = table.evaluations[0], table.evaluations[-1]
    assert early.step < late.step == 5
    for fact in ("steps | 5", f"tokens read | {table.columns['tokens'].sum():,.0f}", "learning rate 0.01"):
        assert f"| {fact}" in card or f", {fact}" in card, fact
    assert f"| masked words predicted | {late.metrics['mlm_accuracy']:.2%} |" in card
    assert str(run.parent) not in card, "the paths of a machine are not published"
    before = model_card(Run.open(run), early.step)
    assert f"| steps | {early.step} |" in before
    assert f"| loss of masked words | {early.metrics['mlm_loss']:.4g} |" in before
    assert "not evaluated" in model_card(Run.open(run), early.step - 1)
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    (damaged / "metrics.jsonl").write_text('{"kind": "step", "step": 3}\n')
    assert "| tokens read | 0 |" in model_card(Run.open(damaged))
    assert not (export(exported, tmp_path / "again") / "README.md").exists(), "nothing is known of other weights"


def test_weights_are_for_whom_other_files_are(run: Path, exported: Path) -> None:
    """Not for their owner alone, as the library that writes tensors has it."""
    for folder in (exported, *(run / "checkpoints").glob("step-*")):
        assert len({path.stat().st_mode for path in folder.iterdir() if path.is_file()}) == 1


def test_tokenizers_agree(run: Path, exported: Path) -> None:
    from transformers import AutoTokenizer

    from bertrain.data.text.tokenizer import Tokenizer

    vocabulary = read_weights(run).vocabulary
    assert vocabulary is not None
    sentence = "Bato KETOSE, lida! xyz"
    theirs = AutoTokenizer.from_pretrained(exported)(sentence)["input_ids"]
    (ours,) = Tokenizer(vocabulary).encode([sentence])
    assert theirs == [vocabulary.id_of("[CLS]"), *ours, vocabulary.id_of("[SEP]")]


def test_a_model_saved_by_transformers_begins_a_run(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continued pre-training of somebody's weights, which have a pooler but no heads, and were saved in 64 bits."""
    from transformers import BertModel

    BertModel.from_pretrained(exported).double().save_pretrained(tmp_path / "theirs")
    overrides = helpers.TINY | {
        "model.config": str(tmp_path / "theirs" / "config.json"),
        "model.pad_vocab_to": "8",
        "train.max_steps": "1",
        "optimizer.learning_rate": "0",
        "log.level": "verbose",
    }
    for name in ("model.hidden_size", "model.num_layers", "model.num_heads", "model.intermediate_size"):
        overrides.pop(name)
    settings = resolve("bert-tiny", list(overrides.items()))
    pretrain(settings, run.parent / "data", tmp_path / "run", init=str(tmp_path / "theirs"))
    said = capsys.readouterr().out
    assert "39 tensors" in said
    fresh = ["masked_words.transform.weight", "masked_words.transform.bias", "masked_words.norm.weight"]
    fresh += ["masked_words.norm.bias", "masked_words.bias", "next_sentence.classify.weight"]
    (line,) = [line for line in said.splitlines() if "newly initialized, all:" in line]
    assert sorted(line.split(": ")[1].split(", ")) == sorted([*fresh, "next_sentence.classify.bias"])
    before, after = read_weights(exported).tensors, read_weights(tmp_path / "run").tensors
    for name in set(before) - set(line.split(": ")[1].split(", ")):
        assert torch.equal(after[name][: len(before[name])], before[name]), name


def test_left_over_tensors_are_named(exported: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "odd"
    folder.mkdir()
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        (folder / name).write_bytes((exported / name).read_bytes())
    tensors = load_file(exported / "model.safetensors") | {"bert.adapter.weight": torch.zeros(3)}
    save_file(tensors, folder / "model.safetensors")
    assert read_weights(folder).left_over == ("bert.adapter.weight",)


def test_weights_without_heads_or_of_another_kind_are_refused_where_they_cannot_serve(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file
    from transformers import BertModel

    BertModel.from_pretrained(exported).save_pretrained(tmp_path / "headless")
    (tmp_path / "headless" / "vocab.txt").write_bytes((exported / "vocab.txt").read_bytes())
    with helpers.refused("missing-tensors", "5 tensors", "masked_words.bias"):
        export(tmp_path / "headless", tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes((exported / "config.json").read_bytes())
    save_file({"conv.weight": torch.zeros(3)}, tmp_path / "other" / "model.safetensors")
    with helpers.refused("no-bert-tensors", tmp_path / "other"):
        pretrain(helpers.tiny_settings(), run.parent / "data", tmp_path / "run", init=str(tmp_path / "other"))
    assert read_weights(tmp_path / "other").left_over == ("conv.weight",)


def test_what_the_run_has_no_use_for_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = helpers.tiny_settings(model__nsp=False, model__pad_vocab_to=64, train__max_steps=1)
    pretrain(settings, run.parent / "data", tmp_path / "run", init=str(run))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left over:" in line]
    assert "next_sentence.pool.weight" in line


@pytest.mark.parametrize("rate", [None, 0.0005])
def test_a_rate_for_new_models_is_warned_of_though_quiet(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: float | None
) -> None:
    given = {} if rate is None else {"optimizer__learning_rate": rate}
    settings = helpers.tiny_settings(model__pad_vocab_to=64, train__max_steps=3, log__level="quiet", **given)
    pretrain(settings, run.parent / "data", tmp_path / "run", init=str(run))
    warned = "warning: the recipe's learning rate 0.001 is for a new model" in capsys.readouterr().err
    assert warned == (rate is None)


def test_fill_mask_says_the_same_of_run_and_export(run: Path, exported: Path) -> None:
    of_run, of_export = (fill_mask(source, [SENTENCE], top=3) for source in (run, exported))
    assert [[guess.word for guess in mask] for mask in of_run[0]] == [
        [guess.word for guess in mask] for mask in of_export[0]
    ]
    assert len(of_run[0]) == 2
    assert all(len(mask) == 3 for mask in of_run[0])
    everything = fill_mask(run, ["bato [MASK]"], top=10_000)[0][0]
    assert len(everything) == helpers.vocab_size(), "the padding of the vocabulary is never guessed"
    assert sum(guess.probability for guess in everything) == pytest.approx(1, abs=1e-5)


def test_what_is_refused(run: Path, exported: Path, tmp_path: Path) -> None:
    with helpers.refused("no-mask", "no mask here"):
        fill_mask(run, ["no mask here"])
    with helpers.refused("sentence-too-long", 64):
        fill_mask(run, ["[MASK] " * 100])
    with helpers.refused("missing-weights", tmp_path / "none"):
        fill_mask(tmp_path / "none", ["[MASK]"])
    with pytest.raises(UserError, match=str(exported)):
        export(run, exported)
    with helpers.refused("unknown-format", "--to", "tflite", "huggingface", "onnx"):
        export(run, tmp_path / "x", to="tflite")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "num_attention_heads": 2}))
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with helpers.refused("damaged-weights", tmp_path / "model.safetensors"):
        read_weights(tmp_path)
