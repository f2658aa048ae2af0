"""A fine-tuned model and how it reads texts and answers: a run, or weights in Transformers' format."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.choices import MASK_PROBABILITY
from bertrain.config.resolve import override
from bertrain.config.settings import BatchSettings, DataSettings, Settings, TaskSettings, TrainSettings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.run.folder import Run
from bertrain.tasks.tag.schemes import recognize
from bertrain.training.task_evaluator import TOKENS_AT_ONCE
from bertrain.weights.companions import FINETUNED_AS, is_transformers_folder
from bertrain.weights.hub import locate
from bertrain.weights.source import NEWEST, open_source, read_weights, vocabulary_of
from bertrain.weights.tensors import OpenedWeights, Weights

TASKS = {"classify": "classify", "multilabel": "classify", "regress": "classify", "span": "squad/v1.1", "tag": "tag"}
"""The task by head of weights that name none. Without a setting to say so, every question has an answer."""
TARGETS = {"classify": "class", "multilabel": "classes", "regress": "number"}


@dataclass(frozen=True)
class FineTuned:
    """The weights, the settings and the vocabulary of a fine-tuned model."""

    weights: Weights
    settings: Settings
    vocabulary: Vocabulary
    saved: dict[str, Any]  # the to_dict() of its task
    data: Path | None  # of a run: what it was trained on

    @staticmethod
    def open(source: str | Path, which: str = NEWEST) -> FineTuned:
        run = None if is_weights(source) else Run.open(source)
        if run is not None and not run.settings.task.name:
            raise _without_task(source)
        weights = read_weights(source, which)
        settings = run.settings if run else _settings_of(weights, source)
        vocabulary = vocabulary_of(weights, source)
        if run is not None:
            return FineTuned(weights, settings, vocabulary, run.task, run.data)
        return FineTuned(weights, settings, vocabulary, _task_of(weights, source), None)


def is_weights(source: str | Path) -> bool:
    """Whether a source is a folder, or a file in one, of Transformers: what is neither can only be a run."""
    path = locate(source)
    return is_transformers_folder(path if path.is_dir() else path.parent)


def settings_of(source: str | Path) -> Settings:
    """The settings of a run, or those by which weights predict."""
    if not is_weights(source):
        return Run.open(source).settings
    weights = open_source(source)
    model = weights.settings
    if model is None or model.head != "pretrain":
        return _settings_of(weights, source)
    longest = model.max_positions
    return Settings(
        model=model,
        data=DataSettings(max_seq_length=longest, max_predictions=math.ceil(MASK_PROBABILITY * longest)),
        batch=BatchSettings(sequences=1, token_budget=max(TOKENS_AT_ONCE["cpu"], longest)),
        train=TrainSettings(precision="fp32"),
    )


def _settings_of(weights: Weights | OpenedWeights, source: str | Path) -> Settings:
    """The settings that weights were exported with; of those that Transformers wrote, the usual ones, in fp32."""
    model = weights.settings
    if model is None or model.head not in TASKS:
        raise _without_task(source)
    usual = {"task.name": TASKS[model.head], "task.target": TARGETS.get(model.head, "class")}
    longest, question = model.max_positions, min(TaskSettings.max_query_length, model.max_positions // 2)
    usual |= {"data.max_seq_length": str(longest), "task.max_query_length": str(question), "train.precision": "fp32"}
    if not weights.finetuned_as:  # Transformers trains on words
        usual["task.text_split"] = "spaces"
    plain = Settings(model=replace(model, nsp=False), batch=BatchSettings(sequences=1, token_budget=0))
    return override(plain, usual | weights.finetuned_as, also=FINETUNED_AS)


def _task_of(weights: Weights, source: str | Path) -> dict[str, Any]:
    """What the outputs of weights mean, as a run saves it; refuses a head without the names of its classes."""
    head, labels = weights.settings.head, list(weights.labels)
    if head in ("span", "regress"):
        return {"head": head, "labels": []}
    if len(set(labels)) != weights.settings.num_labels:
        classes = f"{weights.settings.num_labels} classes"
        cure = "name each once in id2label of its config.json"
        raise UserError("missing-labels", f"{source} has {classes}, but not a name for each; {cure}")
    if head != "tag":
        return {"head": head, "labels": labels}
    try:
        scheme = recognize([[label] for label in labels])
    except ValueError as error:
        raise UserError("mixed-schemes", f"{source} has {error} in id2label; use only one scheme") from None
    return {"head": head, "labels": labels, "scheme": scheme.name, "is_prefixed": scheme.is_prefixed}


def _without_task(source: str | Path) -> UserError:
    cure = f"bertrain finetune classify --init {source} --data labels.csv --run runs/labels"
    return UserError("no-task", f"{source} was pre-trained, not fine-tuned for a task; fine-tune it first: {cure}")
