"""What `bertrain train` chooses: the size of the model and how to train it, for a text, a machine and a budget.

The rules are arithmetic on a few facts, so that they can be read, tested and overridden. docs/how-to-train.md has
them as a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from bertrain.base.errors import UserError
from bertrain.base.formatting import compact, counted, duration, wrap
from bertrain.base.units import parse_duration
from bertrain.config.choices import MODERN_MASK_PROBABILITY, Size
from bertrain.config.model_size import count_parameters, training_flops
from bertrain.config.resolve import resolve
from bertrain.config.settings import ModelSettings, Settings

HELD_OUT = "held-out"  # the folder in OUT of the examples to evaluate on
GENERATOR = "generator"  # the folder in OUT of the run whose guesses replace words
SIZES = tuple(size for size in get_args(Size) if size != "auto")

LEARNING_RATES = {"tiny": 3e-3, "mini": 2e-3, "small": 1.5e-3, "medium": 1e-3, "base": 5e-4, "large": 4e-4}
VOCABULARIES = {"tiny": 6000, "mini": 8000, "small": 16000, "medium": 24000, "base": 30000, "large": 30000}
CONTINUED_RATE = 5e-5  # training that begins with trained weights
CHARACTERS_PER_TOKEN = 4.5
CHARACTERS_PER_WORD_PIECE = 200  # of text for each entry of a vocabulary; rarer pieces are hardly trained
TOKENS_PER_PARAMETER = 10  # of its encoder, that a model should read at least
PARAMETERS_PER_TOKEN = 4  # of the text: a larger model would learn it by heart
LEAST_TOKENS = 20_000  # of text; below it, nothing is learned that carries over
LEAST_DOCUMENTS = 20
STEPS = {"cpu": 3000, "gpu": 16_000}  # wanted: more steps of fewer tokens learn more, down to the smallest step
LEAST_STEP, LARGEST_STEP = 2048, 131_072  # tokens
LONG_RUN_S = 2 * 3600
HEADS = {"tiny": 4}  # where more heads than the recipe's learn faster
GENERATORS: dict[Size, Size] = {"base": "mini", "large": "mini"}  # sizes that learn from replaced words
GENERATOR_SHARE = 0.15  # of the budget, as in benchmarks/speedrun
RTD_WEIGHT = 50  # as in ELECTRA
EPOCHS_WITHOUT_DROPOUT = 20
EVALUATIONS = 10
SAVES = 8  # in a budget: what a kill may cost
LONG_VALUE = 40  # characters of a choice
FEW_TOKENS = 1.0  # for each parameter: with fewer, little but the frequencies of words is learned
MANY_EPOCHS = 200  # more teach a text by heart
LENGTHS = ("train.max_steps", "train.epochs")  # settings that replace the budget
SETTING_OF = {
    "step": ("batch.sequences", "batch.tokens"), "learning rate": ("optimizer.learning_rate",),
    "dropout": ("model.hidden_dropout",), "first heads": ("model.initial_heads",),
    "output bias": ("model.initial_bias",), "generator": ("model.rtd", "data.generator"),
    "length": ("data.max_seq_length",), "next sentence": ("model.nsp",), "masked words": ("data.mask_probability",),
}  # fmt: skip
"""The settings behind a choice, by its name; if the user sets one, the choice is not listed."""


@dataclass(frozen=True)
class Text:
    """The text to train on, counted after its extraction, or estimated before."""

    documents: int
    sentences: int
    characters: int

    @property
    def tokens(self) -> int:
        return int(self.characters / CHARACTERS_PER_TOKEN)


@dataclass(frozen=True)
class Machine:
    """The training device: `devices` GPUs, or one CPU, and the training speed of one, from a quick test."""

    name: str
    devices: int
    flops_per_s: float
    is_gpu: bool

    def tokens_in(self, seconds: float, settings: Settings) -> int:
        """Tokens that a model reads in `seconds`."""
        per_token = training_flops(settings.model, 1, settings.data.mask_probability, settings.data.max_seq_length)
        return int(seconds * self.devices * self.flops_per_s / per_token)


@dataclass(frozen=True)
class Choice:
    """A choice and its reason."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class TrainingPlan:
    """All choices, and the settings that follow from them."""

    recipe: str
    overrides: dict[str, str]
    vocabulary_size: int
    """Of a vocabulary to train; 0: that of the initial weights."""
    choices: tuple[Choice, ...]
    generator: TrainingPlan | None = None
    """Of a smaller BERT, to be trained first."""

    def overrides_in(self, out: Path) -> dict[str, str]:
        """The overrides, with the folders in OUT that the run reads besides its data."""
        folders = {"evaluate.data": HELD_OUT} | ({"data.generator": GENERATOR} if self.generator else {})
        return self.overrides | {key: str(out / name) for key, name in folders.items()}

    def settings(self, out: Path) -> Settings:
        """The settings of the run in OUT."""
        return resolve(self.recipe, self.overrides_in(out))

    def lines(self) -> list[str]:
        """The choices as a table, each with its reason; that of a long value, such as a path, has its own lines."""
        names = max(len(one.what) for one in self.choices)
        values = max((len(one.value) for one in self.choices if len(one.value) <= LONG_VALUE), default=0)
        column = names + values + 6
        lines: list[str] = []
        for one in self.choices:
            start, reason = f"  {one.what:<{names}}  {one.value:<{values}}  ", one.reason
            if len(start) > column:
                lines += wrap(start.rstrip(), indent=names + 2).split("\n")
                start = " " * column
            lines += wrap(start + reason, indent=column - len(start) + len(start.lstrip())).split("\n")
        return lines


