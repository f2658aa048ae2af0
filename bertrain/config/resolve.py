"""Resolve a run's settings from a recipe, a settings file and the command line; each overrides the one before.

`resolve` returns one `Settings`. It refuses unknown settings (suggesting the nearest name), wrong types, values out of
range and settings that contradict each other. Nothing here imports torch, so that the command line answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import tomllib
from collections.abc import Container, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bertrain.base.errors import UserError, nearest
from bertrain.base.files import absolute, read_text, reading
from bertrain.base.schema import JsonError, load_json
from bertrain.config import modernbert, roberta
from bertrain.config.choices import Family
from bertrain.config.model import FAMILY_DEFAULTS
from bertrain.config.recipe import Recipe, load_recipe, read_toml
from bertrain.config.settings import SECTIONS, ModelSettings, Settings

TYPES = {f"{section}.{name}": hint for section, kind in SECTIONS.items() for name, hint in get_type_hints(kind).items()}
"""The type of every setting."""
PATHS = ("model.config", "data.vocab", "data.generator", "evaluate.data")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
RENAMED = {"evaluate.at_once": "evaluate.batch_size", "log.tensorboard": "log.trackers"}
"""Settings by their former names, which the config.json of an older run may have."""
FORMER_VALUES: dict[str, dict[bool | str, str]] = {
    "log.tensorboard": {True: "auto", False: "none"},
    "task.text_split": {"signs": "punctuation"},
}
"""What the former values of a setting are called now."""
WORDS: dict[str, dict[str, str]] = tomllib.loads((resources.files("bertrain.config") / "words.toml").read_text())
SYNONYMS = {word: meaning for meaning, words in WORDS["settings"].items() for word in words.split()}
"""The setting that a word of another program means, or what to do instead."""
# Names in bert_config.json of the fields of ModelSettings; its other keys are ignored.
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

Overrides = Mapping[str, object] | Iterable[tuple[str, object]]
"""Settings and their values, such as {"train.max_steps": 200}, or pairs of the same; values may be text."""


def as_pairs(overrides: Overrides | None) -> list[tuple[str, str]]:
    items = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    return [(key, str(_join_list(value, key))) for key, value in items]


def resolve(recipe: str, overrides: Overrides | None = None, settings_file: str | Path | None = None) -> Settings:
    """One `Settings` from a recipe (a name or a TOML file), a settings file over it, and overrides over both.

    `overrides` is a dictionary, or pairs. Raises UserError for a setting that is unknown, has the wrong type, is out of
    range or contradicts another.

    Example: settings = bertrain.resolve("bert-tiny", {"train.max_steps": 20, "optimizer.learning_rate": 5e-4})
    """
    values = _join_layers(load_recipe(recipe))
    if settings_file is not None:
        path = Path(settings_file)
        _overlay(values, read_toml(read_text(path), str(path)), str(path))
    command_line: dict[str, dict[str, Any]] = {}
    pairs = as_pairs(overrides)
    for key, text in pairs:
        section, name = _split_key(key)
        command_line.setdefault(section, {})[name] = _parse_text(text, TYPES[key])
    _overlay(values, command_line, "the command line")
    family = str(values["model"].get("family", "bert"))
    for key, value in FAMILY_DEFAULTS.get(family, {}).items():  # an unknown family is refused with the other values
        section, name = _split_key(key)
        values[section].setdefault(name, value)
    settings = _with_absolute_paths(from_dict(values))
    given = frozenset({*dict(pairs), *named_in(settings_file)})
    if settings.train.fits and "train.max_steps" in given and "train.fits" not in given:
        why = f"train.fits of {recipe} sets the length of the run, so train.max_steps has no effect"
        raise UserError("conflicting-settings", f"{why}; leave it out, or add --train.fits ''")
    return dataclasses.replace(settings, given=given)


def in_family(settings: Settings, family: Family) -> Settings:
    """Settings for weights of another family: what is at its default, and not given, becomes that family's default."""
    if family == settings.model.family:
        return settings
    values, usual = settings.to_dict(), Settings().to_dict()
    values["model"]["family"] = family
    for key in {**FAMILY_DEFAULTS[settings.model.family], **FAMILY_DEFAULTS[family]}:
        section, name = _split_key(key)
        was = FAMILY_DEFAULTS[settings.model.family].get(key, usual[section][name])
        if values[section][name] == was and key not in (settings.given or ()):
            values[section][name] = FAMILY_DEFAULTS[family].get(key, usual[section][name])
    return dataclasses.replace(from_dict(values), given=settings.given)


