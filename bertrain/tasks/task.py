"""What the trainer needs to know of a task to fine-tune for, and nothing of its files.

A task turns files into Splits. A Split is a Block of examples as numbers (what the model reads, and the answers where
they are known), and knows what the model's outputs are worth: its figures, and the files that hold its predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from bertrain.data.formats.block import Block

Head = Literal["classify", "regress", "span"]
Outputs = npt.NDArray[np.float32]
"""What a model says of a whole Block, in its order: [examples, classes] for classify, [examples, 1] for regress, and
for span [tokens of all examples, 2], the scores of an answer's beginning and of its end at each token."""


class Split(Protocol):
    """Some examples of a task in the order of their file; or windows of them, where a text is longer than the model."""

    @property
    def name(self) -> str:
        """What it is called in figures and file names: dev, dev_matched, test, ..."""

    @property
    def num_examples(self) -> int:
        """Sentences (or pairs, or questions): what speed is counted in."""

    @property
    def block(self) -> Block:
        """One row for each pass through the model. `is_random` is zero, `answers` are None where they are not known."""

    def metrics(self, outputs: Outputs) -> dict[str, float]:
        """The official metrics of what the model says; only where answers are known."""

    def write_predictions(self, outputs: Outputs, folder: Path) -> list[Path]:
        """Write the predictions in the task's official form; returns the files."""


class Task(Protocol):
    """A task and its files."""

    @property
    def name(self) -> str: ...

    @property
    def head(self) -> Head: ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; none where there are no classes."""

    @property
    def main_metric(self) -> str:
        """The figure that one result is said to be better than another by; larger is better."""

    @property
    def notes(self) -> list[str]:
        """What was found and chosen, a sentence each: rows passed over, texts cut off."""

    def training(self) -> Split: ...

    def held_out(self) -> Mapping[str, Split]:
        """Splits with answers to score on, the main one first."""

    def unanswered(self) -> Mapping[str, Split]:
        """Splits without answers, which are to be predicted."""

    def without_answers(self) -> Mapping[str, Split]:
        """The splits of `held_out` to be predicted, where there are no others: their answers need not be known ones."""

    def describe(self) -> dict[str, Any]:
        """What of the task a run folder must keep to predict later without its training data: labels, and the like."""
