"""The interface between tasks and training.

A Task finds the files of a data set and turns them into Splits. A Split holds examples as a Block of token ids with
their targets, computes the official metrics from the model's outputs, and writes predictions. Training, evaluation and
prediction see nothing else of a task.

To add a task, write a class with these methods and name it in `registry.py`. For rows of one or two texts, subclass
`TableTask` (table_task.py), as `XnliTask` does. A task whose outputs fit no Head also needs a head in `model/heads.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from bertrain.data.formats.block import Block

Head = Literal["classify", "multilabel", "regress", "span", "tag", "embed"]
TaskOutputs = npt.NDArray[np.float32]
"""The model's outputs for a whole Block, in its order: logits [examples, classes] for classify and multilabel,
[examples, 1] for regress, for span [tokens of all examples, 2], the logits of an answer's first and last token, for tag
[labeled words of all examples, classes], and for embed the vectors [texts, width]."""


class Split(Protocol):
    """Examples of a task in the order of their file."""

    @property
    def name(self) -> str:
        """The name used in metrics and file names: dev, dev_matched, test, ..."""

    @property
    def num_examples(self) -> int:
        """The number of texts, pairs or questions, in which speed is reported."""

    @property
    def block(self) -> Block:
        """The model's inputs: a row per example, or several where a text is longer than the model reads at once.

        `answers` holds the targets, and is None in an unlabeled split; `is_random` is zero. Targets of single words
        are in `masks`, which an unlabeled split has too, as it says which words to predict.
        """

    def metrics(self, outputs: TaskOutputs) -> dict[str, float]:
        """Compute the official metrics of the task. The split must be labeled."""

    def write_predictions(self, outputs: TaskOutputs, folder: Path) -> list[Path]:
        """Write the predictions in the official format of the task; returns the files."""


class Task(Protocol):
    """A data set to fine-tune on, opened."""

    name: str
    head: Head
    labels: tuple[str, ...]  # names of the classes by class index; empty for a task without classes
    main_metric: str  # the metric that compares two results; larger is better
    notes: list[str]  # messages about the files, such as rows skipped; reading a split adds to them

    def training(self) -> Split: ...

    def held_out(self) -> Mapping[str, Split]:
        """Labeled splits to evaluate on, the main one first."""

    def to_predict(self) -> Mapping[str, Split]:
        """The unlabeled splits; where there is none, the held-out splits, whose labels need not be known classes."""

    def to_dict(self) -> dict[str, Any]:
        """The part of the task that a run folder saves, to predict later without the training data."""
