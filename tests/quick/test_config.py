"""Settings: precedence, types, ranges, contradictions, and what is said about each."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.recipe import GROUPS, Recipe, list_recipes, load_recipe, recipe_names
from bertrain.config.resolve import (
    RENAMED,
    differing,
    flatten_recipe,
    from_dict,
    in_family,
    override,
    parse_overrides,
    resolve,
    to_toml,
)
from bertrain.config.settings import Settings
from bertrain.training.task_settings import resolve_task
from tests import helpers

COMMANDS = ("pretrain", "mlperf run", "profile run")
GOLDEN = Path(__file__).parents[1] / "golden" / "recipes-of-8764bd3.json"
CHANGED_SINCE: dict[str, dict[str, Any]] = {
    "gpu-variability-4x16": {"log.telemetry": True},
    "intel-large-phase1": {"batch.bin_sequences": 64, "data.slice": "0:0.9"},
    "intel-large-phase2": {"batch.token_budget": 6912, "data.slice": "0.9:1"},
    "mlperf-intel-16x4x48": {"batch.bin_sequences": 48, "batch.token_budget": 13312},
    "mlperf-intel-8x4x64": {"batch.bin_sequences": 64},
    "mlperf-reference-448": {"batch.bin_sequences": 56, "batch.token_budget": 15552},
    "mlperf-samsung-128x8x16": {
        "batch.bin_sequences": 16,
        "batch.token_budget": 4480,
        "batch.shares": "6 3 2 5",
        "train.exchange_precision": "fp16",
    },
    "mlperf-samsung-171x8x12": {
        "batch.bin_sequences": 12,
        "batch.token_budget": 3648,
        "batch.shares": "4 2 2 4",
        "train.exchange_precision": "fp16",
    },
}
"""So that no rank idles, and every rank does what it does in the system itself."""


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_recipes_are_whole_and_say_how_to_run_them(recipe: Recipe) -> None:
    settings = resolve(recipe.name)
    assert from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    ways = [f"{command} {recipe.name} " for command in COMMANDS]
    ways = [f"finetune {settings.task.name}", "bertrain finetune"] if settings.task.name else ways
    assert any(way in recipe.about for way in ways)
    assert recipe.group in GROUPS
    assert len(recipe.headline) <= 120


NEW_SINCE = ("intel-squad", "finetune-tag", "modernbert-base", "bert-base-minutes")


def test_recipes_resolve_as_before_they_built_on_each_other() -> None:
    defaults = Settings().to_dict()
    resolved = {
        name: {
            f"{section}.{field}": value
            for section, fields in resolve(name).to_dict().items()
            for field, value in fields.items()
            if value != defaults[section][field]
        }
        for name in recipe_names()
    }
    expected = json.loads(GOLDEN.read_text())
    for name, changed in CHANGED_SINCE.items():
        expected[name] |= changed
    for name in ("finetune-glue", "finetune-squad"):  # since then the rate follows the width of the weights
        expected[name] |= {"optimizer.learning_rate": -1.0, "task.hold_out": 0.1}
    new = {name for name in resolved if name.endswith(("-literal", "-open")) or name in NEW_SINCE}
    assert {name: resolved[name] for name in resolved.keys() - new} == expected


@pytest.mark.parametrize("name", recipe_names())
def test_a_flattened_recipe_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    text = flatten_recipe(name)
    (tmp_path / "flat.toml").write_text(text)
    assert resolve(str(tmp_path / "flat.toml")) == resolve(name)
    for base in load_recipe(name)[:-1]:
        assert base.name in text.partition("\n[")[0]


def test_a_file_builds_on_recipes_and_on_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "bert-tiny"\n[train]\nseed = 5\nmax_steps = 7\n')
    (tmp_path / "longer.toml").write_text('base = "mine.toml"\n[train]\nmax_steps = 9\n')
    settings = resolve(str(tmp_path / "longer.toml"))
    assert (settings.train.seed, settings.train.max_steps, settings.model.hidden_size) == (5, 9, 128)
    (tmp_path / "mine.toml").write_text('base = "longer.toml"\n')
    with helpers.refused("recipe-cycle", "mine.toml", "longer.toml"):
        resolve(str(tmp_path / "mine.toml"))
    for base in ("bert-tyni", "none.toml"):
        (tmp_path / "mine.toml").write_text(f'base = "{base}"\n')
        with helpers.refused("unknown-base", "mine.toml", base):
            resolve(str(tmp_path / "mine.toml"))
    with helpers.refused("recipe-of-several", "mlperf-reference-256", "mlperf-reference-16384"):
        resolve("mlperf-reference")


def test_renamed_settings_are_read_in_files_and_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("[evaluate]\nat_once = 3\n")
    assert resolve("finetune-glue", settings_file=tmp_path / "old.toml").evaluate.batch_size == 3
    values = resolve("finetune-glue").to_dict()
    values["evaluate"]["at_once"] = values["evaluate"].pop("batch_size") + 4
    values["task"] |= {"name": "tag", "text_split": "signs"}
    assert from_dict(values).evaluate.batch_size == 4
    assert from_dict(values).task.text_split == "punctuation"
    assert (
        override(from_dict(values), {"task.text_split": "signs"}, also=("task.text_split",)).task.text_split
        == "punctuation"
    )
    for former, name in RENAMED.items():
        with helpers.refused("renamed-setting", former, name):
            resolve("finetune-glue", [(former, "1")])


def test_the_recipes_asked_for_are_there() -> None:
    assert {"bert-tiny", "bert-base-phase1", "bert-base-phase2", "bert-large-phase1", "bert-large-phase2"} <= set(
        recipe_names()
    )
    one, two = resolve("bert-large-phase1"), resolve("bert-large-phase2")
    assert (one.data.max_seq_length, one.data.max_predictions) == (128, 20)
    assert (two.data.max_seq_length, two.data.max_predictions) == (512, 76)
    assert two.model.padded_vocab_size == 30528


def test_command_line_over_file_over_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nseed = 5\nmax_steps = 7\n")
    settings = resolve("bert-tiny", [("train.max_steps", "9"), ("model.nsp", "false")], file)
    assert (settings.train.seed, settings.train.max_steps, settings.model.nsp) == (5, 9, False)
    assert settings.model.hidden_size == 128


def test_settings_of_several_words_are_also_lists(tmp_path: Path) -> None:
    """In a recipe, a settings file over it, config.json and Python; a list for any other setting is refused."""
    recipe, over = tmp_path / "mine.toml", tmp_path / "over.toml"
    recipe.write_text('base = "bert-tiny"\n[log]\ntrackers = ["tensorboard", "mlflow"]\n')
    settings = resolve(str(recipe))
    assert settings.log.trackers == "tensorboard,mlflow"
    assert resolve("bert-tiny", {"log.trackers": ["tensorboard", "mlflow"]}).log == settings.log
    assert settings == from_dict(tomllib.loads(to_toml(settings))), "as `train` writes recipe.toml"
    over.write_text('[log]\ntrackers = []\n[task]\nlabel = ["a", "b"]\nlanguages = ["de", "fr"]\n')
    finetuned = resolve_task("classify", settings_file=over)
    assert (finetuned.log.tracker_names(), finetuned.task.label, finetuned.task.languages) == ([], "a,b", "de,fr")
    for wrong, named in (('["tensorboard", "mlfow"]', "mlfow"), ("[1, 2]", "[1, 2]"), ('[["wandb"]]', "wandb")):
        recipe.write_text(f'base = "bert-tiny"\n[log]\ntrackers = {wrong}\n')
        with helpers.refused("invalid-value", "log.trackers", named):
            resolve(str(recipe))
    recipe.write_text('base = "bert-tiny"\n[data]\nvocab = ["a.txt", "b.txt"]\n')
    with helpers.refused("invalid-value", "data.vocab must be text"):
        resolve(str(recipe))


def test_bert_config_json_describes_the_model(tmp_path: Path) -> None:
    path = tmp_path / "bert_config.json"
    theirs = {
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.2,
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    }
    path.write_text(json.dumps(theirs))
    model = resolve("bert-tiny", [("model.config", str(path)), ("model.num_layers", "3")]).model
    assert (model.hidden_size, model.num_heads, model.hidden_dropout, model.num_layers) == (1024, 16, 0.2, 3)
    path.write_text(json.dumps(theirs | {"hidden_act": "relu"}))
    with helpers.refused("unsupported-activation", path, "'relu'"):
        resolve("bert-tiny", [("model.config", str(path))])
    with helpers.refused("unreadable-file", tmp_path / "none.json"):
        resolve("bert-tiny", [("model.config", str(tmp_path / "none.json"))])


@pytest.mark.parametrize(
    ("key", "value", "code", "named"),
    [
        ("model.hiden_size", "8", "unknown-setting", ["model.hiden_size", "model.hidden_size"]),
        ("train.learning_rate", "1", "unknown-setting", ["optimizer.learning_rate"]),
        ("train.max_steps", "ten", "invalid-value", ["train.max_steps", "ten"]),
        ("optimizer.learning_rate", "fast", "invalid-value", ["optimizer.learning_rate", "fast"]),
        ("model.nsp", "maybe", "invalid-value", ["model.nsp", "maybe"]),
        (
            "optimizer.name",
            "lam",
            "invalid-value",
            ["lamb, adamw, stableadamw, muon, madgrad, acclip", "did you mean 'lamb'"],
        ),
        ("model.pad_vocab_to", "7", "invalid-value", ["model.pad_vocab_to", "1, 8, 64"]),
        ("train.max_steps", "0", "out-of-range", ["train.max_steps", "at least 1"]),
        ("train.max_steps", "9" * 400, "out-of-range", ["train.max_steps", "400 digits"]),
        ("model.hidden_dropout", "1.5", "out-of-range", ["model.hidden_dropout", "1.5", "0.99"]),
        ("optimizer.learning_rate", "nan", "out-of-range", ["optimizer.learning_rate", "nan"]),
        ("model.num_heads", "3", "indivisible-heads", ["128", "3"]),
        ("data.max_seq_length", "600", "sequence-too-long", ["600", "512"]),
        ("model.global_theta", "5000", "other-family", ["model.global_theta 5000", "modern", "bert"]),
        ("model.local_window", "64", "other-family", ["model.local_window 64", "modern", "bert"]),
        ("batch.tokens", "4096", "step-size", ["batch.sequences", "batch.tokens", "both"]),
        ("batch.sequences", "0", "step-size", ["batch.sequences", "batch.tokens", "neither"]),
        ("batch.token_budget", "100", "bin-too-small", ["100", "128"]),
        ("data.max_predictions", "128", "too-many-predictions", ["data.max_predictions 128"]),
        ("schedule.decay_steps", "50", "conflicting-settings", ["schedule.decay_steps 50", "100"]),
        ("evaluate.every_samples", "10", "no-evaluation-data", ["evaluate.every_samples", "evaluate.data"]),
        ("checkpoint.keep_best", "true", "no-evaluation-data", ["checkpoint.keep_best", "evaluate.data"]),
        ("evaluate.every_epochs", "2", "finetuning-only", ["evaluate.every_epochs"]),
        ("data.slice", "0.9", "invalid-slice", ["'0.9'", "0:0.9"]),
        ("data.slice", "0.9:0.9", "invalid-slice", ["'0.9:0.9'"]),
        ("data.slice", "0:1.1", "invalid-slice", ["'0:1.1'"]),
        ("data.slice", "-0.1:1", "invalid-slice", ["'-0.1:1'"]),
        ("data.slice", "0:1e-9", "invalid-slice", ["'0:1e-9'"]),
        ("train.max_time", "soon", "invalid-duration", ["train.max_time", "soon"]),
        ("train.max_time", "9" * 5000 + "h", "invalid-duration", ["train.max_time"]),
        ("train.fits", "1:" + "9" * 5000, "invalid-fits", ["train.fits"]),
        ("data.slice", "0:0." + "9" * 5000, "invalid-slice", ["data.slice"]),
        ("batch.shares", "9" * 5000, "invalid-shares", ["batch.shares"]),
        ("train.skip_steps", "0-4", "invalid-steps", ["train.skip_steps", "0-4"]),
        ("batch.group_size", "2", "conflicting-settings", ["batch.group_size 2", "exchange", "budget"]),
        ("checkpoint.keep", "1", "out-of-range", ["checkpoint.keep", "at least 2"]),
    ],
)
def test_settings_that_are_refused(key: str, value: str, code: str, named: list[str]) -> None:
    with helpers.refused(code, *named) as caught:
        resolve("bert-tiny", [("data.max_seq_length", "128"), (key, value)])
    assert "\n" not in str(caught.value)


def test_a_family_has_defaults_of_its_own() -> None:
    modern = resolve("bert-tiny", {"model.family": "modern"})
    assert (modern.model.nsp, modern.model.max_positions, modern.data.mask_probability) == (False, 512, 0.3)
    assert (modern.model.hidden_dropout, modern.model.layer_norm_eps) == (0.0, 1e-5)
    given = resolve("bert-tiny", {"model.family": "modern", "data.mask_probability": 0.15, "model.hidden_dropout": 0.2})
    assert (given.data.mask_probability, given.model.hidden_dropout) == (0.15, 0.2)
    assert resolve("modernbert-base").model.windows[:5] == (None, 64, 64, None, 64)
    assert resolve("bert-tiny").model.windows == (None,) * 2


def test_settings_of_bert_are_refused_for_modern() -> None:
    for key, value in (("nsp", "true"), ("num_segments", "3"), ("initial_heads", "neighbours")):
        with helpers.refused("other-family", f"model.{key} {value}", "bert", "modern"):
            resolve("bert-tiny", {"model.family": "modern", f"model.{key}": value})
    with helpers.refused("indivisible-heads", "15"):
        resolve("bert-tiny", {"model.family": "modern", "model.hidden_size": 30, "model.num_heads": 2})


def test_settings_follow_the_family_of_weights() -> None:
    settings = in_family(resolve("bert-base", {"model.hidden_dropout": 0.1}), "modern")
    assert (settings.model.nsp, settings.model.hidden_dropout, settings.data.mask_probability) == (False, 0.1, 0.3)
    assert settings.model.attention_dropout == 0
    back = in_family(settings, "bert")
    assert (back.model.nsp, back.data.mask_probability, back.model.attention_dropout) == (True, 0.15, 0.1)
    assert in_family(back, "bert") is back


def test_command_lines_that_are_no_settings() -> None:
    assert parse_overrides(["--a.b", "1", "--c.d=2"]) == [("a.b", "1"), ("c.d", "2")]
    for words, code in (
        (["extra"], "unknown-option"),
        (["--a.b"], "missing-value"),
        (["--a.b", "--c"], "missing-value"),
    ):
        with helpers.refused(code, words[0]):
            parse_overrides(words)


def test_recipes_that_are_not(tmp_path: Path) -> None:
    with helpers.refused("unknown-recipe", "bert-tyni", "did you mean 'bert-tiny'"):
        resolve("bert-tyni")
    with helpers.refused("unreadable-file", tmp_path / "none.toml"):
        resolve(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    for text, code, named in (
        ("[model\n", "invalid-toml", broken),
        ("[modle]\nnsp = true\n", "unknown-section", "did you mean 'model'"),
        ('[model]\nnsp = "true"\n', "invalid-value", "model.nsp"),
        ("base = 3\n", "invalid-value", "base"),
        ("model = 3\n", "invalid-value", "[model]"),
        (f"[optimizer]\nlearning_rate = {'9' * 400}\n", "out-of-range", "400 digits"),
    ):
        broken.write_text(text)
        with helpers.refused(code, named):
            resolve(str(broken))


def test_differing_names_the_fields() -> None:
    one, other = resolve("bert-tiny"), resolve("bert-tiny", [("train.seed", "2")])
    assert differing(one, other) == ["train.seed (1 here, 2 there)"]
    assert differing(one, one) == []


def test_the_path_of_a_model_is_absolute_and_does_not_shape_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job or a run may be continued from another folder, or from runs whose paths were relative."""
    (tmp_path / "model.json").write_text('{"hidden_size": 32, "num_attention_heads": 2}')
    monkeypatch.chdir(tmp_path)
    one = resolve("bert-tiny", [("model.config", "model.json")])
    assert one.model.config == str(tmp_path / "model.json")
    assert one.model.hidden_size == 32
    assert differing(one, replace(one, model=replace(one.model, config="model.json"))) == []


