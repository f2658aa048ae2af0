"""The tasks there are, by name, and the one door to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.config.settings import Settings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.glue import TASKS, open_glue
from bertrain.tasks.metrics import require_libraries
from bertrain.tasks.task import Task

SQUAD = ("squad/v1.1", "squad/v2.0")


def task_names() -> list[str]:
    """What `task.name` may be."""
    return [*(f"glue/{name}" for name in TASKS), *SQUAD, "xnli", "classify"]


def open_task(
    settings: Settings, folder: Path, vocabulary: Vocabulary, *, described: Mapping[str, Any] | None = None
) -> Task:
    """The task `settings.task.name`, whose files lie in `folder`.

    `described` is what the `describe()` of a task gave when a model was trained for it; with it, nothing is asked of
    the training data, which need not be there.
    """
    name = settings.task.name
    if not folder.exists():
        raise UserError(f"there is no --data {folder}")
    if name in SQUAD:
        from bertrain.tasks.squad.task import SquadTask

        return SquadTask.open(settings, folder, vocabulary)
    if described is None and name in task_names():
        require_libraries()
    if name.removeprefix("glue/") in TASKS and name.startswith("glue/"):
        return open_glue(settings, folder, vocabulary)
    if name == "xnli":
        from bertrain.tasks.xnli import open_xnli

        return open_xnli(settings, folder, vocabulary)
    if name == "classify":
        from bertrain.tasks.own import open_own

        return open_own(settings, folder, vocabulary, described)
    raise UserError(f"there is no task {name!r}{nearest(name, task_names())}; there are {', '.join(task_names())}")
