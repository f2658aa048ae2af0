"""Replaced-token detection: what is replaced and asked, ranks and resume, what comes out, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertrain.base.errors import AgreedError
from bertrain.data.prepare.prepare import prepare
from bertrain.model.batch import IGNORED
from bertrain.planning import kernel_limits
from bertrain.reports.report import report
from bertrain.training.anneal import anneal
from bertrain.training.replacing_engine import replace_words, sample, settings_of_generator
from bertrain.training.start import pretrain, resume
from bertrain.weights.export import export
from tests import helpers, whole_model
from tests.launched import records

MASK = 4
SHAPE = {"model__num_layers": 1, "model__initial_bias": "frequencies"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def generator(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("generator") / "run"
    pretrain(helpers.tiny_settings(**SHAPE, train__max_steps=10), data, run)
    return run


def rtd_settings(generator: Path, **overrides: object) -> dict[str, object]:
    return {
        "model__rtd": 50, "data__generator": generator, "train__max_steps": 6, "checkpoint__every_steps": 3, **overrides
    }  # fmt: skip


def test_only_what_was_replaced_counts_as_replaced() -> None:
    torch.manual_seed(1)
    batch = whole_model.random_batch([30, 1, 40, 9], 96, 8, 30, 40, 50)
    ids = batch.input_ids.index_fill(0, batch.mlm_positions[: batch.num_predictions], MASK)
    batch = replace(batch, input_ids=ids)
    slots = torch.tensor([0, 2, 5, 29])  # the last one is empty
    words = torch.tensor([7, int(batch.mlm_labels[2]), 9, 11])  # the second one is the original word
    found = replace_words(batch, slots, words, MASK)
    changed, replaced = found.input_ids, found.replaced
    assert replaced is not None
    assert changed[batch.mlm_positions[slots[:3]]].tolist() == words[:3].tolist()
    others = torch.ones(96, dtype=torch.bool).index_fill(0, batch.mlm_positions[slots[:3]], False)
    assert changed[others].equal(ids[others])
    is_real = torch.arange(96) < 80
    assert replaced[~is_real].eq(IGNORED).all()
    assert replaced[changed == MASK].eq(IGNORED).all()
    asked = is_real & (changed != MASK)
    assert set(torch.nonzero(replaced == 1).flatten().tolist()) == set(batch.mlm_positions[slots[[0, 2]]].tolist())
    assert replaced[asked].ne(IGNORED).all()
    assert found.mlm_labels is batch.mlm_labels, "all of them are still predicted"


def test_words_are_drawn_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(20000, 1)
    drawn = sample(logits, torch.Generator().manual_seed(1))
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    assert (shares - logits[0].softmax(0)).abs().max() < 0.015
    assert drawn.equal(sample(logits, torch.Generator().manual_seed(1)))


def test_training_records_both_losses_and_resumes_to_the_bit(data: Path, generator: Path, tmp_path: Path) -> None:
    settings = helpers.tiny_settings(**rtd_settings(generator), train__deterministic=True)
    pretrain(settings, data, tmp_path / "run")
    steps = records(tmp_path / "run")
    for step in steps:
        assert step["loss"] == pytest.approx(step["mlm_loss"] + step["nsp_loss"] + 50 * step["rtd_loss"])
        assert 0.2 < step["rtd_accuracy"] <= 1
    assert steps[-1]["rtd_loss"] < steps[0]["rtd_loss"]
    assert "Replaced-token accuracy" in report(tmp_path / "run").read_text()
    expected = helpers.final_weights(tmp_path / "run")
    assert "replaced_words.score.weight" in expected
    resume(tmp_path / "run", from_step=3)
    resumed = helpers.final_weights(tmp_path / "run")
    assert all(expected[name].equal(resumed[name]) for name in expected)


@pytest.mark.usefixtures("c_kernels")
def test_the_kernels_train_alike_and_resume_to_the_bit(
    data: Path, generator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = rtd_settings(generator, **SHAPE, train__precision="bf16", train__deterministic=True)
    for kernels in ("plain", "fused"):
        pretrain(helpers.tiny_settings(**given, train__kernels=kernels), data, tmp_path / kernels)
        said, name = capsys.readouterr().out, {"plain": "plain PyTorch", "fused": "fused kernels"}[kernels]
        assert said.count(f"computing with {name}, bf16") == 2, "the run, and its generator"
    plain, fused = records(tmp_path / "plain"), records(tmp_path / "fused")
    assert [step["rtd_loss"] for step in fused] == pytest.approx([step["rtd_loss"] for step in plain], rel=0.02)
    expected = helpers.final_weights(tmp_path / "fused")
    resume(tmp_path / "fused", from_step=3)
    resumed = helpers.final_weights(tmp_path / "fused")
    assert all(expected[name].equal(resumed[name]) for name in expected)


@pytest.mark.usefixtures("c_kernels")
def test_a_generator_without_kernels(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its heads are too narrow; the run itself is computed by the kernels that it asks for."""
    pretrain(helpers.tiny_settings(**SHAPE, model__num_heads=4, train__max_steps=2), data, tmp_path / "narrow")
    given = rtd_settings(tmp_path / "narrow", train__precision="bf16", train__kernels="fused", train__max_steps=2)
    capsys.readouterr()
    pretrain(helpers.tiny_settings(**given), data, tmp_path / "run")
    said = capsys.readouterr().out
    assert "computing with fused kernels, bf16" in said
    assert "(1 x 32), computing with plain PyTorch, bf16" in said


