"""What a run trains and is measured on: examples prepared for pre-training, or those of a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings
from bertrain.data.formats.source import DataSource, open_data
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.ranks.parallel import Ranks, is_first_process
from bertrain.run.folder import Run
from bertrain.tasks import registry
from bertrain.tasks.data import TaskData
from bertrain.tasks.task import Split, Task
from bertrain.weights.companions import find_vocabulary
from bertrain.weights.source import open_source
from bertrain.weights.tensors import PADDING_LIMIT

_opened: dict[tuple[object, ...], Task] = {}
"""The task that was opened last: to read and tokenize it takes a while, and several ask for it."""


def open_examples(folder: str | Path, settings: Settings, words: Vocabulary | None, *, verify: str) -> DataSource:
    """The examples to train on; a task is tokenized with `words`, prepared data bring their own."""
    if not settings.task.name:
        return open_data(folder, vocab=settings.data.vocab, verify=verify, quiet=not is_first_process())
    assert words is not None
    return task_data(open_task(folder, settings, words).training(), folder, settings, words)


def task_data(split: Split, folder: str | Path, settings: Settings, words: Vocabulary) -> TaskData:
    """A split of a task as the loader reads it."""
    if not len(split.block):
        raise UserError(f"{folder} has no example for {split.name} of {settings.task.name}")
    return TaskData(split, Path(folder), words, settings.data.max_seq_length)


def open_task(
    folder: str | Path, settings: Settings, words: Vocabulary, described: Mapping[str, Any] | None = None
) -> Task:
    """The task that `settings` name, with its files in `folder`.

    `described` is what a model that was trained for it before says of it; training data need not be there then.
    """
    if not Path(folder).exists():
        raise UserError(f"no data of {settings.task.name} at {folder}")
    trained = json.dumps(described, sort_keys=True)
    key = (Path(folder).resolve(), settings.task, settings.data.max_seq_length, words.hash, trained)
    if key not in _opened:
        _opened.clear()
        _opened[key] = registry.open_task(settings, Path(folder), words, described=described)
    return _opened[key]


def forget_task() -> None:
    """Read what is asked for next anew: somebody may have changed the files since, as in a notebook."""
    _opened.clear()


def words_for(settings: Settings, run: str | Path, init: str) -> Vocabulary | None:
    """The words of a task's model: those its run was begun with, or those of the weights to begin with."""
    if not settings.task.name:
        return None
    if (Path(run) / "config.json").is_file():
        return Run.open(run).vocabulary()
    if not init:
        raise UserError("--init is missing: the run or the weights to fine-tune, for example --init runs/base")
    source = open_source(init)
    words = source.vocabulary
    if settings.data.vocab:
        given = find_vocabulary(Path(), Path(settings.data.vocab))
        assert given is not None
        words = given if words is None else replace(given, lower_case=words.lower_case)
    if words is None:
        raise UserError(f"{init} has no vocabulary with it, so no text can be read; name it by --data.vocab FILE")
    rows = source.settings.vocab_size if source.settings else len(words.words)
    if not 0 <= rows - len(words.words) < PADDING_LIMIT:
        raise UserError(
            f"{settings.data.vocab or 'the vocabulary beside it'} has {len(words.words):,} words, and the model of "
            f"{init} {rows:,}; they do not belong together"
        )
    return words


def open_for(folder: str | Path, settings: Settings, ranks: Ranks, words: Vocabulary | None = None) -> DataSource:
    """The data of a run, whose hashes the first rank checks for all."""
    return open_examples(folder, settings, words, verify=settings.data.verify if ranks.is_first else "size")
