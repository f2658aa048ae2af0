"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.base.extras import import_extra
from bertrain.config.settings import Settings, TaskSettings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks import glue
from bertrain.tasks.classify import ClassifyTask
from bertrain.tasks.multilabel import MultilabelTask
from bertrain.tasks.similarity import SimilarityTask
from bertrain.tasks.squad.task import VERSIONS, SquadTask
from bertrain.tasks.table_task import TableTask
from bertrain.tasks.tag.task import TagTask
from bertrain.tasks.task import Task
from bertrain.tasks.xnli import XnliTask

ELSEWHERE = ("multiple-choice",)
TAGGING = ("ner", "token-classification", "pos")  # other names of `tag`
SEVERAL_LABELS = ("multilabel", "multi-label", "multi-label-classification")


def task_names() -> list[str]:
    return [*(f"glue/{name}" for name in glue.TASKS), *VERSIONS, "xnli", "classify", "tag", "similarity"]


def check_name(name: str) -> None:
    """Refuse a task that is not here, and say what is, or what to use instead."""
    if name not in (names := task_names()):
        advice = f"{nearest(name, names)}; tasks: {', '.join(names)}"
        if name.lower().replace("_", "-") in TAGGING:
            advice = "; `bertrain finetune tag` labels words"
        if name.lower().replace("_", "-") in ELSEWHERE:
            advice = "; export the weights (`bertrain weights export`), and train them with the Transformers Trainer"
        if name.lower().replace("_", "-") in SEVERAL_LABELS:
            advice = "; several labels for each text are `bertrain finetune classify --task.target classes`"
        raise UserError("unknown-task", f"there is no task {name!r}{advice}")


def reads_pairs(settings: Settings) -> bool:
    """Whether each example of a task of tables is a pair of texts."""
    spec = glue.TASKS.get(settings.task.name.removeprefix("glue/"))
    return bool(spec.columns.second) if spec else settings.task.name == "xnli" or bool(settings.task.text_pair)


def _refuse_others_settings(task: TaskSettings) -> None:
    """Refuse settings that would be silently without effect on this task."""
    names = {task.name, task.name.partition("/")[0]}
    for one in fields(task):
        tasks = one.metadata["tasks"]
        if tasks and not names & set(tasks) and getattr(task, one.name) != one.default:
            only = f"task.{one.name} is only for {' and '.join(tasks)}"
            raise UserError("option-without-effect", f"{only}, without effect on {task.name}; leave it out")


def open_task(
    settings: Settings, folder: Path | None, vocabulary: Vocabulary, *, saved: Mapping[str, Any] | None = None
) -> Task:
    """Open the task `settings.task.name`, whose files are in `folder`.

    `saved` is the `to_dict()` of the task that a model was trained on. With it, the training data need not be there.
    Without a folder, the task has no splits, and only encodes texts.
    """
    name = settings.task.name
    check_name(name)
    if folder is None and name == "similarity":
        raise UserError(
            "texts-for-similarity", "a similarity model predicts no labels; for vectors of texts use `bertrain embed`"
        )
    if folder is None:
        assert saved is not None
        if name in VERSIONS:
            return SquadTask(name, settings, vocabulary, {})
        if name == "tag":
            return TagTask(settings, None, vocabulary, saved)
        return TableTask(settings, vocabulary, saved["head"], tuple(saved["labels"]), ("",))
    if not folder.exists():
        raise UserError("missing-data", f"--data {folder} does not exist; check the path")
    if saved is None:
        _refuse_others_settings(settings.task)
    if name in VERSIONS:
        return SquadTask.open(settings, folder, vocabulary)
    if name == "tag":
        return TagTask(settings, folder, vocabulary, saved)
    if saved is None:
        # A run whose metrics cannot be computed does not start. Under a limit of memory, the libraries may hang when
        # they load: so they load now, not in the evaluation after hours of training.
        import_extra("sklearn.metrics")
    if name == "xnli":
        return XnliTask(settings, folder, vocabulary)
    if name == "similarity":
        return SimilarityTask(settings, folder, vocabulary, saved)
    if name == "classify":
        of_target = MultilabelTask if settings.task.target == "classes" else ClassifyTask
        return of_target(settings, folder, vocabulary, saved)
    return glue.GlueTask(settings, folder, vocabulary)
