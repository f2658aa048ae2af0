"""Settings that some tasks alone have."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings, TaskSettings
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary
from bertrain.tasks.registry import open_task, task_names

OTHER_VALUES: dict[str, Any] = {"target": "number", "loss": "cosine", "text_split": "spaces", "recall_at": "3"}
VOCABULARY = Vocabulary((*SPECIAL_WORDS, "a"), lower_case=True)
OF_SOME_TASKS = [one for one in fields(TaskSettings) if one.metadata["tasks"]]


def error_of(folder: Path, task: str, **settings: Any) -> tuple[str, str]:
    """The code and sentence of the error with which the task is refused, if it is; the folder is empty."""
    try:
        open_task(Settings(task=TaskSettings(name=task, **settings)), folder, VOCABULARY)
    except UserError as error:
        return error.code, str(error)
    return "", ""


@pytest.mark.parametrize("name", [one.name for one in OF_SOME_TASKS])
def test_a_setting_of_other_tasks_is_refused(name: str, tmp_path: Path) -> None:
    (field,) = (one for one in OF_SOME_TASKS if one.name == name)
    other = OTHER_VALUES.get(name, field.default + (1 if isinstance(field.default, int | float) else "x"))
    owners = {task for task in task_names() if {task, task.partition("/")[0]} & set(field.metadata["tasks"])}
    assert 0 < len(owners) < len(task_names())
    for task in task_names():
        code, sentence = error_of(tmp_path, task, **{name: other})
        assert (code == "option-without-effect") == (task not in owners), task
        assert task in owners or (f"task.{name}" in sentence and task in sentence)
