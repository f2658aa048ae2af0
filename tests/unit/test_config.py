"""Settings: precedence, types, ranges, contradictions, and what is said about each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.base.errors import UserError
from bertrain.config.resolve import differing, from_dict, recipe_names, resolve

VERBS = ("pretrain", "mlperf run", "profile run")


@pytest.mark.parametrize("recipe", recipe_names())
def test_recipes_are_whole_and_say_how_to_run_them(recipe: str) -> None:
    settings = resolve(recipe)
    assert from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    text = (Path(__file__).parents[2] / "bertrain" / "recipes" / f"{recipe}.toml").read_text()
    ways = ["bertrain finetune"] if settings.task.name else [f"bertrain {verb} {recipe} --data" for verb in VERBS]
    assert any(way in text.partition("\n[")[0] for way in ways)


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
    with pytest.raises(UserError, match="'relu'"):
        resolve("bert-tiny", [("model.config", str(path))])
    with pytest.raises(UserError, match="no model description"):
        resolve("bert-tiny", [("model.config", str(tmp_path / "none.json"))])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model.hiden_size": "8"}, "no setting named 'model.hiden_size'; did you mean 'model.hidden_size'?"),
        ({"train.learning_rate": "1"}, "did you mean 'optimizer.learning_rate'?"),
        ({"train.max_steps": "ten"}, "train.max_steps is a whole number, not 'ten'"),
        ({"optimizer.learning_rate": "fast"}, "optimizer.learning_rate is a number, not 'fast'"),
        ({"model.nsp": "maybe"}, "model.nsp is true or false, not 'maybe'"),
        ({"optimizer.name": "lam"}, "one of lamb, adamw, madgrad, acclip, not 'lam'; did you mean 'lamb'?"),
        ({"model.pad_vocab_to": "7"}, "model.pad_vocab_to is one of 1, 8, 64"),
        ({"train.max_steps": "0"}, "train.max_steps is 0; it must be at least 1"),
        ({"model.hidden_dropout": "1.5"}, "model.hidden_dropout is 1.5; it must be at most 0.99"),
        ({"optimizer.learning_rate": "nan"}, "optimizer.learning_rate is nan; it must be a finite number"),
        ({"model.num_heads": "3"}, "model.hidden_size 128 is not a multiple of model.num_heads 3"),
        ({"data.max_seq_length": "600"}, "more than model.max_positions 512"),
        ({"batch.tokens": "4096"}, "both are set"),
        ({"batch.sequences": "0"}, "neither is set"),
        ({"batch.token_budget": "100"}, "cannot hold one example of data.max_seq_length 128"),
        ({"data.max_predictions": "128"}, "leaves no context"),
        ({"schedule.decay_steps": "50"}, "the warm-up ends at step 100, after schedule.decay_steps 50"),
        ({"evaluate.every_samples": "10"}, "evaluate.data names no folder"),
        ({"data.slice": "0.9"}, "data.slice is '0.9'; give where to begin and end, from 0 to 1, such as 0:0.9"),
        ({"data.slice": "0.9:0.9"}, "data.slice is '0.9:0.9'"),
        ({"data.slice": "0:1.1"}, "data.slice is '0:1.1'"),
        ({"data.slice": "-0.1:1"}, "data.slice is '-0.1:1'"),
        ({"data.slice": "0:1e-9"}, "data.slice is '0:1e-9'"),
        ({"batch.group_size": "2"}, "batch.group_size 2 is for batch.policy exchange, and the policy is budget"),
        ({"checkpoint.keep": "1"}, "checkpoint.keep is 1; it must be at least 2"),
    ],
)
def test_what_is_refused_and_how(overrides: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve("bert-tiny", list(overrides.items()))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_recipes_that_are_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no recipe named 'bert-tyni'; did you mean 'bert-tiny'\?"):
        resolve("bert-tyni")
    with pytest.raises(UserError, match="no recipe file"):
        resolve(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(UserError, match="is not TOML"):
        resolve(str(broken))
    broken.write_text("[modle]\nnsp = true\n")
    with pytest.raises(UserError, match="did you mean 'model'"):
        resolve(str(broken))
    broken.write_text('[model]\nnsp = "true"\n')
    with pytest.raises(UserError, match="nsp is true or false, not 'true'"):
        resolve(str(broken))


def test_differing_names_the_fields() -> None:
    one, other = resolve("bert-tiny"), resolve("bert-tiny", [("train.seed", "2")])
    assert differing(one, other) == ["train.seed (1 here, 2 there)"]
    assert differing(one, one) == []


def test_a_slice_is_cut_where_it_was_written() -> None:
    """In exact fractions: as floats, 0.29 of 100 rows would be 28."""
    for part, rows in (("", range(100)), ("0:0.29", range(29)), ("0.29:1", range(29, 100)), (".5:1.", range(50, 100))):
        assert resolve("bert-tiny", [("data.slice", part)]).data.rows(100) == rows
    one, other = resolve("bert-tiny", [("data.slice", "0:0.9")]), resolve("bert-tiny")
    assert differing(one, other) == ["data.slice (0:0.9 here,  there)"]
