"""The weights of classes in the training loss (`task.class_weights`).

They are factors of examples, known before training. The loss of a step stays the sum over its examples divided by their
number, so it does not depend on how examples fall into bins or ranks. PyTorch's `CrossEntropyLoss(weight=...)` divides
by the sum of the weights in the batch instead; here the weights are scaled to a mean of 1 over the training rows. For
several labels, the weight of a label multiplies the loss of its positive rows, as `pos_weight` of `BCEWithLogitsLoss`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError, nearest
from bertrain.data.formats.block import Values
from bertrain.data.text.records import listed

BALANCED = "balanced"
Factors = npt.NDArray[np.float64]  # by label


def weigh_classes(text: str, labels: Sequence[str], classes: Values) -> Factors:
    """The weight of each class, of mean 1 over the rows with these `classes`; balanced: equally much for each class."""
    counts = np.bincount(classes, minlength=len(labels))
    # A class without rows has no part in the mean, and any weight.
    factors = 1 / np.maximum(counts, 1) if text == BALANCED else parse_weights(text, labels)
    return factors * (counts.sum() / (counts * factors).sum())


def weigh_positives(text: str, labels: Sequence[str], targets: Values) -> Factors:
    """The weight of each label's positive rows; balanced: as much as of all its other rows together."""
    if text != BALANCED:
        return parse_weights(text, labels)
    positives = targets.sum(axis=0, dtype=np.float64)
    negatives = len(targets) - positives
    return np.where((positives > 0) & (negatives > 0), negatives / np.maximum(positives, 1), 1.0)


def parse_weights(text: str, labels: Sequence[str]) -> Factors:
    """The weights in a text such as spam=2,other=0.5; labels that it does not name have the weight 1."""
    factors = np.ones(len(labels))
    for part in text.split(","):
        label, equals, number = (word.strip() for word in part.rpartition("="))
        if not equals:
            form = f"use {BALANCED}, or label=weight such as {labels[0]}=2"
            raise UserError("bad-class-weights", f"task.class_weights has {part.strip()!r}; {form}")
        if label not in labels:
            known = f"{nearest(label, list(labels))}; the labels are {listed(list(labels))}"
            raise UserError("bad-class-weights", f"task.class_weights names {label!r}, which is not a label{known}")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise UserError(
                "bad-class-weights", f"task.class_weights gives {label} the weight {number!r}; give a positive number"
            )
        factors[labels.index(label)] = weight
    return factors