def named_in(settings_file: str | Path | None) -> dict[str, str]:
    """The settings that a file names, such as "train.max_steps", as text."""
    if settings_file is None:
        return {}
    sections = read_toml(read_text(Path(settings_file)), str(settings_file))
    return {
        f"{section}.{name}": str(_join_list(value, f"{section}.{name}"))
        for section, fields in sections.items()
        if isinstance(fields, dict)
        for name, value in fields.items()
    }


def override(settings: Settings, overrides: Overrides, *, also: Container[str] = ()) -> Settings:
    """A run's settings with others in place of some; settings that shape the training are refused, except `also`."""
    values = settings.to_dict()
    for key, text in as_pairs(overrides):
        section, name = _split_key(key)
        if _metadata(section, name)["shapes_training"] and key not in also:
            raise UserError("fixed-setting", f"{key} affects the results, so a run cannot change it; start a new run")
        values[section][name] = _parse_text(text, TYPES[key])
    return _with_absolute_paths(from_dict(values))


def parse_overrides(arguments: list[str], options: Iterable[str] = ()) -> list[tuple[str, str]]:
    """`--section.field VALUE` and `--section.field=VALUE` as pairs; `options` are suggested for a misspelt one."""
    pairs = []
    words = iter(arguments)
    for word in words:
        if not word.startswith("--") or len(word) == 2:
            raise UserError(
                "unknown-option",
                f"{word!r} is neither an option nor a setting; write a setting as --section.field VALUE",
            )
        key, equals, value = word[2:].partition("=")
        if "." not in key:
            raise UserError("unknown-option", f"there is no option --{key}{_suggest(key, options)}")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UserError("missing-value", f"--{key} has no value; write --{key} VALUE")
        pairs.append((key, value))
    return pairs


def to_toml(settings: Settings) -> str:
    """Settings as a recipe that holds every one of them."""
    return _write_toml(settings.to_dict())


