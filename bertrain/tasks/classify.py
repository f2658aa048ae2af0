"""The task `classify`: the user's own tables of one or two texts per row, and a class or a number to predict.

Several labels for each text are in multilabel.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.base.seeds import combine, derive
from bertrain.config.settings import Settings
from bertrain.data.text.records import Problem
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.table_task import (
    Columns,
    RowFormat,
    TableSplit,
    TableTask,
    class_parser,
    find_column,
    parse_number,
    read_rows,
)
from bertrain.tasks.tables import TABLES, BadRows, choose_files, format_of, read_table, stem_of
from bertrain.tasks.task import Head

STEMS = {
    "train": ("train", "training", "train_*", "data"),
    "dev": ("dev", "validation", "valid", "val", "eval"),
    "test": ("test",),
}  # file names of each split, without suffix
TARGETS: dict[str, tuple[Head, tuple[str, ...]]] = {
    "class": ("classify", ("accuracy", "f1_macro")),
    "classes": ("multilabel", ("f1_micro", "f1_macro", "subset_accuracy")),
    "number": ("regress", ("pearson", "spearmanr")),
}  # the head and the metrics by `task.target`
WHOLE = "data"  # the split of all rows, of which some are held out


class ClassifyTask(TableTask):
    """Tables in a folder (train, dev, test), or a single file.

    The labels are those of the training data, or those that a trained model `saved`. With these, a single file is not
    trained on but predicted, and evaluated if it has labels.
    """

    def __init__(self, settings: Settings, data: Path, vocabulary: Vocabulary, saved: Mapping[str, Any] | None) -> None:
        task, self.data = settings.task, data
        head, metric_names = TARGETS[task.target]
        super().__init__(settings, vocabulary, head, (), metric_names)
        hint = "; name yours with --task.text, --task.text_pair and --task.label"
        several = tuple(name.strip() for name in task.label.split(",")) if "," in task.label else ()
        self.columns = Columns(
            (task.text,), (task.text_pair,) if task.text_pair else (), (task.label,), hint=hint,
            indicators=several if head == "multilabel" else (),
        )  # fmt: skip
        self.files = find_files(data, self.notes, is_whole=saved is not None and not task.hold_out)
        if saved is not None:
            self.labels = tuple(saved["labels"])
        elif self.head != "regress":
            if "train" not in self.files:
                raise UserError("missing-split", f"--data {self.data} has no train file, such as train.csv")
            self.labels = self.find_labels(self.files["train"])
        others = [split for split in self.files if split != "train"]
        self.held_out_splits = [split for split in others if _is_labeled(self.files[split], self.columns)]
        self.unlabeled_splits = [split for split in others if split not in self.held_out_splits]
        self.hold_out = task.hold_out if "train" in self.files and not self.held_out_splits else 0.0
        if self.hold_out:
            self.held_out_splits, self.files[WHOLE] = ["dev"], self.files["train"]
            self.notes.append(f"{data} has no dev part: {task.hold_out:.0%} of its rows are held out (task.hold_out)")
        elif not self.held_out_splits and saved is None:
            self.notes.append(f"{data} has no held-out labels, such as a dev.csv: there will be no evaluation")

    def load_split(self, name: str, *, with_labels: bool) -> TableSplit:
        if self.hold_out and name in ("train", "dev"):
            return self._draw_rows(name)
        if name not in self.files:
            raise UserError("missing-split", f"--data {self.data} has no {name}.csv, .tsv, .jsonl or .parquet")
        return self.read_split(name, self.files[name], self.row_format(), with_labels=with_labels)

    def row_format(self) -> RowFormat:
        return RowFormat(self.columns, parse_number if self.head == "regress" else class_parser(self.labels))

    def _draw_rows(self, name: str) -> TableSplit:
        """The rows that are held out of the training files, evenly over their labels (dev), or the others (train).

        They depend on the rows alone: runs of all seeds, and later evaluations, hold out the same.
        """
        whole = self._load(WHOLE, with_labels=True)
        size, count = whole.num_examples, count_held_out(whole.num_examples, self.hold_out, self.data)
        order = np.lexsort((combine(derive("hold out"), np.arange(size)), whole.strata))
        held_out = np.sort(order[(2 * np.arange(count) + 1) * size // (2 * count)])
        rows = held_out if name == "dev" else np.delete(np.arange(size), held_out)
        return replace(whole, name=name, block=whole.block.take(rows), ids=[whole.ids[row] for row in rows])

    def find_labels(self, files: Sequence[Path]) -> tuple[str, ...]:
        """The labels of the training files, by class index."""
        counts: Counter[str] = Counter()

        def count(label: str) -> float:
            counts[label] += 1
            return 0.0

        bad_rows = BadRows(self.settings.task.on_error)
        read_rows(files, RowFormat(self.columns, count), bad_rows, with_labels=True)
        labels = sort_labels(counts)
        place = f"column {self.columns.label[0]!r} of {files[0]}"
        if len(labels) < 2:
            raise UserError("one-label", f"{place} has only the label {labels[0]!r}; training needs two or more")
        values = numbers_of(labels) or ()
        if len(labels) > 100 and len(labels) > sum(counts.values()) / 2:
            self.notes.append(f"nearly every label in {place} is different; for numbers, set --task.target number")
        elif not all(value.is_integer() for value in values):
            self.notes.append(f"{place}: each decimal number is a class; to predict numbers, set --task.target number")
        return labels


def count_held_out(size: int, share: float, data: Path | None) -> int:
    """How many of `size` rows are held out; refuses to hold out all of them."""
    count = max(1, round(share * size))
    if count >= size:
        few = f"{data} has {counted(size, 'row')}, too few to hold some out and to train on"
        raise UserError("no-examples", f"{few}; add rows, or hold out fewer (--task.hold_out, now {share:g})")
    return count


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of class indices: by value if all are numbers, else by text."""
    different = sorted(set(labels))
    values = numbers_of(different)
    if values is None:
        return tuple(different)
    return tuple(label for _, label in sorted(zip(values, different, strict=True)))