def test_a_slice_is_cut_where_it_was_written() -> None:
    """In exact fractions: as floats, 0.29 of 100 rows would be 28."""
    for part, rows in (("", range(100)), ("0:0.29", range(29)), ("0.29:1", range(29, 100)), (".5:1.", range(50, 100))):
        assert resolve("bert-tiny", [("data.slice", part)]).data.rows(100) == rows
    one, other = resolve("bert-tiny", [("data.slice", "0:0.9")]), resolve("bert-tiny")
    assert differing(one, other) == ["data.slice (0:0.9 here,  there)"]


def test_a_target_above_what_can_be_reached_is_refused(tmp_path: Path) -> None:
    with helpers.refused("bad-target", "72", "at most 1"):
        resolve("bert-tiny", {"evaluate.target_accuracy": 72, "evaluate.data": tmp_path})


def test_a_family_that_is_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[model]\nfamily = ["modern"]\n')
    with helpers.refused("invalid-value", "model.family"):
        resolve(str(tmp_path / "own.toml"))


def test_a_length_that_would_have_no_effect_is_refused(tmp_path: Path) -> None:
    repeated = tmp_path / "recipe.toml"
    repeated.write_text('base = "bert-tiny"\n[train]\nfits = "4:90,30:84"\n')
    with helpers.refused("conflicting-settings", "train.fits", repeated):
        resolve(str(repeated), {"train.max_steps": 3})
    assert resolve(str(repeated), {"train.max_steps": 3, "train.fits": ""}).train.last_step() == 3
    assert resolve(str(repeated)).train.last_step() == 84
