"""Tasks whose examples are table rows of one or two texts with a class or a number: GLUE, XNLI, the user's own.

A subclass of TableTask says where its files are, which columns it reads and how it parses a label.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import write_json_lines
from bertrain.base.formatting import BASELINE, counted, few
from bertrain.config.settings import Settings
from bertrain.data.formats.block import Block, Values
from bertrain.data.text.records import Problem, listed
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.run.records import ClassScores
from bertrain.tasks.class_weights import Factors, weigh_classes
from bertrain.tasks.encode import encode_texts
from bertrain.tasks.metrics import (
    Predictions,
    compute_metrics,
    predictions_of,
    report_by_class,
    scores_by_class,
    sigmoid,
    softmax,
)
from bertrain.tasks.tables import BadRows, FieldCountProblem, ListProblem, Row, read_table
from bertrain.tasks.task import Head, TaskOutputs
from bertrain.tasks.thresholds import Thresholds, name_labels


@dataclass(frozen=True)
class Columns:
    """The columns to read, each by its possible names; the first that exists is used."""

    first: tuple[str, ...]
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    index: tuple[str, ...] = ("index", "idx", "id")
    language: tuple[str, ...] = ()
    indicators: tuple[str, ...] = ()  # columns of 0 and 1 instead of `label`, one for each label; all are needed
    hint: str = ""  # what the user can do about a missing column


@dataclass(frozen=True)
class RowFormat:
    columns: Columns
    parse_label: Callable[[str], float]  # the target that a label stands for; raises ValueError with the reason
    header: tuple[str, ...] = ()  # the columns of files without a header line
    languages: tuple[str, ...] = ()  # the languages to keep of a file in several
    no_gold_label: str = ""  # the label of rows that annotators did not agree on; they are left out, as is usual
    is_lenient: bool = False  # as is usual for QQP, leaves out rows split in two by a line feed, and keeps empty texts
    takes_lists: ClassVar[bool] = False  # whether labels may be lists

    def parse_target(self, label: str | None, indicators: Sequence[str | None]) -> Any:
        """The target of a row by its values in the columns `label` and `indicators`; raises ValueError."""
        if not (label and label.strip()):
            raise ValueError("has no label")
        return self.parse_label(label.strip())


@dataclass
class TextRows:
    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    num_split: int = 0
    num_without_gold_label: int = 0

    def add(self, row: Row, number: int, row_format: RowFormat, *, with_labels: bool) -> None:
        """Add a row, unless `row_format` leaves it out; raises ValueError for an unusable one."""
        first, second, label, index, language, *indicators = row.values
        if row_format.no_gold_label and label == row_format.no_gold_label:
            self.num_without_gold_label += 1
            return
        if row_format.languages and language not in row_format.languages:
            return
        has_second = bool(row_format.columns.second)
        if not row_format.is_lenient:
            if not (first and first.strip()):
                raise ValueError("has an empty text")
            if has_second and not (second and second.strip()):
                raise ValueError("has an empty second text")
        if with_labels:
            self.targets.append(row_format.parse_target(label, indicators))
        self.ids.append(str(number) if index is None else index)
        self.first.append(first or "")
        if has_second:
            self.second.append(second or "")
        if row_format.languages:
            self.languages.append(language or "")


def read_rows(files: Sequence[Path], row_format: RowFormat, bad_rows: BadRows, *, with_labels: bool) -> TextRows:
    columns, rows = row_format.columns, TextRows()

    def select(names: list[str]) -> list[str | None]:
        return [
            find_column(names, columns.first, columns.hint),
            find_column(names, columns.second, columns.hint),
            find_column(names, columns.label, columns.hint) if with_labels and not columns.indicators else None,
            find_column(names, columns.index, required=False),
            find_column(names, columns.language, columns.hint),
            *(find_column(names, (name,), columns.hint) for name in columns.indicators if with_labels),
        ]

    lists_at = 2 if row_format.takes_lists else -1
    tables = (read_table(path, select, row_format.header, lists_at=lists_at) for path in files)
    found = chain.from_iterable(tables)
    for number, row in enumerate(found):
        if row_format.is_lenient and isinstance(row, FieldCountProblem):
            rows.num_split += 1
        elif isinstance(row, ListProblem) and not row_format.takes_lists:
            advice = "if texts have several labels, set --task.target classes"
            bad_rows.add(Problem(row.place, f"{row.what}; {advice}"))
        elif isinstance(row, Problem):
            bad_rows.add(row)
        else:
            try:
                rows.add(row, number, row_format, with_labels=with_labels)
            except ValueError as error:
                bad_rows.add(Problem(row.place, str(error)))
    if not rows.first:
        raise bad_rows.nothing_usable(files)
    return rows


def find_column(names: list[str], candidates: tuple[str, ...], hint: str = "", *, required: bool = True) -> str | None:
    found = next((name for name in candidates if name in names), None)
    if found is None and candidates and required:
        raise LookupError(" or ".join(map(repr, candidates)), hint)
    return found


def class_parser(labels: Sequence[str], aliases: Mapping[str, int] | None = None) -> Callable[[str], float]:
    """A function from a label, or an alias, to its class index."""
    indices = {**(aliases or {}), **{label: index for index, label in enumerate(labels)}}

    def parse_class(label: str) -> float:
        if label not in indices:
            raise ValueError(f"has the unknown label {label!r}; the labels are {listed(list(labels))}")
        return indices[label]

    return parse_class


def parse_number(label: str) -> float:
    try:
        value = float(label)
    except ValueError:
        raise ValueError(f"has the label {label!r}, which is not a number") from None
    if not abs(value) <= np.finfo(np.float32).max:
        raise ValueError(f"has the label {label!r}, which is not finite")
    return value


@dataclass(frozen=True)
class TableSplit:
    task: TableTask
    name: str
    block: Block
    ids: list[str]
    languages: list[str]

    @property
    def num_examples(self) -> int:
        return len(self.block)

    @property
    def targets(self) -> Values:
        """The class index or the number of each row; the split must be labeled."""
        assert self.block.answers is not None
        return self.block.answers[:, 0]

    @property
    def strata(self) -> Values:
        """A number for each row, over which rows that are held out are spread evenly."""
        return self.targets

    def constant_predictions(self) -> Predictions:
        """The same prediction for every row, that fits best: the most frequent class, or the mean."""
        targets = self.targets
        return np.full_like(targets, targets.mean() if self.task.head == "regress" else np.bincount(targets).argmax())

    def weigh(self, class_weights: str) -> tuple[Factors, Values]:
        """The weight of each class, and that of each row [rows, 1]."""
        factors = weigh_classes(class_weights, self.task.labels, self.targets)
        return factors, factors[self.targets][:, None]

    def describe_constant(self, predictions: Predictions) -> str:
        """The label that all rows are predicted to have; empty if they differ, or have no labels."""
        is_constant = self.task.labels and (predictions == predictions[0]).all()
        return repr(self.task.labels[int(predictions[0])]) if is_constant else ""

    def decide(self, outputs: TaskOutputs) -> Predictions:
        return predictions_of(outputs, self.task.head)

    def report_by_class(self, outputs: TaskOutputs) -> str:
        return report_by_class(self.task.labels, self.targets, self.decide(outputs))

    def scores_by_class(self, outputs: TaskOutputs) -> tuple[ClassScores, ...]:
        return scores_by_class(self.task.labels, self.targets, self.decide(outputs))

    def metrics(self, outputs: TaskOutputs) -> dict[str, float]:
        """The metrics by name, and the baseline of the main one, which `constant_predictions` reach."""
        main, found = self.task.main_metric, self._metrics(predictions_of(outputs, self.task.head))
        return found | {f"{BASELINE}{main}": self._metrics(self.constant_predictions())[main]}

    def _metrics(self, predictions: Predictions) -> dict[str, float]:
        """The metrics by name; of several languages their mean, followed by those of each language: accuracy_de."""
        targets = self.targets
        if not self.languages:
            return compute_metrics(self.task.metric_names, targets, predictions)
        languages = np.array(self.languages)
        values: dict[str, list[float]] = {name: [] for name in self.task.metric_names}
        by_language = {}
        for language in dict.fromkeys(self.languages):
            rows = languages == language
            for name, value in compute_metrics(self.task.metric_names, targets[rows], predictions[rows]).items():
                by_language[f"{name}_{language}"] = value
                values[name].append(value)
        return {name: float(np.mean(numbers)) for name, numbers in values.items()} | by_language

    def answers(self, outputs: TaskOutputs) -> list[dict[str, Any]]:
        return self.task.answers(outputs)

    def write_predictions(self, outputs: TaskOutputs, folder: Path) -> list[Path]:
        return [self.task.write_split(self, outputs, folder)]


class TableTask:
    """A Task of table rows. A split is read when it is first used, which adds to `notes`."""

    split_type: type[TableSplit] = TableSplit

    def __init__(
        self,
        settings: Settings,
        vocabulary: Vocabulary,
        head: Head,
        labels: tuple[str, ...],
        metric_names: tuple[str, ...],
    ) -> None:
        """`metric_names` starts with the main metric."""
        self.settings, self.vocabulary = settings, vocabulary
        self.head: Head = head
        self.name, self.labels = settings.task.name, labels
        self.metric_names, self.main_metric = metric_names, metric_names[0]
        self.notes: list[str] = []
        self.thresholds: Thresholds | None = None  # by label, of several labels a text; None: 0.5
        self.held_out_splits: Sequence[str] = ()
        self.unlabeled_splits: Sequence[str] = ()
        self._load, self._load_training = cache(self.load_split), cache(self._load_weighted)

    def load_split(self, name: str, *, with_labels: bool) -> TableSplit:
        raise NotImplementedError

    def training(self) -> TableSplit:
        return self._load_training()

    def _load_weighted(self) -> TableSplit:
        """The training rows, with the weights of `task.class_weights`."""
        split, text = self._load("train", with_labels=True), self.settings.task.class_weights
        if not text:
            return split
        if not self.labels:
            raise UserError(
                "bad-class-weights",
                f"task.class_weights {text}: {self.name} predicts numbers, not classes; leave it out",
            )
        factors, weights = split.weigh(text)
        shown = [f"{label} {factor:.3g}" for label, factor in zip(self.labels, factors, strict=True)]
        self.notes.append(f"class weights: {few(shown, 8)}")
        block = dataclasses.replace(split.block, answer_weights=weights.astype(np.float32))
        return dataclasses.replace(split, block=block)

    def held_out(self) -> Mapping[str, TableSplit]:
        return {name: self._load(name, with_labels=True) for name in self.held_out_splits}

    def to_predict(self) -> Mapping[str, TableSplit]:
        return {name: self._load(name, with_labels=False) for name in self.unlabeled_splits or self.held_out_splits}

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "head": self.head, "labels": list(self.labels)}

    def read_split(self, name: str, files: Sequence[Path], row_format: RowFormat, *, with_labels: bool) -> TableSplit:
        """Read and encode the rows of some files, and note the rows that were left out or truncated."""
        bad_rows = BadRows(self.settings.task.on_error)
        rows = read_rows(files, row_format, bad_rows, with_labels=with_labels)
        max_length = self.settings.data.max_seq_length
        block, num_truncated = encode_texts(self.vocabulary, rows.first, rows.second or None, max_length)
        for count, verb, reason in (
            (bad_rows.count, "skipped", f"; the first: {bad_rows.first}"),
            (rows.num_split, "left out", " split in two by a line feed, as is usual"),
            (rows.num_without_gold_label, "left out", " without a gold label"),
            (num_truncated, "truncated", f" of {len(block):,} to {max_length} tokens (--data.max_seq_length)"),
        ):
            if count:
                self.notes.append(f"{name}: {verb} {counted(count, 'row')}{reason}")
        if with_labels:
            block = dataclasses.replace(block, answers=self.encode_targets(rows.targets))
        return self.split_type(self, name, block, rows.ids, rows.languages)

    def encode_targets(self, targets: list[Any]) -> Values:
        """The targets of rows as `Block.answers`."""
        return np.array(targets, dtype=np.float32 if self.head == "regress" else np.int64)[:, None]

    def encode(self, texts: Sequence[str], *, is_pair: bool) -> TableSplit:
        """Texts that are given themselves as a split; of pairs, the two of each follow each other."""
        if is_pair and len(texts) % 2:
            raise UserError("odd-texts", f"{self.name} reads pairs of texts; give two texts for each pair")
        first, second = (texts[::2], texts[1::2]) if is_pair else (texts, None)
        block, num_truncated = encode_texts(self.vocabulary, first, second, self.settings.data.max_seq_length)
        self.notes += [f"truncated {counted(num_truncated, 'text')} (--data.max_seq_length)"] if num_truncated else []
        return TableSplit(self, "texts", block, [], [])

    def answers(self, outputs: TaskOutputs) -> list[dict[str, Any]]:
        """For each row its number, or its label (or labels) and the probability of each label."""
        if self.head == "multilabel":
            return name_labels(self.labels, sigmoid(outputs), self.thresholds)
        predictions, probabilities = predictions_of(outputs, self.head).tolist(), softmax(outputs).round(6).tolist()
        if self.head == "regress":
            return [{"number": number} for number in predictions]
        return [
            {"label": self.labels[index], "probabilities": dict(zip(self.labels, row, strict=True))}
            for index, row in zip(predictions, probabilities, strict=True)
        ]

    def write_split(self, split: TableSplit, outputs: TaskOutputs, folder: Path) -> Path:
        """Write a JSON object per row: its id, and its `answers`."""
        languages = [{"language": language} for language in split.languages] or [{}] * len(split.ids)
        rows = zip(split.ids, languages, self.answers(outputs), strict=True)
        path = folder / f"{split.name}.jsonl"
        write_json_lines(path, ({"id": number} | language | answer for number, language, answer in rows))
        return path