def _write_toml(sections: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, fields in sections.items():
        written = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
        lines += [f"[{section}]", *written, ""]  # as JSON, but TOML does not take every \u escape of JSON
    return "\n".join(lines)


def flatten_recipe(name: str) -> str:
    """A recipe as one TOML file with everything it builds on; a comment names its bases."""
    *bases, recipe = layers = load_recipe(name)
    comments = recipe.about.splitlines()
    if bases:
        comments.append(f"Builds on {', '.join(base.name for base in reversed(bases))}.")
    text = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return text + "\n" + _write_toml({section: fields for section, fields in _join_layers(layers).items() if fields})


def _join_layers(layers: list[Recipe]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for layer in layers:
        _overlay(values, layer.settings, layer.name)
    return values


def _with_absolute_paths(settings: Settings) -> Settings:
    """Make paths absolute: a run may be continued from another folder than the one it was started in."""
    for section, name in map(_split_key, PATHS):
        part = getattr(settings, section)
        part = dataclasses.replace(part, **{name: absolute(getattr(part, name))})
        settings = dataclasses.replace(settings, **{section: part})
    return settings


def absolute_overrides(overrides: Overrides | None) -> dict[str, str]:
    """Settings that are kept as text, such as those of a sweep, with paths that hold in any folder."""
    return {key: absolute(value) if key in PATHS else value for key, value in as_pairs(overrides)}


def from_dict(values: dict[str, dict[str, Any]]) -> Settings:
    """Settings from nested plain values (a run's config.json, also of an older run), checked as a recipe is."""
    return Settings(
        **{
            section: SECTIONS[section](**_checked(section, _with_new_names(section, fields)))
            for section, fields in values.items()
        }
    ).check()


def _with_new_names(section: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A section of a file with the settings and values that were renamed as they are called now."""
    renamed = {}
    for name, value in fields.items():
        key = f"{section}.{name}"
        if isinstance(value, bool | str):
            value = FORMER_VALUES.get(key, {}).get(value, value)
        renamed[RENAMED.get(key, key).partition(".")[2]] = value
    return renamed


def _checked(section: str, fields: dict[str, Any]) -> dict[str, Any]:
    checked = {}
    for name, value in fields.items():
        _split_key(f"{section}.{name}")
        hint = TYPES[f"{section}.{name}"]
        checked[name] = _check_value(value, hint, f"{section}.{name}", _metadata(section, name))
    return checked


def describe(section: str | None = None) -> list[dict[str, Any]]:
    """Every setting, or those of one section: name, default, help, shapes_training and experimental."""
    return [
        {"name": f"{part}.{item.name}", "default": item.default}
        | {key: item.metadata[key] for key in ("help", "shapes_training", "experimental")}
        for part, kind in SECTIONS.items()
        if section in (None, part)
        for item in dataclasses.fields(kind)
    ]


def find_settings(query: str) -> list[dict[str, Any]]:
    """The settings that a section, a name or any words mean: those with the words in their name first, then in help."""
    if query in SECTIONS:
        return describe(query)
    words = [re.compile(rf"\b{re.escape(word)}") for word in re.split(r"[\s_.-]+", query.lower())]
    meant = SYNONYMS.get(re.sub(r"[\s-]+", "_", query.lower()), query)

    def rank(entry: dict[str, Any]) -> int:
        name = re.sub(r"[._]", " ", entry["name"])
        texts = (name, f"{name} {entry['help']}".lower())
        return 0 if entry["name"] == meant else 1 + sum(not all(word.search(text) for word in words) for text in texts)

    found = sorted((entry for entry in describe() if rank(entry) < 3), key=rank)
    if not found:
        in_names = sorted({*SECTIONS, *(word for name in TYPES for word in re.split(r"[._]", name))})
        suggestion = (_suggest(query) if query in SYNONYMS else nearest(query, in_names)) or _suggest(query)
        raise UserError("unknown-setting", f"no setting matches {query!r}{suggestion}")
    return found


def differing(one: Settings, other: Settings) -> list[str]:
    """The settings that shape the training and differ between two runs, as `section.field (1 here, 2 there)`."""
    others = other.to_dict()
    return [
        f"{section}.{name} ({value} here, {others[section][name]} there)"
        for section, fields in one.to_dict().items()
        for name, value in fields.items()
        if others[section][name] != value
        and _metadata(section, name)["shapes_training"]
        and (section, name) != ("model", "config")  # a path; what it describes is compared
    ]


def _read_bert_config(path: Path) -> dict[str, Any]:
    try:
        with reading(f"{path} (model.config)"):
            raw = load_json(path, {})
    except JsonError as error:
        raise UserError("invalid-json", f"{path} (model.config): {error}") from None
    if raw.get("model_type") == modernbert.MODEL_TYPE:
        return modernbert.read_config(raw, path)
    if "hidden_size" not in raw:
        raise UserError("not-a-bert", f"{path} (model.config) does not describe a BERT: it has no hidden_size")
    if (width := raw.get("embedding_size", raw["hidden_size"])) != raw["hidden_size"]:
        shape = f"embedding_size {width!r} and hidden_size {raw['hidden_size']!r}"
        raise UserError("factorized-embedding", f"{path} has {shape}: a factorized embedding, as in ALBERT; use a BERT")
    if raw.get("hidden_act", "gelu") != "gelu":
        activation = raw["hidden_act"]
        raise UserError(
            "unsupported-activation", f"{path} (model.config) has activation {activation!r}; bertrain has only gelu"
        )
    fields = {ours: raw[theirs] for theirs, ours in BERT_CONFIG_KEYS.items() if theirs in raw}
    if raw.get("model_type") == roberta.MODEL_TYPE:
        return roberta.adapt_fields(fields, raw, path)
    if fields.get("num_segments") == 1:
        raise UserError(
            "not-a-bert", f"{path} has type_vocab_size 1, as RoBERTa has, but another model_type; BERT has 2"
        )
    return fields


def model_from_bert_config(path: Path) -> ModelSettings:
    """The model that a bert_config.json (or a Hugging Face config.json of BERT, RoBERTa or ModernBERT) describes."""
    return ModelSettings(**_checked("model", _read_bert_config(path))).check()


def _overlay(values: dict[str, dict[str, Any]], layer: dict[str, Any], origin: str) -> None:
    """Override `values` by the settings of one source; its model.config (a bert_config.json) yields to its others."""
    for section, fields in layer.items():
        if section not in SECTIONS:
            suggestion = nearest(section, list(SECTIONS))
            raise UserError("unknown-section", f"{origin} has an unknown section {section!r}{suggestion}")
        if not isinstance(fields, dict):
            raise UserError("invalid-value", f"{origin}: {section} is a section; write it as [{section}]")
        if section == "model" and fields.get("config"):
            values["model"].update(_read_bert_config(Path(str(fields["config"]))))
        for name, value in _with_new_names(section, fields).items():
            _split_key(f"{section}.{name}")
            values[section][name] = value


def _split_key(key: str) -> tuple[str, str]:
    if key in RENAMED:
        raise UserError("renamed-setting", f"{key} was renamed; use {RENAMED[key]}")
    section, _, name = key.partition(".")
    if key not in TYPES:
        raise UserError("unknown-setting", f"no setting named {key!r}{_suggest(key)}")
    return section, name


def _suggest(key: str, options: Iterable[str] = ()) -> str:
    """What to type instead of an unknown setting or option, to append to a sentence."""
    word = key.replace("-", "_")
    meant = SYNONYMS.get(word, "")
    if meant and meant not in TYPES:
        return f"; {meant}"
    candidates = [meant] if meant else [name for name in TYPES if name.endswith(f".{word.rpartition('.')[2]}")]
    if candidates:
        return f"; did you mean {candidates[0]!r}?"
    return nearest(f"--{key}", [*options, *(f"--{name}" for name in TYPES)]) if options else nearest(key, list(TYPES))


def _metadata(section: str, name: str) -> dict[str, Any]:
    return next(dict(item.metadata) for item in dataclasses.fields(SECTIONS[section]) if item.name == name)


def _parse_text(text: str, hint: Any) -> Any:
    """A command-line word as a value of a field's type, or unchanged if it is none, which `_check_value` refuses."""
    if get_origin(hint) is Literal:
        return {str(choice): choice for choice in get_args(hint)}.get(text, text)
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return hint(text)
    except ValueError:
        return text


def _join_list(value: Any, key: str) -> Any:
    """The words of a list as the text of a setting that takes several; any other value unchanged."""
    is_list = key in TYPES and _metadata(*key.split("."))["is_list"]
    if not is_list or not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        return value
    return ",".join(value)


def _check_value(value: Any, hint: Any, key: str, limits: dict[str, Any]) -> Any:
    value = _join_list(value, key)
    if get_origin(hint) is Literal:
        if value not in get_args(hint) or isinstance(value, bool):
            choices = [str(choice) for choice in get_args(hint)]
            wrong = f"{key} must be one of {', '.join(choices)}, not {value!r}"
            raise UserError("invalid-value", wrong + nearest(str(value), choices))
        return value
    if type(value) is int and abs(value) > sys.float_info.max:
        raise UserError("out-of-range", f"{key} is a number of {len(str(value))} digits; give a smaller one")
    if hint is float and type(value) is int:
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError("invalid-value", f"{key} must be {KINDS[hint]}, not {value!r}")
    if hint in (int, float):
        problem = ""
        if not math.isfinite(value):
            problem = "a finite number"
        elif limits["minimum"] is not None and value < limits["minimum"] and not (limits["or_zero"] and value == 0):
            problem = f"at least {limits['minimum']}"
        elif limits["maximum"] is not None and value > limits["maximum"]:
            problem = f"at most {limits['maximum']}"
        if problem:
            raise UserError("out-of-range", f"{key} is {value}; it must be {problem}")
    return value
