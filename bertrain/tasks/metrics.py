"""The official metrics of GLUE and similar tasks, as scikit-learn and SciPy compute them. 1 is perfect.

An undefined metric, such as the correlation with constant predictions, is 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.extras import import_extra
from bertrain.data.formats.block import Values
from bertrain.tasks.task import Head, TaskOutputs

Predictions = npt.NDArray[np.int64] | npt.NDArray[np.float32]


def predictions_of(outputs: TaskOutputs, head: Head) -> Predictions:
    return outputs[:, 0] if head == "regress" else outputs.argmax(axis=1)


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def compute_metrics(names: Sequence[str], targets: Values, predictions: Predictions) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about constant targets or predictions: the metric is then 0
        return {name: METRICS[name](targets, predictions) for name in names}


def report_by_class(labels: Sequence[str], targets: Values, predictions: Predictions) -> str:
    """Precision, recall and F1 of each class, and the confusion matrix, as text; empty for many classes or none."""
    if not 0 < len(labels) <= 20:
        return ""
    metrics, indices = import_extra("sklearn.metrics"), range(len(labels))
    names = {"labels": indices, "target_names": labels, "digits": 3, "zero_division": 0}
    matrix = metrics.confusion_matrix(targets, predictions, labels=indices)
    head = "confusion matrix: a row for each true label, a column for each predicted one, in the same order"
    return f"{metrics.classification_report(targets, predictions, **names)}\n{head}\n{matrix}"


def _classification(function: str, targets: Values, predictions: Predictions, **options: Any) -> float:
    return float(getattr(import_extra("sklearn.metrics"), function)(targets, predictions, **options))


def _correlation(function: str, targets: Values, predictions: Predictions) -> float:
    stats = import_extra("scipy.stats")
    if len(targets) < 2 or np.ptp(targets) == 0 or np.ptp(predictions) == 0:
        return 0.0
    value = float(getattr(stats, function)(targets.astype(np.float64), predictions.astype(np.float64)).statistic)
    return value if np.isfinite(value) else 0.0


METRICS: dict[str, Callable[[Values, Predictions], float]] = {
    "accuracy": partial(_classification, "accuracy_score"),
    "f1": partial(_classification, "f1_score", zero_division=0),  # of class 1
    "f1_macro": partial(_classification, "f1_score", average="macro", zero_division=0),
    "matthews": partial(_classification, "matthews_corrcoef"),
    "pearson": partial(_correlation, "pearsonr"),
    "spearmanr": partial(_correlation, "spearmanr"),
}
