"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.base.extras import is_installed, missing_package
from bertrain.config.settings import Settings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks import glue
from bertrain.tasks.classify import ClassifyTask
from bertrain.tasks.squad.task import SquadTask
from bertrain.tasks.task import Task
from bertrain.tasks.xnli import XnliTask

SQUAD = ("squad/v1.1", "squad/v2.0")


def task_names() -> list[str]:
    """Valid values of `task.name`."""
    return [*(f"glue/{name}" for name in glue.TASKS), *SQUAD, "xnli", "classify"]


def open_task(
    settings: Settings, folder: Path, vocabulary: Vocabulary, *, saved: Mapping[str, Any] | None = None
) -> Task:
    """Open the task `settings.task.name`, whose files are in `folder`.

    `saved` is the `to_dict()` of the task that a model was trained on. With it, the training data need not be there.
    """
    name, names = settings.task.name, task_names()
    if name not in names:
        raise UserError("unknown-task", f"there is no task {name!r}{nearest(name, names)}; tasks: {', '.join(names)}")
    if not folder.exists():
        raise UserError("missing-data", f"--data {folder} does not exist")
    if name in SQUAD:
        return SquadTask.open(settings, folder, vocabulary)
    if saved is None and not is_installed("sklearn"):  # a run whose metrics cannot be computed does not start
        raise missing_package("sklearn")
    if name == "xnli":
        return XnliTask(settings, folder, vocabulary)
    if name == "classify":
        return ClassifyTask(settings, folder, vocabulary, saved)
    return glue.GlueTask(settings, folder, vocabulary)
