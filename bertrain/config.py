"""Every setting of a run, typed, with its help beside it, checked together.

A run is described by a recipe (a TOML file), optionally a settings file laid over it, and overrides from
the command line (`--section.field VALUE`), in that order of precedence. `resolve` turns the three into one
`Settings`, refusing unknown keys (with the nearest right one), wrong types, values out of range and
settings that contradict each other. Nothing here imports torch, so that the command line answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bertrain.data.choices import Algorithm, PolicyName
from bertrain.errors import UserError, nearest


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    shapes_training: bool = True,
) -> Any:
    """A dataclass field with its help, its inclusive range, and whether another value is another training."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "shapes_training": shapes_training}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What the network is. The defaults are BERT-Base, uncased."""

    config: str = setting("", "a bert_config.json that describes the model; settings given beside it win")
    vocab_size: int = setting(30522, "words in the vocabulary", minimum=6)
    hidden_size: int = setting(768, "width of the encoder", minimum=1)
    num_layers: int = setting(12, "encoder layers", minimum=1)
    num_heads: int = setting(12, "attention heads; must divide hidden_size", minimum=1)
    intermediate_size: int = setting(3072, "width of the feed-forward layer", minimum=1)
    max_positions: int = setting(512, "longest sequence the position embeddings can hold", minimum=3)
    num_segments: int = setting(2, "segment (token type) embeddings", minimum=2)
    hidden_dropout: float = setting(0.1, "dropout after embeddings and each dense layer", minimum=0, maximum=0.99)
    attention_dropout: float = setting(0.1, "dropout on attention probabilities", minimum=0, maximum=0.99)
    initializer_range: float = setting(0.02, "deviation of the truncated normal for weights", minimum=0)
    initial_heads: Literal["random", "neighbours"] = setting(
        "random",
        "how a fresh model begins. random: as BERT; neighbours: heads of the first layer begin by looking at the words "
        "next to theirs, which saves the first millions of tokens",
    )
    layer_norm_eps: float = setting(1e-12, "epsilon inside LayerNorm", minimum=0)
    nsp: bool = setting(True, "train next-sentence prediction beside masked words")
    pad_vocab_to: Literal[1, 8, 64] = setting(
        1, "pad the vocabulary's rows to a multiple of this (tensor cores like 8 or 64); no word is added"
    )

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def check(self) -> ModelSettings:
        """Refuse a model that cannot be built; returns itself."""
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"model.hidden_size {self.hidden_size} is not a multiple of model.num_heads {self.num_heads}"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How examples become model input. The folder itself is `--data`."""

    max_seq_length: int = setting(128, "longest example, [CLS] and [SEP] included", minimum=5)
    max_predictions: int = setting(20, "most masked words in one example", minimum=1)
    mask_probability: float = setting(0.15, "share of an example's tokens to predict", minimum=0.001, maximum=0.5)
    whole_word: bool = setting(False, "mask whole words instead of single word pieces")
    slice: str = setting("", "the part of the rows to train on, in their order on disk, such as 0:0.9; empty: all")
    vocab: str = setting(
        "",
        "vocabulary of HDF5 or TFRecord data; empty: the vocab.txt beside it, or BERT's uncased one",
        shapes_training=False,
    )
    verify: Literal["hash", "size"] = setting(
        "hash",
        "check each shard's SHA-256 at the start, or only its size (quicker on a terabyte)",
        shapes_training=False,
    )

    def rows(self, num_rows: int) -> range:
        """The rows that `slice` leaves of so many: 0:0.9 and 0.9:1 have none in common and miss none."""
        begin, end = _parse_slice(self.slice)
        return range(int(begin * num_rows), int(end * num_rows))


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What one optimizer step consumes, and how much of it a device computes at once."""

    sequences: int = setting(0, "examples in a step; 0: measured in tokens", minimum=0)
    tokens: int = setting(0, "real tokens in a step, at the most; 0: measured in sequences", minimum=0)
    token_budget: int = setting(
        4096, "tokens a device computes at once (a bin): memory and speed; only dropout draws depend on it", minimum=8
    )
    policy: PolicyName = setting(
        "budget",
        "budget: bins of whole examples, evenly filled; padded: each example padded to max_seq_length; bins: an equal "
        "share of short and long ones to each; exchange: sorted, dealt in snake order; packed: by rows of "
        "max_seq_length",
    )
    group_size: int = setting(
        0, "exchange: ranks whose bins are dealt together; it divides their number; 0: all bins of a step", minimum=0
    )
    packing: Algorithm = setting(
        "lpfhp", "packed: rows by longest pack first, shortest pack first, or non-negative least squares (slow)"
    )
    bin_sequences: int = setting(0, "most examples in a bin; 0: half as many again as fit on average", minimum=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The update rule and its clipping."""

    name: Literal["lamb", "adamw"] = setting("lamb", "update rule")
    learning_rate: float = setting(4e-4, "base learning rate, scaled by the schedule", minimum=0)
    beta1: float = setting(0.9, "decay of the first moment", minimum=0, maximum=0.999999)
    beta2: float = setting(0.999, "decay of the second moment", minimum=0, maximum=0.999999)
    epsilon: float = setting(1e-6, "added to the root of the second moment", minimum=0)
    weight_decay: float = setting(0.01, "decoupled decay; biases and LayerNorm are left out", minimum=0)
    clip_norm: float = setting(1.0, "clip gradients to this global norm; 0: never", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Linear warm-up, then polynomial decay to zero."""

    warmup_steps: int = setting(0, "length of the linear warm-up", minimum=0)
    start_warmup_step: int = setting(0, "where the warm-up line starts; negative: it begins part way up", maximum=0)
    decay_steps: int = setting(0, "step at which the decay reaches zero; 0: train.max_steps", minimum=0)
    power: float = setting(1.0, "exponent of the decay", minimum=0)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The run as a whole."""

    max_steps: int = setting(1000, "optimizer steps in the run", minimum=1)
    seed: int = setting(1, "the one seed; order, masks, dropout and weights are derived from it", minimum=0)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU if there is one", shapes_training=False)
    precision: Literal["auto", "fp32", "bf16", "fp8"] = setting(
        "fp32",
        "of matrix products; weights and sums stay fp32. auto: bf16 where the hardware multiplies it (GPUs, CPUs with "
        "AMX), else fp32; fp8: Hopper GPUs and newer",
    )
    kernels: Literal["auto", "plain"] = setting(
        "auto", "auto: fused Triton kernels where they can run; plain: PyTorch alone", shapes_training=False
    )
    deterministic: bool = setting(False, "killed and resumed, the run ends bitwise equal to an undisturbed one")
    threads: int = setting(
        0, "CPU threads per rank; 0: the cores shared out among the local ranks", minimum=0, shapes_training=False
    )
    max_skipped_steps: int = setting(
        10,
        "end the run after this many non-finite steps in a row, none of them applied",
        minimum=1,
        shapes_training=False,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Held-out loss and accuracy during the run."""

    data: str = setting(
        "", "prepared folder to evaluate on; empty: no evaluation during training", shapes_training=False
    )
    every_samples: int = setting(
        0, "evaluate each time this many examples were trained on; 0: at the end", minimum=0, shapes_training=False
    )
    max_examples: int = setting(
        10000, "examples to evaluate on, evenly strided; 0: all", minimum=0, shapes_training=False
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is kept to go on from."""

    every_steps: int = setting(
        500, "save every so many steps, and always at the end; 0: only at the end", minimum=0, shapes_training=False
    )
    keep: int = setting(
        3, "whole checkpoints to keep; at least two, the newest may be the torn one", minimum=2, shapes_training=False
    )


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is said while it runs. metrics.jsonl always holds every step."""

    every_steps: int = setting(10, "a console line every so many steps", minimum=1, shapes_training=False)
    level: Literal["quiet", "normal", "verbose"] = setting("normal", "how much is said", shapes_training=False)
    style: Literal["auto", "bar", "lines"] = setting(
        "auto", "a live bar, or lines; auto: a bar on a terminal, lines elsewhere", shapes_training=False
    )
    tensorboard: bool = setting(True, "write TensorBoard events into the run folder", shapes_training=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run; a recipe is one of these."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def check(self) -> Settings:
        """Refuse settings that contradict each other; returns itself."""
        model, data, batch = self.model.check(), self.data, self.batch
        if data.max_seq_length > model.max_positions:
            raise UserError(
                f"data.max_seq_length {data.max_seq_length} is more than model.max_positions {model.max_positions}"
            )
        if data.max_predictions >= data.max_seq_length:
            raise UserError(
                f"data.max_predictions {data.max_predictions} leaves no context in "
                f"data.max_seq_length {data.max_seq_length}"
            )
        if bool(batch.sequences) == bool(batch.tokens):
            given = "both are" if batch.sequences else "neither is"
            raise UserError(f"a step is measured by batch.sequences or by batch.tokens, and {given} set; set one")
        if batch.token_budget < data.max_seq_length:
            raise UserError(
                f"batch.token_budget {batch.token_budget} cannot hold one example of "
                f"data.max_seq_length {data.max_seq_length}"
            )
        if batch.tokens and batch.tokens < data.max_seq_length:
            raise UserError(
                f"batch.tokens {batch.tokens} cannot hold one example of data.max_seq_length {data.max_seq_length}"
            )
        if batch.group_size and batch.policy != "exchange":
            raise UserError(
                f"batch.group_size {batch.group_size} is for batch.policy exchange, and the policy is {batch.policy}"
            )
        _parse_slice(data.slice)
        warmup_end = self.schedule.warmup_steps + self.schedule.start_warmup_step
        if 0 < self.schedule.decay_steps < warmup_end:
            raise UserError(
                f"the warm-up ends at step {warmup_end}, after schedule.decay_steps {self.schedule.decay_steps}, "
                "where the rate has reached zero"
            )
        if self.evaluate.every_samples and not self.evaluate.data:
            raise UserError("evaluate.every_samples is set, but evaluate.data names no folder to evaluate on")
        return self

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = get_type_hints(Settings)

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
    folder = resources.files("bertrain") / "recipes"
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


def override(settings: Settings, overrides: list[tuple[str, str]]) -> Settings:
    """A run's settings with some that do not shape the training changed; others are refused."""
    values = settings.to_dict()
    for key, text in overrides:
        section, name = _split_key(key)
        if _metadata(section, name)["shapes_training"]:
            raise UserError(f"{key} shapes the training, so a run cannot change it; start a new run")
        values[section][name] = _parse_text(text, get_type_hints(SECTIONS[section])[name], key)
    return _with_absolute_paths(from_dict(values))


def _parse_slice(text: str) -> tuple[Fraction, Fraction]:
    """Begin and end of `data.slice`, exactly as they were written."""
    parts = (text or "0:1").split(":")
    if len(parts) == 2 and all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part, re.ASCII) for part in parts):
        begin, end = map(Fraction, parts)
        if begin < end <= 1:
            return begin, end
    raise UserError(f"data.slice is {text!r}; give where to begin and end, from 0 to 1, such as 0:0.9 or 0.9:1")


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
    return (resources.files("bertrain") / "recipes" / f"{recipe}.toml").read_text()


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
