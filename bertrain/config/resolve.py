"""How a run's settings come together: a recipe (a TOML file), a settings file laid over it, and overrides from the
command line (`--section.field VALUE`), in that order of precedence.

`resolve` turns the three into one `Settings`, refusing unknown keys (with the nearest right one), wrong types, values
out of range and settings that contradict each other. Nothing here imports torch, so that the command line answers at
once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Container
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bertrain.base.errors import UserError, nearest
from bertrain.config.settings import SECTIONS, ModelSettings, Settings

# What bert_config.json calls the fields of ModelSettings; keys of other uses of that file are known and unused.
BERT_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": "num_segments",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package."""
    folder = resources.files("bertrain.config") / "recipes"
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def resolve(
    recipe: str,
    overrides: list[tuple[str, str]] | None = None,
    settings_file: str | Path | None = None,
) -> Settings:
    """One `Settings` from a recipe (a name or a TOML file), a settings file over it, and overrides over both.

    `overrides` are pairs such as ("model.nsp", "false"). Raises UserError with one sentence for whatever
    is unknown, ill-typed, out of range or contradictory.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    _overlay(values, _read_toml(recipe_text(recipe), recipe), recipe)
    if settings_file is not None:
        path = Path(settings_file)
        _overlay(values, _read_toml(_read_text(path, "settings"), str(path)), str(path))
    command_line: dict[str, dict[str, Any]] = {}
    for key, text in overrides or []:
        section, name = _split_key(key)
        hint = get_type_hints(SECTIONS[section])[name]
        command_line.setdefault(section, {})[name] = _parse_text(text, hint, key)
    _overlay(values, command_line, "the command line")
    return _with_absolute_paths(from_dict(values))


def named_in(settings_file: str | Path | None) -> dict[str, str]:
    """The settings that a file names, such as "train.max_steps", as text."""
    if settings_file is None:
        return {}
    sections = _read_toml(_read_text(Path(settings_file), "settings"), str(settings_file))
    return {
        f"{section}.{name}": str(value)
        for section, fields in sections.items()
        if isinstance(fields, dict)
        for name, value in fields.items()
    }


def override(settings: Settings, overrides: list[tuple[str, str]], *, also: Container[str] = ()) -> Settings:
    """A run's settings with some that do not shape the training changed, or that are named in `also`; others are
    refused."""
    values = settings.to_dict()
    for key, text in overrides:
        section, name = _split_key(key)
        if _metadata(section, name)["shapes_training"] and key not in also:
            raise UserError(f"{key} shapes the training, so a run cannot change it; start a new run")
        values[section][name] = _parse_text(text, get_type_hints(SECTIONS[section])[name], key)
    return _with_absolute_paths(from_dict(values))


def parse_overrides(arguments: list[str]) -> list[tuple[str, str]]:
    """`--section.field VALUE` and `--section.field=VALUE` as pairs."""
    pairs = []
    words = iter(arguments)
    for word in words:
        if not word.startswith("--") or len(word) == 2:
            raise UserError(f"{word!r} is neither an option nor a setting of the form --section.field VALUE")
        key, equals, value = word[2:].partition("=")
        if not equals:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise UserError(f"--{key} has no value after it")
            value = following
        pairs.append((key, value))
    return pairs


def to_toml(settings: Settings) -> str:
    """Settings as a recipe that holds every one of them; its strings and numbers are written as JSON's are."""
    lines = []
    for section, fields in settings.to_dict().items():
        written = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
        lines += [f"[{section}]", *written, ""]  # JSON's \u of what is beyond ASCII would not always be TOML's
    return "\n".join(lines)


def _with_absolute_paths(settings: Settings) -> Settings:
    """A run may be continued from another folder than the one it was started in."""
    folder, vocab = settings.evaluate.data, settings.data.vocab
    evaluate = dataclasses.replace(settings.evaluate, data=str(Path(folder).resolve()) if folder else "")
    data = dataclasses.replace(settings.data, vocab=str(Path(vocab).resolve()) if vocab else "")
    return dataclasses.replace(settings, evaluate=evaluate, data=data)


def from_dict(values: dict[str, dict[str, Any]]) -> Settings:
    """Settings from nested plain values (a run's config.json), checked as a recipe is."""
    return Settings(
        **{section: SECTIONS[section](**_checked(section, fields)) for section, fields in values.items()}
    ).check()


