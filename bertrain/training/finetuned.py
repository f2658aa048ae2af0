"""A fine-tuned model and how it reads texts and answers: a run, or weights in Transformers' format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.run.folder import Run
from bertrain.tasks.tag.schemes import recognize
from bertrain.training.prediction_settings import finetuned_settings, is_weights, without_task
from bertrain.weights.source import NEWEST, read_weights, vocabulary_of
from bertrain.weights.tensors import Weights


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
            raise without_task(source)
        weights = read_weights(source, which)
        settings = run.settings if run else finetuned_settings(weights, source)
        vocabulary = vocabulary_of(weights, source)
        if run is not None:
            return FineTuned(weights, settings, vocabulary, run.task, run.data)
        return FineTuned(weights, settings, vocabulary, _task_of(weights, source), None)


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
