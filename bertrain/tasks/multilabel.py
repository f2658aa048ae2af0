"""The task `classify` with `task.target classes`: any number of labels for each text, or none.

The labels of a row are a list (JSON lines, Parquet), a text such as "toxic|insult", or a column of 0 and 1 for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.formatting import BASELINE, THRESHOLD, counted
from bertrain.base.schema import JsonError, parse_json
from bertrain.config.settings import Settings
from bertrain.data.formats.block import Values
from bertrain.data.text.records import listed
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.class_weights import Factors, weigh_positives
from bertrain.tasks.classify import WHOLE, ClassifyTask, sort_labels
from bertrain.tasks.metrics import (
    LABEL_SET_METRICS,
    Predictions,
    average_precision,
    compute_metrics,
    predictions_of,
    sigmoid,
)
from bertrain.tasks.table_task import RowFormat, TableSplit, class_parser, read_rows
from bertrain.tasks.tables import BadRows
from bertrain.tasks.task import TaskOutputs
from bertrain.tasks.thresholds import cross_fitted, fit_thresholds

SEPARATORS = ("|", ";", ",")  # between labels in a text; the first that occurs in the training data
FITTED = "_fitted"  # after the name of a metric: at fitted thresholds, instead of 0.5
INDICATORS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


@dataclass(frozen=True)
class LabelSetFormat(RowFormat):
    """Rows with any number of labels; the target is the list of their class indices."""

    separator: str = ""
    takes_lists: ClassVar[bool] = True

    def parse_target(self, label: str | None, indicators: Sequence[str | None]) -> list[float]:
        if self.columns.indicators:
            columns = zip(self.columns.indicators, indicators, strict=True)
            names = [column for column, value in columns if parse_indicator(column, value)]
        else:
            names = split_labels(label, self.separator)
        return sorted({self.parse_label(name) for name in names})


def parse_indicator(column: str, value: str | None) -> bool:
    if (text := (value or "").strip().lower()) not in INDICATORS:
        raise ValueError(f"has {value!r} in {column!r}, not 0 or 1")
    return INDICATORS[text]


def split_labels(text: str | None, separator: str) -> list[str]:
    """The labels in a JSON list or in a separated text; an empty text has none."""
    if text is None:
        raise ValueError("has no labels; write an empty list if none applies")
    text = text.strip()
    if not text.startswith("["):
        names = [part.strip() for part in text.split(separator)] if separator and text else [text] * bool(text)
    else:
        try:
            values = parse_json(text)
        except JsonError as error:
            raise ValueError(f"has the labels {text!r}, which begin as a JSON list but are {error}") from None
        names = [value.strip() if isinstance(value, str) else _number_text(value) for value in values]
        if len(names) > len(set(names)) and not set(names) - INDICATORS.keys():
            cure = "write the names of the labels that apply, or a column of 0 and 1 for each label"
            raise ValueError(f"has the labels {text}, a 0 or 1 for each; {cure}")
    if "" in names:
        raise ValueError(f"has an empty label in {text!r}")
    return names


def _number_text(value: Any) -> str:
    """A number in a list as its label, as in a column of numbers."""
    if isinstance(value, int):  # or a bool
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    raise ValueError(f"has {value!r} among its labels, which is neither a text nor a whole number")


class LabelTexts(RowFormat):
    """Rows whose target is the text of their labels, to find a separator in."""

    takes_lists = True

    def parse_target(self, label: str | None, indicators: Sequence[str | None]) -> str:
        text = (label or "").strip()
        if text.startswith("["):
            split_labels(text, "")  # refuses a bad list by its line
        return text


class MultilabelSplit(TableSplit):
    task: MultilabelTask

    @property
    def targets(self) -> Values:
        """A 0 or 1 for each label of each row; the split must be labeled."""
        assert self.block.answers is not None
        return self.block.answers.astype(np.int64)

    @property
    def strata(self) -> Values:
        """The rarest label of each row, or -1."""
        targets = self.targets
        rarity = np.where(targets > 0, targets.sum(axis=0), len(targets) + 1)
        return np.where(targets.any(axis=1), rarity.argmin(axis=1), -1)

    def weigh(self, class_weights: str) -> tuple[Factors, Values]:
        """The weight of each label, and that of each row and label: of positives the label's, else 1."""
        targets = self.targets
        factors = weigh_positives(class_weights, self.task.labels, targets)
        return factors, np.where(targets > 0, factors, 1.0)

    def constant_predictions(self) -> Predictions:
        """The same labels for every row that reach the highest micro F1: the most frequent ones."""
        targets = self.targets
        counts = targets.sum(axis=0)
        order = np.argsort(-counts, kind="stable")
        f1 = 2 * counts[order].cumsum() / (np.arange(1, len(counts) + 1) * len(targets) + counts.sum())
        chosen = np.zeros_like(counts)
        chosen[order[: f1.argmax() + 1]] = 1
        return np.tile(chosen, (len(targets), 1))

    def describe_constant(self, predictions: Predictions) -> str:
        """The labels that all rows are predicted to have; empty if rows differ."""
        if not (predictions == predictions[0]).all():
            return ""
        return listed([self.task.labels[index] for index in np.flatnonzero(predictions[0])]) or "no label"

    def metrics(self, outputs: TaskOutputs) -> dict[str, float]:
        """The metrics at probability 0.5, the F1 at fitted thresholds, and the baseline of the main metric.

        On the split that thresholds are fitted on, this fits them, for the task and as metrics by label.
        """
        task, targets, probabilities = self.task, self.targets, sigmoid(outputs)
        found = compute_metrics(task.metric_names, targets, predictions_of(outputs, task.head), LABEL_SET_METRICS)
        found["average_precision"] = average_precision(targets, probabilities)
        fits = self.name == task.fitted_split
        if fits:
            task.thresholds = fit_thresholds(targets, probabilities)
        if task.thresholds is not None:
            fitted = compute_metrics(("f1_micro", "f1_macro"), targets, self.decide(outputs), LABEL_SET_METRICS)
            found |= {f"{name}{FITTED}": value for name, value in fitted.items()}
        baseline = compute_metrics((task.main_metric,), targets, self.constant_predictions(), LABEL_SET_METRICS)
        found |= {f"{BASELINE}{name}": value for name, value in baseline.items()}
        if fits and task.thresholds is not None:
            thresholds = zip(task.labels, task.thresholds.tolist(), strict=True)
            found |= {f"{THRESHOLD}{label}": value for label, value in thresholds}
        return found

    def decide(self, outputs: TaskOutputs) -> Predictions:
        """Decisions at thresholds that were not fitted on the rows they decide on; at 0.5 where none are known."""
        probabilities = sigmoid(outputs)
        if self.name == self.task.fitted_split:
            return cross_fitted(self.targets, probabilities).astype(np.int64)
        thresholds = self.task.thresholds
        return (
            predictions_of(outputs, "multilabel") if thresholds is None else (probabilities >= thresholds).astype(int)
        )

    def report_by_class(self, outputs: TaskOutputs) -> str:
        report = super().report_by_class(outputs)
        if self.task.thresholds is None:
            return f"at probability 0.5\n{report}"
        if self.name == self.task.fitted_split:
            return f"each half of the rows at the thresholds fitted on the other half\n{report}"
        return f"at the thresholds that the run fitted on its own held-out rows\n{report}"


