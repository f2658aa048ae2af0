"""The official figures of GLUE and its like, by the libraries that everybody takes them from. 1 is perfect.

A figure that is not defined, such as the correlation with predictions that are all the same, is 0, as nothing was
told apart.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.data.formats.block import Values
from bertrain.tasks.task import Head, Outputs

Predictions = npt.NDArray[np.int64] | npt.NDArray[np.float32]


def predictions_of(outputs: Outputs, head: Head) -> Predictions:
    """The class, or the number, that a model's outputs stand for."""
    return outputs[:, 0] if head == "regress" else outputs.argmax(axis=1)


def probabilities_of(outputs: Outputs) -> npt.NDArray[np.float64]:
    """The probability of each class."""
    weights = np.exp(outputs.astype(np.float64) - outputs.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def require_libraries() -> None:
    """Refuse to begin what could not be scored in the end. Nothing is imported: that takes seconds."""
    for module, library in (("sklearn", "scikit-learn"), ("scipy", "scipy")):
        if importlib.util.find_spec(module) is None:
            raise _absent(library)


def score(names: Sequence[str], answers: Values, predictions: Predictions) -> dict[str, float]:
    """The figures of these names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of answers or predictions that are all the same: that is 0, as said above
        return {name: FIGURES[name](answers, predictions) for name in names}


def _accuracy(answers: Values, predictions: Predictions) -> float:
    return float(_scikit_learn().accuracy_score(answers, predictions))


def _f1(answers: Values, predictions: Predictions) -> float:
    """Of class 1, the positive one."""
    return float(_scikit_learn().f1_score(answers, predictions, zero_division=0))


def _f1_macro(answers: Values, predictions: Predictions) -> float:
    return float(_scikit_learn().f1_score(answers, predictions, average="macro", zero_division=0))


def _matthews(answers: Values, predictions: Predictions) -> float:
    return float(_scikit_learn().matthews_corrcoef(answers, predictions))


def _pearson(answers: Values, predictions: Predictions) -> float:
    return _correlation("pearsonr", answers, predictions)


def _spearman(answers: Values, predictions: Predictions) -> float:
    return _correlation("spearmanr", answers, predictions)


def _correlation(name: str, answers: Values, predictions: Predictions) -> float:
    try:
        from scipy import stats
    except ImportError:
        raise _absent("scipy") from None
    if len(answers) < 2 or np.ptp(answers) == 0 or np.ptp(predictions) == 0:
        return 0.0
    value = float(getattr(stats, name)(answers.astype(np.float64), predictions.astype(np.float64)).statistic)
    return value if np.isfinite(value) else 0.0


def _scikit_learn() -> ModuleType:
    try:
        from sklearn import metrics
    except ImportError:
        raise _absent("scikit-learn") from None
    module: ModuleType = metrics
    return module


def _absent(library: str) -> UserError:
    return UserError(f"the figures of this task need {library}; install it with: pip install 'bertrain[finetune]'")


FIGURES: dict[str, Callable[[Values, Predictions], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "f1_macro": _f1_macro,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearmanr": _spearman,
}
