"""Decision thresholds of a classifier with several labels, fitted on held-out data.

A label applies where its probability reaches the label's threshold. The threshold that maximizes F1 is seldom 0.5: at
its optimum it is half of that F1 (Lipton et al., 2014), so rare labels want lower ones. A label with few positive rows
would get a threshold that fits noise; such labels share the one threshold that maximizes the F1 of all decisions
together.

A score at thresholds fitted on the same rows is too high. So each half of the rows is scored at the thresholds that the
other half gives (`cross_fitted`), while the thresholds that a run keeps are fitted on all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.seeds import combine, derive
from bertrain.data.formats.block import Values

DEFAULT = 0.5
FEWEST_POSITIVES = 20  # for a threshold of its own: its recall is then known to about a tenth

Probabilities = npt.NDArray[np.float64]  # [rows, labels]
Thresholds = npt.NDArray[np.float64]  # [labels]


def fit_thresholds(targets: Values, probabilities: Probabilities) -> Thresholds:
    """A threshold for each label that maximizes its F1, or the F1 of all labels if it has few positive rows."""
    common = best_threshold(targets.ravel(), probabilities.ravel())
    own = targets.sum(axis=0) >= FEWEST_POSITIVES
    columns = zip(own, targets.T, probabilities.T, strict=True)
    return np.array([best_threshold(target, column) if is_own else common for is_own, target, column in columns])


def best_threshold(targets: Values, probabilities: npt.NDArray[np.float64]) -> float:
    """The threshold that maximizes F1, midway between two probabilities; of several the one closest to 0.5."""
    total = targets.sum()
    if not total:
        return DEFAULT
    order = np.argsort(-probabilities, kind="stable")
    ranked, hits = probabilities[order], np.cumsum(targets[order])
    f1 = 2 * hits / (np.arange(1, len(ranked) + 1) + total)  # of predicting the first 1, 2, ... rows
    following = np.append(ranked[1:], 0.0)
    f1[ranked == following] = 0.0  # no threshold separates equal probabilities
    best = np.flatnonzero(f1 == f1.max())
    candidates = (ranked[best] + following[best]) / 2
    return float(candidates[np.abs(candidates - DEFAULT).argmin()])


def cross_fitted(targets: Values, probabilities: Probabilities) -> npt.NDArray[np.bool_]:
    """Decisions on each half of the rows at thresholds fitted on the other; the halves depend on row numbers alone."""
    is_first = combine(derive("thresholds"), np.arange(len(targets))) % np.uint64(2) == 0
    decisions = np.zeros(targets.shape, dtype=np.bool_)
    for half in (is_first, ~is_first):
        decisions[half] = probabilities[half] >= fit_thresholds(targets[~half], probabilities[~half])
    return decisions


def name_labels(
    labels: Sequence[str], probabilities: Probabilities, thresholds: Thresholds | None
) -> list[dict[str, Any]]:
    """For each row the labels whose probability reaches the threshold, and the probability of each label."""
    decisions = probabilities >= (DEFAULT if thresholds is None else thresholds)
    return [
        {
            "labels": [label for label, applies in zip(labels, decided, strict=True) if applies],
            "probabilities": dict(zip(labels, row.round(6).tolist(), strict=True)),
        }
        for decided, row in zip(decisions, probabilities, strict=True)
    ]