def numbers_of(labels: Sequence[str]) -> list[float] | None:
    """The values of labels that are all finite numbers."""
    try:
        values = [float(label) for label in labels]
    except ValueError:
        return None
    return values if all(map(math.isfinite, values)) else None


def find_files(
    data: Path,
    notes: list[str],
    *,
    is_whole: bool,
    stems: Mapping[str, tuple[str, ...]] = STEMS,
    formats: Collection[str] = TABLES,
) -> dict[str, list[Path]]:
    """The files of each split in a folder, or of a single file: as training data, or whole as a split of its name."""
    suffixes = ".csv, .tsv, .jsonl or .parquet" if formats is TABLES else ".conll, .jsonl or .parquet"
    if data.is_dir():
        found = {split: files for split in stems if (files := choose_files(data, stems[split], notes, formats))}
        if not found:
            raise UserError("missing-data", f"--data {data} has no train, dev or test {suffixes}")
        return found
    if format_of(data) not in formats:
        raise UserError("unknown-table-format", f"cannot read --data {data}; use {suffixes}")
    if is_whole:
        notes.append(f"reading all rows of {data}, also any that the run was trained on")
        return {stem_of(data): [data]}
    found = {"train": [data]}
    if stem_of(data) == "train":
        beside = {split: choose_files(data.parent, stems[split], notes, formats) for split in ("dev", "test")}
        notes += [f"{split}: using {files[0]}, beside {data.name}" for split, files in beside.items() if files]
        found |= {split: files for split, files in beside.items() if files}
    return found


def _is_labeled(files: Iterable[Path], columns: Columns) -> bool:
    label = partial(find_column, candidates=columns.indicators[:1] or columns.label, required=False)
    rows = chain.from_iterable(read_table(path, lambda names: [label(names)], lists_at=0) for path in files)
    readable = (row for row in rows if not isinstance(row, Problem))
    return any((row.values[0] or "").strip() for row in islice(readable, 1000))
