"""The settings of a task: from its recipe, and from the data and the weights of the run.

resolve_task   recipe, settings file and overrides
fit_to_task    the model, the learning rate, the steps and the bins, once the task's data and the weights are open
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.config.resolve import Overrides, as_pairs, in_family, named_in, resolve
from bertrain.config.settings import EvaluateSettings, ModelSettings, Settings
from bertrain.data.feed.step_size import StepSize
from bertrain.planning.memory_fit import BUDGET_STEP
from bertrain.run.folder import Run
from bertrain.tasks import glue, registry
from bertrain.tasks.similarity import SimilarityTask
from bertrain.tasks.table_task import TableSplit
from bertrain.tasks.tag.task import TagTask
from bertrain.tasks.task import Task
from bertrain.training.restore import InitWeights

ARCHITECTURE = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions", "num_segments",
    "layer_norm_eps", "global_every", "local_window", "global_theta", "local_theta",
)  # fmt: skip
"""Settings of a model that follow from its weights; dropout follows from the recipe."""
DEVIATIONS = 4  # of a step's tokens above their mean that a bin still holds
DEVIATIONS_AMONG_RANKS = 2.5  # of the whole step: beyond, it makes one bin too many; as far below, one too few
MOST_BIN_TOKENS = 16384  # unless one example is longer, or the user asks for more
ALTERNATIVES: tuple[tuple[dict[str, str], str], ...] = (
    ({"train.epochs": "0", "train.budget": "", "train.max_steps": ""}, "how long the run is"),
    ({"evaluate.every_epochs": "0", "evaluate.every_samples": "0"}, "when to evaluate"),
)
"""Settings that say the same in different units, each with the value that says nothing."""


def resolve_task(
    name: str, overrides: Overrides = (), *, recipe: str = "", settings_file: str | Path | None = None
) -> Settings:
    """The settings of a task by its recipe (or `recipe`), a settings file over it, and overrides over both.

    Overrides may name one of train.epochs, max_steps and budget, and so may the file; it replaces the recipe's. The
    same holds for evaluate.every_epochs and every_samples.

    Example: bertrain.resolve_task("classify", {"train.epochs": 1, "optimizer.learning_rate": 1e-3})
    """
    registry.check_name(name)
    own = "finetune-squad" if name.startswith("squad/") else "finetune-tag" if name == "tag" else "finetune-glue"
    chosen = recipe or own
    pairs, in_file = as_pairs(overrides), named_in(settings_file)
    given, changes = dict(pairs), [*pairs, ("task.name", name)]
    if given.get("train.epochs") in ("0", "0.0") and not given.keys() & {"train.max_steps", "train.budget"}:
        raise UserError("no-length", "train.epochs is 0, so there is nothing to train; give more, or train.max_steps")
    for alternatives, meaning in ALTERNATIVES:
        changes += _displaced(alternatives, meaning, given) or _displaced(alternatives, meaning, in_file)
    return resolve(chosen, changes, settings_file)


def _displaced(alternatives: Mapping[str, str], meaning: str, given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Changes that clear the alternatives of the setting that is given; none if none is given."""
    named = [key for key in alternatives if given.get(key, "0") not in ("", "0", "0.0")]
    if len(named) > 1:
        raise UserError("contradicting-settings", f"{' and '.join(named)} each say {meaning}; give one of them")
    return [(key, none) for key, none in alternatives.items() if named and key not in (*named, "train.max_steps")]


def expand_tasks(name: str, data: str | Path) -> list[str]:
    """`glue` as all of its tasks that `data` has a training file for; any other name as itself."""
    if name != "glue":
        return [name]
    found = glue.find_tasks(Path(data))
    usable = [f"glue/{task}" for task, is_usable in found.items() if is_usable]
    if not usable:
        raise UserError("no-examples", f"{data} has no folder of a GLUE task, such as SST-2, with a file to train on")
    for task, is_usable in found.items():
        if not is_usable:
            warn(f"glue/{task} is left out: its folder in {data} has no file to train on")
    return usable


def refuse_other_unit(settings: Settings, task: Task) -> None:
    """Refuse a target that the task's main metric passes at once, or never."""
    target, unit = settings.evaluate.target_accuracy, "percentages" if task.head == "span" else "at most 1"
    if 0 < target <= 1 if task.head == "span" else target > 1:
        raise UserError(
            "bad-target", f"evaluate.target_accuracy is {target:g}, but the metrics of {task.name} are {unit}"
        )


