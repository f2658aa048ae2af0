"""A user's own table to fine-tune for: a text or two in a row, and a class or a number to find."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings
from bertrain.data.text.records import Problem
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.rows import Columns, Maker, Reading, TableSplit, TableTask, gather, pick, read_class, read_number
from bertrain.tasks.tables import Flaws, choose_files, form_of, read_table, stem_of

STEMS = {
    "train": ("train", "training", "train_*", "data"),
    "dev": ("dev", "validation", "valid", "val", "eval"),
    "test": ("test",),
}
"""What the files of each part are called."""

HINT = "; name yours with --task.text, --task.text_pair and --task.label"
MANY_LABELS = 100
LOOKED_AT = 1000  # rows, before a file is said to have no labels


def open_own(settings: Settings, data: Path, vocabulary: Vocabulary, described: Mapping[str, Any] | None) -> TableTask:
    """A task of the tables of a folder (train, dev, test), or of one file.

    Labels are those of the training data, unless a trained model's are `described`. With these, a single file is not
    trained on but predicted, and scored where it has labels.
    """
    task = settings.task
    notes: list[str] = []
    files = _find_files(data, notes, is_trained=described is not None)
    columns = Columns((task.text,), (task.text_pair,) if task.text_pair else (), (task.label,), hint=HINT)
    labels: tuple[str, ...] = ()
    if described is not None:
        labels = tuple(described["labels"])
    elif task.target == "class":
        labels = _find_labels(files, columns, Flaws(task.on_error), notes)
    if task.target == "number":
        reading = Reading(columns, read_number)
        maker = Maker(settings, vocabulary, "regress", labels, ("pearson", "spearmanr"), notes)
    else:
        reading = Reading(columns, read_class(labels))
        maker = Maker(settings, vocabulary, "classify", labels, ("accuracy", "f1_macro"), notes)

    def load(split: str, *, with_answers: bool) -> TableSplit:
        if split not in files:
            raise UserError(f"there is no {split}.csv, .tsv, .jsonl or .parquet in --data {data}")
        return maker.read(split, files[split], reading, with_answers=with_answers)

    others = [split for split in files if split != "train"]
    answered = [split for split in others if any(islice(_labels(files[split], columns), LOOKED_AT))]
    if not answered and described is None:
        notes.append(f"{data} has no held-out part with labels, such as a dev.csv: nothing will be scored")
    return TableTask(
        name=task.name,
        head=maker.head,
        labels=labels,
        main_metric=maker.figure_names[0],
        notes=notes,
        load_training=partial(load, "train", with_answers=True),
        load_held_out={split: partial(load, split, with_answers=True) for split in answered},
        load_unanswered={split: partial(load, split, with_answers=False) for split in others if split not in answered},
        load_without_answers={split: partial(load, split, with_answers=False) for split in answered},
    )


def sorted_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of their numbers: as numbers if all of them are, else as text."""
    try:
        values = {label: float(label) for label in labels}
        if all(map(math.isfinite, values.values())):
            return tuple(sorted(values, key=lambda label: (values[label], label)))
    except ValueError:
        pass
    return tuple(sorted(set(labels)))


def _find_files(data: Path, notes: list[str], *, is_trained: bool) -> dict[str, list[Path]]:
    """The files of each part that is there."""
    if data.is_dir():
        found = {split: choose_files(data, stems, notes) for split, stems in STEMS.items()}
        if not any(found.values()):
            raise UserError(
                f"--data {data} has no train, dev or test in it, such as a train.csv, .tsv, .jsonl or .parquet"
            )
        return {split: files for split, files in found.items() if files}
    if not form_of(data):
        raise UserError(f"--data {data} is no table that is read: .csv, .tsv, .jsonl, .parquet")
    if is_trained:
        notes.append(f"{data} is taken as one part, {stem_of(data)}, whatever it was trained on")
        return {stem_of(data): [data]}
    found = {"train": [data]}
    if stem_of(data) == "train":
        beside = {split: choose_files(data.parent, STEMS[split], notes) for split in ("dev", "test")}
        notes += [f"{split}: {files[0]}, beside {data.name}" for split, files in beside.items() if files]
        found |= {split: files for split, files in beside.items() if files}
    return found


def _find_labels(files: Mapping[str, list[Path]], columns: Columns, flaws: Flaws, notes: list[str]) -> tuple[str, ...]:
    """The labels of the training data, of rows that can be used."""
    if "train" not in files:
        raise UserError("--data has no train file, such as a train.csv, to find the labels in")
    counts: Counter[str] = Counter()

    def count(label: str) -> float:
        counts[label] += 1
        return 0.0

    gather(files["train"], Reading(columns, count), flaws, with_answers=True)
    labels = sorted_labels(counts)
    place = f"column {columns.label[0]!r} of {files['train'][0]}"
    if len(labels) < 2:
        what = f"only the label {labels[0]!r}" if labels else "no label"
        raise UserError(f"there is {what} in {place}; it takes two to tell apart")
    if len(labels) > MANY_LABELS and len(labels) > sum(counts.values()) / 2:
        notes.append(f"nearly every label in {place} is another; if they are numbers, set --task.target number")
    return labels


def _labels(files: Iterable[Path], columns: Columns) -> Iterator[str]:
    """The label of each row that can be read; "" where there is none."""

    def choose(names: list[str]) -> list[str | None]:
        return [pick(names, columns.label, columns.hint, required=False)]

    for path in files:
        for row in read_table(path, choose):
            if not isinstance(row, Problem):
                yield (row.values[0] or "").strip()