@dataclass(frozen=True)
class Rules:
    """The results of the rules for a text, a machine and a budget."""

    size: Size
    why_size: str
    length: str
    has_pairs: bool
    vocabulary: int
    tokens: int
    """Number of tokens that the model reads within the budget."""
    epochs: float
    step: int
    """Tokens of a step."""
    rate: float
    dropout: str
    settings: Settings
    """With the size and the user's settings, for arithmetic."""
    generator: Size | None
    """The size of a BERT to be trained first, whose guesses replace words."""


def plan_training(
    text: Text,
    machine: Machine,
    *,
    budget: str,
    size: Size = "auto",
    init: str = "",
    initial: ModelSettings | None = None,
    given: Mapping[str, str] | None = None,
) -> TrainingPlan:
    """Choose for a text, a machine and a budget. `given` are settings of the user, which replace choices.

    `initial` is the model of the weights `init`; if it is unknown, a BERT-Base is assumed.
    """
    refuse_too_little(text)
    if size not in get_args(Size):
        raise UserError("invalid-value", f"--size is {size!r}; use {', '.join(get_args(Size))}")
    given, typed = dict(given or {}), tuple(given or {})
    if not given.keys().isdisjoint(SETTING_OF["step"]):  # the user's one sets the size, so the other is 0
        given = {"batch.sequences": "0", "batch.tokens": "0"} | given
    seconds = parse_duration(budget, "--budget")
    length = given.get("data.max_seq_length") or ("512" if seconds > LONG_RUN_S and machine.is_gpu else "128")
    no_pairs = _why_no_pairs(initial) if initial else ""
    has_pairs = not no_pairs and text.sentences >= 2 * text.documents
    overrides = {"data.max_seq_length": length, "model.nsp": str(has_pairs).lower()}
    if not init:
        overrides["model.max_positions"] = length  # others would never be trained
        overrides |= {"data.mask_probability": str(MODERN_MASK_PROBABILITY), "data.max_predictions": "0"}
    vocabulary = 0 if init else min(VOCABULARIES["large"], text.characters // CHARACTERS_PER_WORD_PIECE)
    size, why = ("tiny", "") if init else _choose_size(text, machine, seconds, size, overrides, vocabulary)
    vocabulary = min(vocabulary, VOCABULARIES[size])
    if size in HEADS and not init:
        overrides["model.num_heads"] = str(HEADS[size])
    settings = _sized(f"bert-{size}", overrides | given, vocabulary)
    if init:
        settings = replace(settings, model=replace(initial or resolve("bert-base").model, head="pretrain"))
    counts = [key for key in LENGTHS if key in given]
    may_generate = not init and not counts and given.keys().isdisjoint(SETTING_OF["generator"])
    generator = GENERATORS.get(size) if may_generate else None
    if generator:
        generator_seconds, seconds = GENERATOR_SHARE * seconds, (1 - GENERATOR_SHARE) * seconds
    tokens = machine.tokens_in(seconds, settings)
    epochs = tokens / text.tokens
    steps = STEPS["gpu" if machine.is_gpu else "cpu"]
    step = -(-min(LARGEST_STEP, max(LEAST_STEP, int(length), tokens // steps)) // 64) * 64  # rounded up
    rate = CONTINUED_RATE if init else LEARNING_RATES[size]
    dropout = "0.1" if epochs > EPOCHS_WITHOUT_DROPOUT or init else "0"
    rules = Rules(size, why, length, has_pairs, vocabulary, tokens, epochs, step, rate, dropout, settings, generator)
    left = f"{seconds:.0f}s" if generator else budget
    overrides |= _overrides(rules, "" if counts else left, seconds, is_new=not init) | given
    choices = _choices(rules, text, machine, budget, counts, init=init, no_pairs=no_pairs)
    choices = [one for one in choices if given.keys().isdisjoint(SETTING_OF.get(one.what, ()))]
    choices += [Choice(key, given[key], "as you set it") for key in typed]
    generator_plan = None
    if generator:  # with the settings of the data and of the machine; the others are for the model
        kept = {key: value for key, value in given.items() if key.startswith(("data.", "train.", "log."))}
        generator_plan = plan_training(text, machine, budget=f"{generator_seconds:.0f}s", size=generator, given=kept)
    return TrainingPlan(f"bert-{size}", overrides, vocabulary, tuple(choices), generator_plan)


def _overrides(rules: Rules, budget: str, seconds: float, *, is_new: bool) -> dict[str, str]:
    """The settings that follow from the rules; `is_new`: the model has no initial weights."""
    samples = rules.tokens // max(1, rules.settings.data.max_seq_length)
    overrides = {
        "model.hidden_dropout": rules.dropout,
        "model.attention_dropout": rules.dropout,
        "batch.sequences": "0",
        "batch.tokens": str(rules.step),
        "batch.auto": "true",
        "optimizer.learning_rate": f"{rules.rate:g}",
        "schedule.warmup_steps": "0",
        "schedule.warmup_share": "0.06",
        "train.budget": budget,
        "train.precision": "auto",
        "evaluate.every_samples": str(max(1, samples // EVALUATIONS)),
        "checkpoint.every_steps": "0",
        "checkpoint.every_minutes": f"{min(5.0, max(0.5, seconds / 60 / SAVES)):.3g}",
        "log.every_steps": "20",
    }
    if is_new:  # a short run would otherwise end before attention has found the neighbors
        overrides |= {"model.initial_heads": "neighbours", "model.initial_bias": "frequencies"}
    if rules.generator:
        overrides["model.rtd"] = str(RTD_WEIGHT)
    return overrides


def _choices(
    rules: Rules, text: Text, machine: Machine, budget: str, counts: Sequence[str], *, init: str, no_pairs: str
) -> list[Choice]:
    """The choices and their reasons; `counts` are the user's settings that replace the budget."""
    size, epochs, model = rules.size, rules.epochs, rules.settings.model
    choices = [
        Choice("budget", budget, f"for the size only: {counts[0]} is set" if counts else "training time; --budget"),
        Choice("device", machine.name, f"{machine.flops_per_s * machine.devices / 1e9:,.0f} GFLOP/s in a quick test"),
    ]
    if init:
        choices.append(Choice("weights", init, "size and vocabulary are theirs"))
    else:
        shape = f"{model.num_layers} x {model.hidden_size}, {count_parameters(model)[0] / 1e6:.1f} M parameters"
        choices.append(Choice("size", f"{size} ({shape})", rules.why_size))
        words = f"up to {rules.vocabulary:,}"
        choices.append(Choice("vocabulary", words, f"word pieces, from the text; for size {size}"))
    read, passes = compact(float(f"{rules.tokens:.2g}")), compact(float(f"{epochs:.2g}"))
    sentences = f"{text.sentences / text.documents:.1f} sentences in a document; pairs need 2"
    choices += [
        Choice("length", f"{rules.length} tokens", "512 on a GPU above 2 h, else 128"),
        Choice("step", f"{rules.step:,} tokens", f"about {read} tokens in the budget, {passes} epochs"),
        Choice("learning rate", f"{rules.rate:g}", "for continued training" if init else f"for size {size}"),
        Choice("dropout", rules.dropout, f"0.1 above {EPOCHS_WITHOUT_DROPOUT} epochs, or with --init"),
        Choice("next sentence", "yes" if rules.has_pairs else "no", no_pairs or sentences),
    ]
    if not init:
        heads = model.num_heads
        start = f"{heads} heads, which learn sooner" if heads == HEADS.get(size) else "a short run learns sooner"
        choices.append(Choice("masked words", f"{MODERN_MASK_PROBABILITY:.0%}", "learns more in equal time than 15 %"))
        choices.append(Choice("first heads", "on adjacent words", start))
        choices.append(Choice("output bias", "word frequencies", "so that training need not learn them first"))
        if rules.generator:
            share = f"{rules.generator}, {GENERATOR_SHARE:.0%} of the budget"
            choices.append(Choice("generator", share, "replaces words (ELECTRA): the model fine-tunes better"))
        reads = rules.tokens / count_parameters(model)[1]
        if reads < FEW_TOKENS and not counts:
            few = Choice("warning", f"{reads:.1g} tokens per parameter", "it will learn little; give a longer --budget")
            choices.append(few)
    if epochs > MANY_EPOCHS and not counts:
        choices.append(Choice("warning", f"over {MANY_EPOCHS} epochs", "give more text, or a shorter --budget"))
    return choices


def refuse_too_little(text: Text) -> None:
    """Refuse a text from which nothing can be learned, and say what is missing."""
    if text.tokens < LEAST_TOKENS:
        need = f"{LEAST_TOKENS * CHARACTERS_PER_TOKEN / 1e3:,.0f} kB"
        raise UserError(
            "too-little-text",
            f"the text has {text.characters / 1e3:,.1f} kB; pre-training needs at least {need}, and some "
            "megabytes to be useful",
        )
    if text.documents < LEAST_DOCUMENTS:
        raise UserError(
            "too-few-documents",
            f"the text was read as {counted(text.documents, 'document')}, and some must be held out: at least "
            f"{LEAST_DOCUMENTS} are needed; put a blank line between documents and use --document-end blank-line",
        )


def _why_no_pairs(initial: ModelSettings) -> str:
    """Why weights to begin with learn no sentence pairs; empty if they do."""
    if initial.is_roberta:
        return "RoBERTa has none"
    return "" if initial.family == "bert" else f"model.family {initial.family} has none"


def _choose_size(
    text: Text, machine: Machine, seconds: float, size: Size, overrides: Mapping[str, str], vocabulary: int
) -> tuple[Size, str]:
    """The largest size that reads enough within the budget and is not too large for the text; or the one asked for."""

    def measure(name: str) -> tuple[int, float]:
        """The parameters of a size, and the tokens that it reads for each."""
        settings = _sized(f"bert-{name}", overrides, min(vocabulary, VOCABULARIES[name]))
        parameters = count_parameters(settings.model)[1]
        return parameters, machine.tokens_in(seconds, settings) / parameters

    if size != "auto":
        return size, "--size"
    chosen, why = SIZES[0], "the smallest"
    for name in SIZES[1:]:
        parameters, reads = measure(name)
        if reads < TOKENS_PER_PARAMETER:
            return chosen, f"{name}: {reads:.1g} tokens per parameter, below {TOKENS_PER_PARAMETER}"
        if parameters > PARAMETERS_PER_TOKEN * text.tokens:
            return chosen, f"{name}: over {PARAMETERS_PER_TOKEN} parameters per token of text"
        chosen, why = name, f"fits {duration(seconds)} and {text.tokens / 1e6:,.1f} M tokens of text"
    return chosen, why


def _sized(recipe: str, overrides: Mapping[str, str], vocabulary: int) -> Settings:
    """Settings for arithmetic: with the size of the vocabulary, which a run takes from its data, and an evaluation."""
    known = {"model.vocab_size": str(vocabulary or VOCABULARIES["base"]), "evaluate.data": HELD_OUT}
    return resolve(recipe, {**overrides, **known})
