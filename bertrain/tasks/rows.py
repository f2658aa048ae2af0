"""Tasks whose examples are rows of tables: one text or two, and a class or a number. GLUE, XNLI and a user's own.

Each of them says where its files are, which columns it reads and what a label means; the rest is the same, and here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.config.settings import Settings
from bertrain.data.formats.block import Block
from bertrain.data.text.records import Problem, listed
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks import metrics
from bertrain.tasks.sentences import encode_texts
from bertrain.tasks.tables import Flaws, Row, Torn, read_table
from bertrain.tasks.task import Head, Outputs

LARGEST_NUMBER = float(np.finfo(np.float32).max)
INDEX_COLUMNS = ("index", "idx", "id")


@dataclass(frozen=True)
class Columns:
    """What is read of a row, each by the names that its column goes by; the first that is there."""

    first: tuple[str, ...]
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    index: tuple[str, ...] = INDEX_COLUMNS
    language: tuple[str, ...] = ()
    hint: str = ""
    """What to do where one is missing."""


@dataclass(frozen=True)
class Reading:
    """How rows of some files become examples."""

    columns: Columns
    read_label: Callable[[str], float]
    """The number that a label stands for; raises ValueError with what is wrong about it."""
    unnamed: tuple[str, ...] = ()
    """The columns of files that do not name them."""
    languages: tuple[str, ...] = ()
    """Of several languages, those that are wanted."""
    undecided: str = ""
    """A label that says that people did not agree: such rows are left out, as everybody does."""
    is_rough: bool = False
    """The published files have rows torn in two, which everybody leaves out, and empty texts, which everybody keeps."""


@dataclass
class Texts:
    """Rows as they were read, column by column."""

    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    num_torn: int = 0
    num_undecided: int = 0


def gather(files: Sequence[Path], reading: Reading, flaws: Flaws, *, with_answers: bool) -> Texts:
    """The rows of some files, in order. Rows that cannot be used are flaws."""
    columns, texts = reading.columns, Texts()

    def choose(names: list[str]) -> list[str | None]:
        return [
            pick(names, columns.first, columns.hint),
            pick(names, columns.second, columns.hint),
            pick(names, columns.label, columns.hint) if with_answers else None,
            pick(names, columns.index, required=False),
            pick(names, columns.language, columns.hint),
        ]

    rows = chain.from_iterable(read_table(path, choose, reading.unnamed) for path in files)
    for number, row in enumerate(rows):
        if reading.is_rough and isinstance(row, Torn):
            texts.num_torn += 1
        elif isinstance(row, Problem):
            flaws.meet(row)
        else:
            _add(texts, row, str(number), reading, flaws, with_answers=with_answers)
    if not texts.first:
        raise UserError(
            f"{_first_of(files)} holds no row that can be used" + (f": {flaws.first}" if flaws.first else "")
        )
    return texts


def _add(texts: Texts, row: Row, number: str, reading: Reading, flaws: Flaws, *, with_answers: bool) -> None:
    """Add a row to the others, unless it is not wanted or cannot be used."""
    first, second, label, index, language = row.values
    has_second = bool(reading.columns.second)
    if reading.undecided and label == reading.undecided:
        texts.num_undecided += 1
        return
    if reading.languages and language not in reading.languages:
        return
    try:
        if not reading.is_rough:
            _refuse_empty(first, second if has_second else first)
        if with_answers:
            texts.answers.append(reading.read_label(_stripped(label)))
    except ValueError as error:
        flaws.meet(Problem(row.place, str(error)))
        return
    texts.ids.append(number if index is None else index)
    texts.first.append(first or "")
    if has_second:
        texts.second.append(second or "")
    if reading.languages:
        texts.languages.append(language or "")


def pick(names: list[str], wanted: tuple[str, ...], hint: str = "", *, required: bool = True) -> str | None:
    """The first of the wanted columns that is there."""
    found = next((name for name in wanted if name in names), None)
    if found is None and wanted and required:
        raise LookupError(" or ".join(map(repr, wanted)), hint)
    return found


def _stripped(label: str | None) -> str:
    if label is None or not label.strip():
        raise ValueError("has no label")
    return label.strip()


def _refuse_empty(first: str | None, second: str | None) -> None:
    if not (first and first.strip()):
        raise ValueError("has an empty text")
    if not (second and second.strip()):
        raise ValueError("has an empty second text")


def read_class(labels: Sequence[str], also: Mapping[str, int] | None = None) -> Callable[[str], float]:
    """The number of a label by its name; or by what else stands for one."""
    numbers = {**(also or {}), **{label: number for number, label in enumerate(labels)}}

    def read(label: str) -> float:
        if label not in numbers:
            raise ValueError(f"has the label {label!r}, and there are only {listed(list(labels))}")
        return numbers[label]

    return read


def read_number(label: str) -> float:
    """A label that is a number itself."""
    try:
        value = float(label)
    except ValueError:
        raise ValueError(f"has the label {label!r}, which is no number") from None
    if not abs(value) <= LARGEST_NUMBER:
        raise ValueError(f"has the label {label!r}, which is no finite number")
    return value


# --- splits and tasks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableSplit:
    """Some rows as numbers; a Split."""

    name: str
    block: Block
    head: Head
    labels: tuple[str, ...]
    figure_names: tuple[str, ...]
    ids: list[str]
    languages: list[str]
    write: Writer

    @property
    def num_examples(self) -> int:
        return len(self.block)

    def metrics(self, outputs: Outputs) -> dict[str, float]:
        """The figures by their names; of several languages their mean, and after it those of each: accuracy_de."""
        assert self.block.answers is not None
        answers, predictions = self.block.answers[:, 0], metrics.predictions_of(outputs, self.head)
        if not self.languages:
            return metrics.score(self.figure_names, answers, predictions)
        spoken = np.array(self.languages)
        of_each = {
            language: metrics.score(self.figure_names, answers[spoken == language], predictions[spoken == language])
            for language in dict.fromkeys(self.languages)
        }
        means = {name: float(np.mean([of[name] for of in of_each.values()])) for name in self.figure_names}
        return means | {f"{name}_{language}": value for language, of in of_each.items() for name, value in of.items()}

    def write_predictions(self, outputs: Outputs, folder: Path) -> list[Path]:
        return [self.write(self, metrics.predictions_of(outputs, self.head), outputs, folder)]


Writer = Callable[[TableSplit, metrics.Predictions, Outputs, Path], Path]
"""Writes what was predicted, and the outputs that it was predicted by, into a file of the folder."""


def write_records(split: TableSplit, predictions: metrics.Predictions, outputs: Outputs, folder: Path) -> Path:
    """One JSON object for each row: its id, and its number, or its label and the probability of each label."""
    chances = metrics.probabilities_of(outputs).round(6).tolist()
    lines = []
    for row, (identity, prediction) in enumerate(zip(split.ids, predictions.tolist(), strict=True)):
        record: dict[str, Any] = {"id": identity}
        if split.languages:
            record["language"] = split.languages[row]
        if split.head == "regress":
            record["number"] = prediction
        else:
            record["label"] = split.labels[prediction]
            record["probabilities"] = dict(zip(split.labels, chances[row], strict=True))
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    path = folder / f"{split.name}.jsonl"
    write_atomically(path, "".join(lines))
    return path


Load = Callable[[], TableSplit]


@dataclass
class TableTask:
    """A task of rows; a Task. What is read is read when it is first asked for, and adds to `notes` what was found."""

    name: str
    head: Head
    labels: tuple[str, ...]
    main_metric: str
    notes: list[str]
    load_training: Load
    load_held_out: Mapping[str, Load]
    load_unanswered: Mapping[str, Load]
    load_without_answers: Mapping[str, Load] = field(default_factory=dict)
    """The held-out splits; none where their answers are known to be right."""

    def training(self) -> TableSplit:
        return self._training

    def held_out(self) -> Mapping[str, TableSplit]:
        return self._held_out

    def unanswered(self) -> Mapping[str, TableSplit]:
        return self._unanswered

    def without_answers(self) -> Mapping[str, TableSplit]:
        return {name: load() for name, load in self.load_without_answers.items()} or self.held_out()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "head": self.head, "labels": list(self.labels)}

    @cached_property
    def _training(self) -> TableSplit:
        return self.load_training()

    @cached_property
    def _held_out(self) -> dict[str, TableSplit]:
        return {name: load() for name, load in self.load_held_out.items()}

    @cached_property
    def _unanswered(self) -> dict[str, TableSplit]:
        return {name: load() for name, load in self.load_unanswered.items()}


@dataclass(frozen=True)
class Maker:
    """Makes the splits of one task out of files, and notes what it found."""

    settings: Settings
    vocabulary: Vocabulary
    head: Head
    labels: tuple[str, ...]
    figure_names: tuple[str, ...]
    notes: list[str]
    write: Writer = write_records

    def read(self, name: str, files: Sequence[Path], reading: Reading, *, with_answers: bool) -> TableSplit:
        """A split of the rows of some files."""
        flaws = Flaws(self.settings.task.on_error)
        texts = gather(files, reading, flaws, with_answers=with_answers)
        longest = self.settings.data.max_seq_length
        block, num_cut = encode_texts(self.vocabulary, texts.first, texts.second or None, longest)
        for count, what in (
            (flaws.count, f"passed over {_rows(flaws.count)}; the first: {flaws.first}"),
            (texts.num_torn, f"left out {_rows(texts.num_torn)}, torn in two by their authors, as everybody does"),
            (texts.num_undecided, f"left out {_rows(texts.num_undecided)} whose label people did not agree on"),
            (num_cut, f"cut {_rows(num_cut)} of {len(block):,} to {longest} tokens (--data.max_seq_length)"),
        ):
            if count:
                self.notes.append(f"{name}: {what}")
        if with_answers:
            kind = np.float32 if self.head == "regress" else np.int64
            block = dataclasses.replace(block, answers=np.array(texts.answers, dtype=kind)[:, None])
        figure_names, ids, languages = self.figure_names, texts.ids, texts.languages
        return TableSplit(name, block, self.head, self.labels, figure_names, ids, languages, self.write)


def _first_of(files: Sequence[Path]) -> str:
    return str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"
