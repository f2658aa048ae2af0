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
from bertrain.run.records import ClassScores
from bertrain.tasks.task import Head, TaskOutputs

MOST_IN_MATRIX = 20  # classes of a confusion matrix that still fits a screen
Predictions = npt.NDArray[np.int64] | npt.NDArray[np.float32]
Metrics = dict[str, Callable[[Values, Predictions], float]]


def predictions_of(outputs: TaskOutputs, head: Head) -> Predictions:
    """Classes or numbers of one dimension; of several labels a 0 or 1 for each, at probability 0.5."""
    if head == "multilabel":
        return (outputs >= 0).astype(np.int64)
    return outputs[:, 0] if head == "regress" else outputs.argmax(axis=1)


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    tail = np.exp(-np.abs(logits.astype(np.float64)))  # never overflows
    return np.where(logits >= 0, 1 / (1 + tail), tail / (1 + tail))


def compute_metrics(
    names: Sequence[str], targets: Values, predictions: Predictions, functions: Metrics | None = None
) -> dict[str, float]:
    """Metrics by name, of METRICS or of other `functions`."""
    functions = functions or METRICS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about constant targets or predictions: the metric is then 0
        return {name: functions[name](targets, predictions) for name in names}


def average_precision(targets: Values, probabilities: npt.NDArray[np.float64]) -> float:
    """The mean over labels of the area under precision and recall; 0 for a label without positive rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _classification("average_precision_score", targets, probabilities, average="macro")


def report_by_class(labels: Sequence[str], targets: Values, predictions: Predictions) -> str:
    """Precision, recall, F1 and support of each class as text; of up to 20 exclusive classes the confusion matrix."""
    if not labels:
        return ""
    metrics, indices = import_extra("sklearn.metrics"), range(len(labels))
    names = {"labels": indices, "target_names": labels, "digits": 3, "zero_division": 0}
    report = str(metrics.classification_report(targets, predictions, **names))
    if targets.ndim > 1 or len(labels) > MOST_IN_MATRIX:
        return report
    matrix = metrics.confusion_matrix(targets, predictions, labels=indices)
    head = "confusion matrix: a row for each true label, a column for each predicted one, in the same order"
    return f"{report}\n{head}\n{matrix}"


def scores_by_class(labels: Sequence[str], targets: Values, predictions: Predictions) -> tuple[ClassScores, ...]:
    """Precision, recall, F1 and support of each class, as `report_by_class` rounds them; empty without classes."""
    if not labels:
        return ()
    score = import_extra("sklearn.metrics").precision_recall_fscore_support
    columns = score(targets, predictions, labels=range(len(labels)), zero_division=0)
    return tuple(ClassScores(*row) for row in zip(labels, *(column.tolist() for column in columns), strict=True))


def _classification(function: str, targets: Values, predictions: Values, **options: Any) -> float:
    return float(getattr(import_extra("sklearn.metrics"), function)(targets, predictions, **options))


def _correlation(function: str, targets: Values, predictions: Predictions) -> float:
    stats = import_extra("scipy.stats")
    if len(targets) < 2 or np.ptp(targets) == 0 or np.ptp(predictions) == 0:
        return 0.0
    value = float(getattr(stats, function)(targets.astype(np.float64), predictions.astype(np.float64)).statistic)
    return value if np.isfinite(value) else 0.0


METRICS: Metrics = {
    "accuracy": partial(_classification, "accuracy_score"),
    "f1": partial(_classification, "f1_score", zero_division=0),  # of class 1
    "f1_macro": partial(_classification, "f1_score", average="macro", zero_division=0),
    "matthews": partial(_classification, "matthews_corrcoef"),
    "pearson": partial(_correlation, "pearsonr"),
    "spearmanr": partial(_correlation, "spearmanr"),
}
LABEL_SET_METRICS: Metrics = {
    "f1_micro": partial(_classification, "f1_score", average="micro", zero_division=0),
    "f1_macro": METRICS["f1_macro"],
    "subset_accuracy": METRICS["accuracy"],  # rows of which every label is correct
}
"""Metrics of decisions on several labels [rows, labels]."""
