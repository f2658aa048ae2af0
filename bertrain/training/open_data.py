"""Opens the data of a run: examples prepared for pre-training, or the splits of a task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.machine import is_first_rank
from bertrain.config.settings import Settings
from bertrain.data.formats.source import DataSource, open_data
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.ranks.parallel import Ranks
from bertrain.tasks.data import TaskData
from bertrain.tasks.task import Split
from bertrain.training.init_from import InitWeights
from bertrain.weights.companions import find_vocabulary
from bertrain.weights.tensors import PADDING_LIMIT


def open_for(folder: str | Path, settings: Settings, ranks: Ranks | None) -> DataSource:
    """Prepared data. The first rank hashes its files as `data.verify` says; others, or no ranks, check only sizes."""
    verify = settings.data.verify if ranks is not None and ranks.is_first else "size"
    return open_data(folder, vocab=settings.data.vocab, verify=verify, quiet=not is_first_rank())


def task_data(split: Split, folder: str | Path, settings: Settings, vocabulary: Vocabulary) -> TaskData:
    """A split of a task as the loader reads it."""
    if not len(split.block):
        raise UserError("no-examples", f"{folder} has no examples for the split {split.name} of {settings.task.name}")
    return TaskData(split, Path(folder), vocabulary, settings.data.max_seq_length)


def vocabulary_for(settings: Settings, weights: InitWeights) -> Vocabulary:
    """The vocabulary to read a task with: that of the weights, or the file `data.vocab`."""
    source = weights.source
    vocabulary = source.vocabulary
    if settings.data.vocab:
        given = find_vocabulary(Path(), Path(settings.data.vocab))
        assert given is not None
        vocabulary = given if vocabulary is None else replace(given, lower_case=vocabulary.lower_case)
    if vocabulary is None:
        raise UserError(
            "missing-vocabulary", f"{weights.path} has no vocabulary beside it; name one with --data.vocab FILE"
        )
    rows = source.settings.vocab_size if source.settings else len(vocabulary.words)
    if not 0 <= rows - len(vocabulary.words) < PADDING_LIMIT:
        raise UserError(
            "other-vocabulary",
            f"{settings.data.vocab or 'the vocabulary'} has {len(vocabulary.words):,} words, but the model of "
            f"{weights.path} has {rows:,}; name the vocabulary it was trained with by --data.vocab FILE",
        )
    return vocabulary