def _checked(section: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A section's values, each of its field's type and within its range."""
    checked = {}
    for name, value in fields.items():
        _split_key(f"{section}.{name}")
        hint = get_type_hints(SECTIONS[section])[name]
        checked[name] = _check_value(value, hint, f"{section}.{name}", _metadata(section, name))
    return checked


def describe(section: str | None = None) -> list[dict[str, Any]]:
    """Every setting, or those of one section: its name, default, help, and whether it shapes the training."""
    if section is not None and section not in SECTIONS:
        raise UserError(f"no section named {section!r}{nearest(section, list(SECTIONS))}")
    return [
        {
            "name": f"{part}.{item.name}",
            "default": item.default,
            "help": item.metadata["help"],
            "shapes_training": item.metadata["shapes_training"],
        }
        for part, kind in SECTIONS.items()
        if section in (None, part)
        for item in dataclasses.fields(kind)
    ]


def differing(one: Settings, other: Settings) -> list[str]:
    """The settings that shape the training and that two runs do not share, as `section.field (1 here, 2 there)`."""
    here, there = one.to_dict(), other.to_dict()
    return [
        f"{section}.{name} ({value} here, {there[section][name]} there)"
        for section, fields in here.items()
        for name, value in fields.items()
        if there[section][name] != value and _metadata(section, name)["shapes_training"]
    ]


def recipe_text(recipe: str) -> str:
    """A recipe's TOML, by its name or its file."""
    if recipe.endswith(".toml"):
        return _read_text(Path(recipe), "recipe")
    if recipe not in recipe_names():
        raise UserError(
            f"no recipe named {recipe!r}{nearest(recipe, recipe_names())} "
            f"(there are {', '.join(recipe_names())}, or give a .toml file)"
        )
    return (resources.files("bertrain.config") / "recipes" / f"{recipe}.toml").read_text()


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except OSError:
        raise UserError(f"no {what} file at {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"the {what} file {path} is not text") from None


def _read_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin} is not TOML: {error}") from None


def _read_bert_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except OSError:
        raise UserError(f"no model description at {path} (model.config)") from None
    except ValueError as error:
        raise UserError(f"{path} (model.config) is not JSON: {error}") from None
    if not isinstance(raw, dict) or "hidden_size" not in raw:
        raise UserError(f"{path} (model.config) does not describe a BERT: it has no hidden_size")
    if raw.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"{path} (model.config) asks for the activation {raw['hidden_act']!r}; BERT's is 'gelu'")
    return {ours: raw[theirs] for theirs, ours in BERT_CONFIG_KEYS.items() if theirs in raw}


def model_from_bert_config(path: Path) -> ModelSettings:
    """The model that a bert_config.json (or a Hugging Face config.json) describes."""
    return ModelSettings(**_checked("model", _read_bert_config(path))).check()


def _overlay(values: dict[str, dict[str, Any]], layer: dict[str, Any], origin: str) -> None:
    """Lay one source of settings over the others; a bert_config.json it names lies just under it."""
    for section, fields in layer.items():
        if section not in SECTIONS:
            raise UserError(f"{origin} has an unknown section {section!r}{nearest(section, list(SECTIONS))}")
        if not isinstance(fields, dict):
            raise UserError(f"{origin}: {section} is a section, written [{section}]")
        if section == "model" and fields.get("config"):
            values["model"].update(_read_bert_config(Path(str(fields["config"]))))
        for name, value in fields.items():
            _split_key(f"{section}.{name}")
            values[section][name] = value


def _split_key(key: str) -> tuple[str, str]:
    section, _, name = key.partition(".")
    known = [f"{part}.{item.name}" for part, kind in SECTIONS.items() for item in dataclasses.fields(kind)]
    if key not in known:
        same_field = [candidate for candidate in known if candidate.endswith(f".{name or section}")]
        hint = f"; did you mean {same_field[0]!r}?" if same_field else nearest(key, known)
        raise UserError(f"no setting named {key!r}{hint}")
    return section, name


def _metadata(section: str, name: str) -> dict[str, Any]:
    return next(dict(item.metadata) for item in dataclasses.fields(SECTIONS[section]) if item.name == name)


def _parse_text(text: str, hint: Any, key: str) -> Any:
    """A command-line word as a value of the field's type."""
    if get_origin(hint) is Literal:
        by_text = {str(choice): choice for choice in get_args(hint)}
        if text not in by_text:
            raise UserError(f"{key} is one of {', '.join(by_text)}, not {text!r}{nearest(text, list(by_text))}")
        return by_text[text]
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{key} is true or false, not {text!r}")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[hint]
        raise UserError(f"{key} is {kind}, not {text!r}") from None


def _check_value(value: Any, hint: Any, key: str, limits: dict[str, Any]) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint) or isinstance(value, bool):
            raise UserError(f"{key} is one of {', '.join(map(str, get_args(hint)))}, not {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
        raise UserError(f"{key} is {kind}, not {value!r}")
    if hint in (int, float):
        if not math.isfinite(value):
            raise UserError(f"{key} is {value}; it must be a finite number")
        if limits["minimum"] is not None and value < limits["minimum"]:
            raise UserError(f"{key} is {value}; it must be at least {limits['minimum']}")
        if limits["maximum"] is not None and value > limits["maximum"]:
            raise UserError(f"{key} is {value}; it must be at most {limits['maximum']}")
    return value
