"""GLUE: its nine tasks, as its archive, their authors and the library `datasets` publish them.

Labels have the numbers that `datasets` gives them, so that an exported model means what others expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.config.settings import Settings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks import metrics
from bertrain.tasks.rows import Columns, Maker, Reading, TableSplit, TableTask, read_class, read_number
from bertrain.tasks.tables import choose_files
from bertrain.tasks.task import Head, Outputs

PAIR = Columns(("sentence1", "premise", "Premise"), ("sentence2", "hypothesis", "Hypothesis"))


@dataclass(frozen=True)
class GlueTask:
    """What one of the tasks is, and how many rows its authors published."""

    folder: str
    columns: Columns
    labels: tuple[str, ...]
    figure_names: tuple[str, ...]
    """The main one first."""
    rows: Mapping[str, int]
    head: Head = "classify"
    unnamed: tuple[str, ...] = ()
    undecided: str = ""
    is_rough: bool = False
    submits_names: bool = False
    """Whether a submission has the names of classes, or their numbers."""


TASKS = {
    "cola": GlueTask(
        folder="CoLA",
        columns=Columns(("sentence",)),
        labels=("unacceptable", "acceptable"),
        figure_names=("matthews",),
        rows={"train": 8551, "dev": 1043, "test": 1063},
        unnamed=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueTask(
        folder="SST-2",
        columns=Columns(("sentence",)),
        labels=("negative", "positive"),
        figure_names=("accuracy",),
        rows={"train": 67349, "dev": 872, "test": 1821},
    ),
    "mrpc": GlueTask(
        folder="MRPC",
        columns=Columns(("#1 String", "sentence1"), ("#2 String", "sentence2"), ("Quality", "label")),
        labels=("not_equivalent", "equivalent"),
        figure_names=("f1", "accuracy"),
        rows={"train": 3668, "dev": 408, "test": 1725},
    ),
    "stsb": GlueTask(
        folder="STS-B",
        columns=Columns(("sentence1",), ("sentence2",), ("score", "label")),
        labels=(),
        figure_names=("pearson", "spearmanr"),
        rows={"train": 5749, "dev": 1500, "test": 1379},
        head="regress",
    ),
    "qqp": GlueTask(
        folder="QQP",
        columns=Columns(("question1",), ("question2",), ("is_duplicate", "label")),
        labels=("not_duplicate", "duplicate"),
        figure_names=("f1", "accuracy"),
        rows={"train": 363846, "dev": 40430, "test": 390965},
        is_rough=True,
    ),
    "qnli": GlueTask(
        folder="QNLI",
        columns=Columns(("question",), ("sentence",)),
        labels=("entailment", "not_entailment"),
        figure_names=("accuracy",),
        rows={"train": 104743, "dev": 5463, "test": 5463},
        submits_names=True,
    ),
    "rte": GlueTask(
        folder="RTE",
        columns=PAIR,
        labels=("entailment", "not_entailment"),
        figure_names=("accuracy",),
        rows={"train": 2490, "dev": 277, "test": 3000},
        submits_names=True,
    ),
    "wnli": GlueTask(
        folder="WNLI",
        columns=PAIR,
        labels=("not_entailment", "entailment"),
        figure_names=("accuracy",),
        rows={"train": 635, "dev": 71, "test": 146},
    ),
    "mnli": GlueTask(
        folder="MNLI",
        columns=Columns(PAIR.first, PAIR.second, ("gold_label", "label")),
        labels=("entailment", "neutral", "contradiction"),
        figure_names=("accuracy",),
        rows={
            "train": 392702,
            "dev_matched": 9815,
            "dev_mismatched": 9832,
            "test_matched": 9796,
            "test_mismatched": 9847,
            "diagnostic": 1104,
        },
        undecided="-",
        submits_names=True,
    ),
}

SUBMISSIONS = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", "diagnostic": "AX"}
"""The files of a submission that are not called as their task's folder."""