def fit_to_task(
    settings: Settings, task: Task, begun: Run | None, weights: InitWeights | None, *, world: int
) -> Settings:
    """Settings whose model, length and bins follow from the task, its data, and the weights or the begun run."""
    refuse_other_unit(settings, task)
    block = task.training().block
    settings = replace(settings, model=_model_for(task, settings, begun, weights))
    notes: list[str] = []
    if isinstance(task, SimilarityTask):
        settings = replace(settings, task=replace(settings.task, loss=task.loss))
        takes_all = task.loss == "ranking" and task.training().is_scored
        notes.append(f"task.loss {task.loss}{': every pair belongs together, whatever its score' if takes_all else ''}")
    if isinstance(task, TagTask) and settings.task.text_split == "auto":
        split = begun.settings.task.text_split if begun else task.text_split
        settings = replace(settings, task=replace(settings.task, text_split=split))
    if settings.optimizer.learning_rate < 0:
        rate = begun.settings.optimizer.learning_rate if begun else usual_rate(settings.model)
        settings = replace(settings, optimizer=replace(settings.optimizer, learning_rate=rate))
        width = f"for weights {settings.model.hidden_size} wide"
        notes.append(f"optimizer.learning_rate {rate:g}, {width}; set --optimizer.learning_rate to change it")
    lengths = block.lengths.reshape(-1, block.texts_per_example).sum(1)  # of examples
    settings = in_steps(settings, len(settings.data.rows(len(lengths))), float(lengths.mean()))
    if settings.task.loss == "ranking" and block.texts_per_example == 2 and settings.batch.sequences == 1:
        what = "with the ranking loss a pair needs the other texts of its step; set at least 2"
        raise UserError("out-of-range", f"batch.sequences is 1, but {what}")
    held_out = next(iter(task.held_out().values()), None)
    if isinstance(held_out, TableSplit) and task.labels:
        constant = held_out.describe_constant(held_out.constant_predictions())
        notes.append(f"baseline of {held_out.name}: always predict {constant}")
    task.notes.extend(note for note in notes if note not in task.notes)  # seeds share a task
    if settings.batch.token_budget == 0:
        budget = begun.settings.batch.token_budget if begun else usual_budget(settings, lengths, world)
        settings = replace(settings, batch=replace(settings.batch, token_budget=budget))
    return settings.check()


def usual_rate(model: ModelSettings) -> float:
    """AdamW's: that of Devlin et al., times the square of how much narrower than 768 the weights are, at most 1e-3."""
    rate = (5e-5 if model.head in ("span", "tag") else 3e-5) * max(1.0, 768 / model.hidden_size) ** 2
    return float(f"{min(rate, 1e-3):.1g}")


def _model_for(task: Task, settings: Settings, begun: Run | None, weights: InitWeights | None) -> ModelSettings:
    asked = settings.model
    if begun is not None:
        known, owner = begun.settings.model, f"the run {begun.folder}"
    else:
        assert weights is not None
        if weights.source.settings is None:
            raise UserError(
                "missing-config", f"{weights.path} has no config; put its bert_config.json or config.json beside it"
            )
        known, owner = weights.source.settings, f"the model of {weights.path}"
    usual = ModelSettings()
    for name in ARCHITECTURE:
        wish, made = getattr(asked, name), getattr(known, name)
        if wish not in (made, getattr(usual, name)):
            raise UserError("other-model", f"model.{name} is {wish}, but {owner} has {made}; leave the setting out")
    asked = in_family(settings, known.family).model
    model = replace(asked, **{name: getattr(known, name) for name in ARCHITECTURE})
    return replace(model, head=task.head, num_labels=max(2, len(task.labels)))


def in_steps(settings: Settings, num_rows: int, mean_length: float) -> Settings:
    """Settings with epochs turned into steps, and into examples between evaluations."""
    train, batch = settings.train, settings.batch
    if train.epochs:
        steps = StepSize.of(batch, Fraction(mean_length)).steps_for(train.epochs * num_rows)
        train = replace(train, max_steps=max(1, math.ceil(steps - 1e-9)))
    return replace(settings, train=train, evaluate=evaluate_in_examples(settings.evaluate, num_rows))


def evaluate_in_examples(evaluate: EvaluateSettings, num_rows: int) -> EvaluateSettings:
    """`evaluate.every_epochs`, with `num_rows` examples an epoch, as `evaluate.every_samples`."""
    if not evaluate.every_epochs:
        return evaluate
    return replace(evaluate, every_samples=max(1, round(evaluate.every_epochs * num_rows)))


def evaluate_as_overridden(settings: Settings, overrides: Mapping[str, str], num_rows: int) -> Settings:
    """The settings of a resumed task, whose `every_samples` follows from `every_epochs` unless it is overridden."""
    if "evaluate.every_epochs" in overrides:
        return replace(settings, evaluate=evaluate_in_examples(settings.evaluate, num_rows))
    if "evaluate.every_samples" in overrides:
        return replace(settings, evaluate=replace(settings.evaluate, every_epochs=0.0))
    return settings


def usual_budget(settings: Settings, lengths: Any, ranks: int) -> int:
    """Tokens of a bin that holds a rank's share of nearly every step, so that little of it is padding."""
    longest = min(settings.data.max_seq_length, int(lengths.max()))
    if settings.batch.tokens:
        needed = settings.batch.tokens / ranks + longest
    else:
        count = settings.batch.sequences
        spread = math.sqrt(count) * float(lengths.std())
        # Among several ranks a step should make as many bins as there are ranks, neither more nor fewer.
        most = count * float(lengths.mean()) + (DEVIATIONS if ranks == 1 else DEVIATIONS_AMONG_RANKS) * spread
        needed = most / ranks
    budget = max(min(int(needed), MOST_BIN_TOKENS), settings.data.max_seq_length)
    return -(-budget // BUDGET_STEP) * BUDGET_STEP
