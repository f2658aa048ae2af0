"""Runs that were fine-tuned for two small tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertrain.training.finetune import finetune
from tests.miniature_tasks import Miniature, settings_for


@pytest.fixture(scope="module")
def colours(mini: Miniature) -> Path:
    """A run that tells three colours apart."""
    run = mini.base.parent / "colours"
    settings = settings_for(train__max_steps=30, evaluate__every_epochs=1, checkpoint__keep_best=True)
    finetune(settings, mini.table, run, init=str(mini.base))
    return run


@pytest.fixture(scope="module")
def answers(mini: Miniature) -> Path:
    """A run that finds words in texts."""
    run = mini.base.parent / "answers"
    finetune(settings_for("squad/v1.1", train__max_steps=30), mini.questions, run, init=str(mini.base))
    return run