class MultilabelTask(ClassifyTask):
    """`ClassifyTask` with any number of labels for each text."""

    split_type = MultilabelSplit

    def __init__(self, settings: Settings, data: Path, vocabulary: Vocabulary, saved: Mapping[str, Any] | None) -> None:
        self.separator = saved.get("separator", "") if saved is not None else ""
        super().__init__(settings, data, vocabulary, saved)
        if saved is not None and not self.separator and self.held_out_splits and not self.columns.indicators:
            # Trained on lists or columns; the labels to compare with may be separated texts.
            texts = self._label_texts(self.files[WHOLE if self.hold_out else self.held_out_splits[0]])
            self.separator = find_separator(texts, self.labels)
        self.fitted_split = next(iter(self.held_out_splits), "")
        """The split that thresholds are fitted on; empty: they are given, or 0.5."""

    def row_format(self) -> RowFormat:
        columns = self.columns
        if columns.indicators and set(columns.indicators) != set(self.labels):
            names = f"--task.label names {listed(list(columns.indicators))}"
            raise UserError("other-labels", f"{names}, but the labels of the run are {listed(list(self.labels))}")
        return LabelSetFormat(columns, class_parser(self.labels), separator=self.separator)

    def encode_targets(self, targets: list[Any]) -> npt.NDArray[np.float32]:
        answers = np.zeros((len(targets), len(self.labels)), dtype=np.float32)
        for row, indices in enumerate(targets):
            answers[row, np.array(indices, dtype=np.int64)] = 1
        return answers

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"separator": self.separator}

    def _label_texts(self, files: Sequence[Path]) -> set[str]:
        bad_rows = BadRows(self.settings.task.on_error)
        return set(read_rows(files, LabelTexts(self.columns, float), bad_rows, with_labels=True).targets)

    def find_labels(self, files: Sequence[Path]) -> tuple[str, ...]:
        if self.columns.indicators:
            if len(set(self.columns.indicators)) < len(self.columns.indicators):
                raise UserError(
                    "repeated-column", f"--task.label {self.settings.task.label} names a column twice; name each once"
                )
            return self.columns.indicators
        texts = self._label_texts(files)
        self.separator = find_separator(texts)
        names: set[str] = set()
        for text in texts:
            with suppress(ValueError):  # such rows are refused by line when they are read
                names.update(split_labels(text, self.separator))
        labels = sort_labels(names)
        place = f"column {self.columns.label[0]!r} of {files[0]}"
        if len(labels) < 2:
            found = f"{place} has {f'only the label {labels[0]!r}' if labels else 'no label'}"
            raise UserError("one-label", f"{found}; task.target classes needs two or more")
        form = f"texts separated by {self.separator!r}" if self.separator else "lists, or single labels"
        self.notes.append(f"{place}: {counted(len(labels), 'label')} in {form}")
        return labels


def find_separator(texts: Iterable[str], labels: Sequence[str] = ()) -> str:
    """The separator that texts have, and none of `labels`; empty if all are lists or single labels."""
    plain = [text for text in texts if not text.startswith("[")]
    possible = [separator for separator in SEPARATORS if not any(separator in label for label in labels)]
    return next((separator for separator in possible if any(separator in text for text in plain)), "")
