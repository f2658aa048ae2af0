"""Sizes that pre-training takes from the data, and from the weights of --init, where the user set none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.formats.source import open_data
from bertrain.model.families import new_model
from bertrain.training.resolved_run import ResolvedRun, resolve_run
from bertrain.weights.export import export
from bertrain.weights.huggingface import write_folder
from bertrain.weights.tensors import Weights
from tests import helpers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("sizes"), max_seq_length=48)


def resolved(data: Path, recipe: str = "bert-tiny", init: str = "", **given: object) -> ResolvedRun:
    pairs = {key.replace("__", "."): value for key, value in given.items()}
    return resolve_run(resolve(recipe, pairs), data, None, init=init)


@pytest.mark.parametrize("recipe", ["bert-tiny", "bert-demo", "bert-mini", "bert-small", "bert-medium", "bert-base"])
def test_sizes_are_those_of_the_data(data: Path, recipe: str) -> None:
    run = resolved(data, recipe)
    assert (run.settings.model.vocab_size, run.settings.data.max_seq_length) == (helpers.vocab_size(), 48)
    assert run.settings.data.max_predictions == 8, "15 % of 48, rounded up"
    (note,) = [note for note in run.notes if "data.max_seq_length 48" in note]
    assert f"model.vocab_size {helpers.vocab_size()}" in note
    assert "data.max_predictions 8" in note


def test_sizes_that_the_user_set_are_kept_or_refused(data: Path) -> None:
    run = resolved(data, data__max_seq_length=100, data__max_predictions=5, model__vocab_size=helpers.vocab_size())
    assert (run.settings.data.max_seq_length, run.settings.data.max_predictions) == (100, 5)
    assert not any("from the data" in note for note in run.notes)
    assert resolved(data, data__max_seq_length=100).settings.data.max_predictions == 15
    with helpers.refused("vocabulary-size", "4000", helpers.vocab_size()):
        resolved(data, model__vocab_size=4000)
    with helpers.refused("example-too-long", "40"):
        resolved(data, data__max_seq_length=40)
    with helpers.refused("sequence-too-long", "48", "32"):
        resolved(data, model__max_positions=32)
    with helpers.refused("bin-too-small", "48", "40"):
        resolved(data, batch__token_budget=40)
    for key, value in (("data.max_seq_length", 4), ("model.vocab_size", 5)):
        with helpers.refused("out-of-range", key):
            resolve("bert-tiny", {key: value})
    with helpers.refused("out-of-range", "data.max_seq_length"):
        resolve("finetune-glue", {"data.max_seq_length": 0})


def test_epochs_set_the_steps(data: Path) -> None:
    rows = len(open_data(data))
    run = resolved(data, train__epochs=2.5, batch__sequences=16)
    assert run.settings.train.max_steps == -(-rows * 5 // 32)
    assert any(f"train.max_steps {run.settings.train.max_steps}" in note for note in run.notes)
    half = resolved(data, train__epochs=1, batch__sequences=16, data__slice="0:0.5")
    assert half.settings.train.max_steps == -(-(rows // 2) // 16)


@pytest.fixture(scope="module")
def weights(data: Path) -> Path:
    settings = helpers.tiny_settings().model
    tensors = dict(helpers.build_model(settings).state_dict())
    write_folder(data.parent / "exported", Weights("made", "", tensors, settings, open_data(data).vocabulary))
    return data.parent / "exported"


def shape(settings: Settings) -> tuple[int, ...]:
    model = settings.model
    return model.hidden_size, model.num_layers, model.num_heads, model.intermediate_size, model.max_positions


def test_the_shape_is_that_of_the_weights(data: Path, weights: Path) -> None:
    run = resolved(data, "bert-base", init=str(weights), optimizer__learning_rate=5e-5)
    assert shape(run.settings) == (32, 2, 2, 64, 64)
    assert any("model.hidden_size 32" in note for note in run.notes)
    assert shape(resolved(data, init=str(weights), model__hidden_size=32).settings) == (32, 2, 2, 64, 64)
    with helpers.refused("other-model", "model.hidden_size", "32", "48"):
        resolved(data, init=str(weights), model__hidden_size=48, model__num_heads=2)
    extended = resolved(data, init=str(weights), train__init_positions="extend", model__max_positions=80)
    assert shape(extended.settings) == (32, 2, 2, 64, 80)
    from_file = Settings(**{**vars(resolve("bert-tiny")), "given": None})
    with helpers.refused("shape-mismatch"):
        resolve_run(from_file, data, None, init=str(weights))


def test_the_family_is_that_of_the_weights(data: Path, tmp_path: Path) -> None:
    settings = helpers.tiny_settings(model__family="modern", model__local_window=8, model__global_theta=500).model
    tensors = dict(new_model(settings).state_dict())
    folder = tmp_path / "modern"
    write_folder(folder, Weights("made", "", tensors, settings, open_data(data).vocabulary))
    run = resolved(data, "bert-base", init=str(folder), optimizer__learning_rate=5e-5)
    model = run.settings.model
    assert (model.family, model.nsp, model.local_window, model.global_theta) == ("modern", False, 8, 500)
    assert (run.settings.data.mask_probability, run.settings.data.max_predictions) == (0.3, 15)
    assert any("model.family modern" in note and "30%" in note for note in run.notes)
    longer = resolved(data, "bert-base", init=str(folder), model__max_positions=4096, optimizer__learning_rate=5e-5)
    assert longer.settings.model.max_positions == 4096
    with helpers.refused("other-model", "bert", "modern"):
        resolved(data, init=str(folder), model__family="bert")
    with helpers.refused("other-family", "modern", "nvidia"):
        export(folder, tmp_path / "out", to="nvidia")


def test_a_learning_rate_for_new_models_is_warned_of(
    data: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(**given: object) -> bool:
        resolved(data, init=str(weights), **given).warn_of_rate()
        return "--lr" in capsys.readouterr().err

    assert warns()
    assert not warns(optimizer__learning_rate=1e-3), "the user chose it"
    assert warns(optimizer__name="muon"), "whose rates are those of adamw"
    assert not warns(optimizer__name="lamb"), "whose rates are larger, and whose recipes are made for --init"
