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
from tests import helpers

OTHER_VALUES: dict[str, Any] = {"target": "number", "loss": "cosine", "text_split": "spaces", "recall_at": "3"}
VOCABULARY = Vocabulary((*SPECIAL_WORDS, "a"), lower_case=True)
OF_SOME_TASKS = [one for one in fields(TaskSettings) if one.metadata["tasks"]]


@pytest.mark.parametrize("name", [one.name for one in OF_SOME_TASKS])
def test_a_setting_of_other_tasks_is_refused(name: str, tmp_path: Path) -> None:
    (field,) = (one for one in OF_SOME_TASKS if one.name == name)
    other = OTHER_VALUES.get(name, field.default + (1 if isinstance(field.default, int | float) else "x"))
    owners = {task for task in task_names() if {task, task.partition("/")[0]} & set(field.metadata["tasks"])}
    assert 0 < len(owners) < len(task_names())
    for task in set(task_names()) - owners:
        settings = Settings(task=TaskSettings(name=task, **{name: other}))
        with helpers.refused("option-without-effect", f"task.{name}", task):
            open_task(settings, tmp_path, VOCABULARY)
    for task in owners:
        try:
            open_task(Settings(task=TaskSettings(name=task, **{name: other})), tmp_path, VOCABULARY)
        except UserError as error:  # the folder is empty
            assert error.code != "option-without-effect", task