def test_a_generator_gets_bins_of_the_runs_size(generator: Path) -> None:
    budget = 64 * (kernel_limits.MOST_TOKENS // 64 + 1)
    settings = helpers.tiny_settings(**rtd_settings(generator, train__precision="bf16", batch__token_budget=budget))
    assert "batch.token_budget" in kernel_limits.why_unfit(settings_of_generator(settings, settings.model))


def test_the_compiled_engine_compiles_each_shape_once(
    data: Path, generator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    given = rtd_settings(generator, **SHAPE, model__hidden_dropout=0, model__attention_dropout=0, train__max_steps=3)
    for kernels in ("plain", "compiled"):
        pretrain(helpers.tiny_settings(**given, train__kernels=kernels), data, tmp_path / kernels)
    assert "torch.compile has compiled" not in capsys.readouterr().err
    assert helpers.losses(tmp_path / "compiled") == pytest.approx(helpers.losses(tmp_path / "plain"), rel=1e-6)


def test_the_exported_model_is_a_usual_bert(data: Path, generator: Path, tmp_path: Path) -> None:
    pretrain(helpers.tiny_settings(**rtd_settings(generator)), data, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model")
    pretrain(helpers.tiny_settings(train__max_steps=1), data, tmp_path / "usual")
    export(tmp_path / "usual", tmp_path / "usual-model")
    names = [load_file(tmp_path / name / "model.safetensors").keys() for name in ("model", "usual-model")]
    assert names[0] == names[1]
    # The run is a generator, an initial model and an evaluated one as any other.
    settings = rtd_settings(tmp_path / "run", evaluate__data=data, train__max_steps=2)
    pretrain(helpers.tiny_settings(**settings), data, tmp_path / "next", init=str(tmp_path / "run"))


def test_the_run_keeps_its_generator(
    data: Path, generator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on when the generator is deleted; a copy that has changed is noticed."""
    export(generator, tmp_path / "generator")
    constant = {"schedule__decay": "constant", "schedule__warmup_steps": 2}
    settings = helpers.tiny_settings(**rtd_settings(tmp_path / "generator", train__deterministic=True, **constant))
    pretrain(settings, data, tmp_path / "run")
    assert "words are replaced by" in capsys.readouterr().out
    expected = helpers.final_weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "generator")
    resume(tmp_path / "run", from_step=3)
    resumed = helpers.final_weights(tmp_path / "run")
    assert all(expected[name].equal(resumed[name]) for name in expected)
    anneal(tmp_path / "run", tmp_path / "annealed", 2)
    weights = tmp_path / "run" / "generator" / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    with helpers.refused("changed-init", "generator"):
        resume(tmp_path / "run", from_step=3)


def test_words_that_are_only_padding_are_never_drawn(data: Path, generator: Path, tmp_path: Path) -> None:
    """Others' vocabularies may have rows without a word; these here would be drawn at once."""
    export(generator, tmp_path / "padded")
    path, config = tmp_path / "padded" / "model.safetensors", tmp_path / "padded" / "config.json"
    tensors, fields = load_file(path), json.loads(config.read_text())
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        tensors[name] = torch.cat([tensors[name], torch.full((10, *tensors[name].shape[1:]), 5.0)])
    save_file(tensors, path, metadata={"format": "pt"})
    config.write_text(json.dumps(fields | {"vocab_size": fields["vocab_size"] + 10}))
    pretrain(helpers.tiny_settings(**rtd_settings(tmp_path / "padded")), data, tmp_path / "run")
    assert len(helpers.losses(tmp_path / "run")) == 6


def test_a_generator_without_segments_guesses_for_pairs(data: Path, tmp_path: Path) -> None:
    single = {"model__num_segments": 1, "model__nsp": False, "train__max_steps": 2}
    pretrain(helpers.tiny_settings(**single), data, tmp_path / "generator")
    pretrain(helpers.tiny_settings(**rtd_settings(tmp_path / "generator")), data, tmp_path / "run")
    assert len(helpers.losses(tmp_path / "run")) == 6


def test_a_generator_that_does_not_fit_is_refused(data: Path, generator: Path, tmp_path: Path) -> None:
    with helpers.refused("conflicting-settings", "data.generator"):
        helpers.tiny_settings(model__rtd=50)
    with helpers.refused("conflicting-settings", "model.rtd"):
        helpers.tiny_settings(data__generator=generator)
    words = (data.parent / "vocab.txt").read_text().splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
    prepare([data.parent / "corpus.txt"], tmp_path / "other", vocab=tmp_path / "vocab.txt", max_seq_length=64)
    with helpers.refused("other-vocabulary", "data.generator", kind=AgreedError):
        pretrain(helpers.tiny_settings(**rtd_settings(generator)), tmp_path / "other", tmp_path / "run")
    for given in ({"model__rtd": 50}, {"data__generator": generator}):
        with helpers.refused("pretraining-only"):
            helpers.tiny_settings(task__name="tag", **given)
    export(generator, tmp_path / "headless")
    path = tmp_path / "headless" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("cls.predictions")}
    save_file(tensors, path, metadata={"format": "pt"})
    with helpers.refused("missing-tensors"):
        pretrain(helpers.tiny_settings(**rtd_settings(tmp_path / "headless")), data, tmp_path / "run")
    assert not (tmp_path / "run").exists()