def open_glue(settings: Settings, folder: Path, vocabulary: Vocabulary) -> TableTask:
    """One of GLUE's tasks, whose files lie in `folder` or in the folder of the task there."""
    name = settings.task.name.removeprefix("glue/")
    task = TASKS[name]
    folder = find_task_folder(folder, name)
    notes: list[str] = []
    numbers = {str(number): number for number in range(len(task.labels))}
    reading = Reading(
        columns=task.columns,
        read_label=read_number if task.head == "regress" else read_class(task.labels, also=numbers),
        unnamed=task.unnamed,
        undecided=task.undecided,
        is_rough=task.is_rough,
    )
    maker = Maker(
        settings, vocabulary, task.head, task.labels, task.figure_names, notes, partial(write_submission, task)
    )
    files = {split: choose_files(folder, stems_of(split), notes) for split in task.rows}
    if "diagnostic" in files and not files["diagnostic"]:
        files["diagnostic"] = find_diagnostic(folder.resolve().parent, notes)

    def load(split: str) -> TableSplit:
        if not files[split]:
            raise UserError(f"there is no {split} file of {settings.task.name} in {folder}: {split}.tsv, or the like")
        found = maker.read(split, files[split], reading, with_answers=split.startswith(("train", "dev")))
        if found.num_examples != task.rows[split]:
            notes.append(
                f"{split}: {files[split][0]} has {found.num_examples:,} rows of the {task.rows[split]:,} published"
            )
        return found

    def loads(*beginnings: str) -> dict[str, partial[TableSplit]]:
        return {split: partial(load, split) for split in task.rows if split.startswith(beginnings) and files[split]}

    missing = [split for split in task.rows if not files[split]]
    if len(missing) == len(task.rows):
        wanted = f"no train.tsv, dev.tsv or the like, nor a folder {task.folder} that has them"
        raise UserError(f"there is nothing of {settings.task.name} in {folder}: {wanted}")
    notes += [f"there is no {split} in {folder}" for split in missing if split.startswith("dev")]
    return TableTask(
        name=settings.task.name,
        head=task.head,
        labels=task.labels,
        main_metric=task.figure_names[0],
        notes=notes,
        load_training=partial(load, "train"),
        load_held_out=loads("dev"),
        load_unanswered=loads("test", "diagnostic"),
    )


def tasks_in(folder: Path) -> dict[str, bool]:
    """The tasks whose folders lie in `folder`, in GLUE's order, and whether there is something to train on."""
    inside = {_plain(path.name): path for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else {}
    return {name: bool(choose_files(inside[name], stems_of("train"), [])) for name in TASKS if name in inside}


def find_task_folder(folder: Path, name: str) -> Path:
    """Where the files of a task are: `folder`, or the folder in it that is called as the task."""
    if not folder.is_dir():
        raise UserError(f"--data {folder} is no folder; give that of GLUE, or of {TASKS[name].folder} in it")
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and _plain(path.name) == name]
    if inside:
        return inside[0]
    if _plain(folder.resolve().name) in TASKS.keys() - {name}:
        raise UserError(f"--data {folder} is the folder of another task; give that of {TASKS[name].folder}")
    return folder


def find_diagnostic(root: Path, notes: list[str]) -> list[Path]:
    """The rows that GLUE asks a model of MNLI about besides, in a folder beside MNLI's."""
    return choose_files(root / "diagnostic", stems_of("diagnostic"), notes) or choose_files(
        root / "ax", ["test"], notes
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "")


def stems_of(split: str) -> list[str]:
    """What the files of a split are called: by GLUE, `datasets`, their authors, and who took a part of them."""
    others = {
        "train": ["multinli_1.0_train", "msr_paraphrase_train", "train_*"],
        "dev": ["msr_paraphrase_test"],
        "dev_matched": ["multinli_1.0_dev_matched"],
        "dev_mismatched": ["multinli_1.0_dev_mismatched"],
        "diagnostic": ["diagnostic-full"],
    }
    return [split, split.replace("dev", "validation"), *others.get(split, [])]


def write_submission(
    task: GlueTask, split: TableSplit, predictions: metrics.Predictions, outputs: Outputs, folder: Path
) -> Path:
    """index, prediction: as GLUE's website takes them. The name of a split with answers is part of the file's."""
    if task.head == "regress":
        texts = [f"{number:.3f}" for number in np.clip(predictions, 0, 5)]
    else:
        texts = [task.labels[number] if task.submits_names else str(number) for number in predictions.tolist()]
    is_submitted = split.block.answers is None
    stem = SUBMISSIONS.get(split.name, task.folder if is_submitted else f"{task.folder}-{split.name}")
    path = folder / f"{stem}.tsv"
    rows = [f"{index}\t{text}\n" for index, text in zip(split.ids, texts, strict=True)]
    write_atomically(path, "".join(["index\tprediction\n", *rows]))
    return path
