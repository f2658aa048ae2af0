"""GLUE: its nine tasks, in the files of its archive, of the original authors, and of the library `datasets`.

Labels have the class indices of `datasets`, so that other programs understand an exported model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.config.settings import Settings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.metrics import predictions_of
from bertrain.tasks.table_task import Columns, RowFormat, TableSplit, TableTask, class_parser, parse_number
from bertrain.tasks.tables import choose_files
from bertrain.tasks.task import Head, TaskOutputs

PAIR = Columns(("sentence1", "premise", "Premise"), ("sentence2", "hypothesis", "Hypothesis"))


@dataclass(frozen=True)
class GlueSpec:
    """One of the tasks, and the number of rows that its authors published in each split."""

    folder: str
    columns: Columns
    rows: Mapping[str, int]
    labels: tuple[str, ...]
    metric_names: tuple[str, ...] = ("accuracy",)
    head: Head = "classify"
    header: tuple[str, ...] = ()
    no_gold_label: str = ""
    is_lenient: bool = False
    submits_labels: bool = False  # whether a submission has labels, or class indices


def _rows(train: int, dev: int, test: int) -> Mapping[str, int]:
    return {"train": train, "dev": dev, "test": test}


TASKS = {
    "cola": GlueSpec(
        "CoLA", Columns(("sentence",)), _rows(8551, 1043, 1063), ("unacceptable", "acceptable"), ("matthews",),
        header=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueSpec("SST-2", Columns(("sentence",)), _rows(67349, 872, 1821), ("negative", "positive")),
    "mrpc": GlueSpec(
        "MRPC", Columns(("#1 String", "sentence1"), ("#2 String", "sentence2"), ("Quality", "label")),
        _rows(3668, 408, 1725), ("not_equivalent", "equivalent"), ("f1", "accuracy"),
    ),
    "stsb": GlueSpec(
        "STS-B", Columns(("sentence1",), ("sentence2",), ("score", "label")), _rows(5749, 1500, 1379), (),
        ("pearson", "spearmanr"), head="regress",
    ),
    "qqp": GlueSpec(
        "QQP", Columns(("question1",), ("question2",), ("is_duplicate", "label")), _rows(363846, 40430, 390965),
        ("not_duplicate", "duplicate"), ("f1", "accuracy"), is_lenient=True,
    ),
    "qnli": GlueSpec(
        "QNLI", Columns(("question",), ("sentence",)), _rows(104743, 5463, 5463), ("entailment", "not_entailment"),
        submits_labels=True,
    ),
    "rte": GlueSpec("RTE", PAIR, _rows(2490, 277, 3000), ("entailment", "not_entailment"), submits_labels=True),
    "wnli": GlueSpec("WNLI", PAIR, _rows(635, 71, 146), ("not_entailment", "entailment")),
    "mnli": GlueSpec(
        "MNLI", Columns(PAIR.first, PAIR.second, ("gold_label", "label")),
        {"train": 392702, "dev_matched": 9815, "dev_mismatched": 9832, "test_matched": 9796, "test_mismatched": 9847,
         "diagnostic": 1104},
        ("entailment", "neutral", "contradiction"), no_gold_label="-", submits_labels=True,
    ),
}  # fmt: skip

SUBMISSIONS = {"test": "{}", "test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", "diagnostic": "AX"}
"""The files of a submission by split; {} is the folder of the task."""
OTHER_STEMS = {
    "train": ["multinli_1.0_train", "msr_paraphrase_train", "train_*"],
    "dev": ["msr_paraphrase_test"],
    "dev_matched": ["multinli_1.0_dev_matched"],
    "dev_mismatched": ["multinli_1.0_dev_mismatched"],
    "diagnostic": ["diagnostic-full"],
}  # file names of the original authors, and of subsets


class GlueTask(TableTask):
    """A task of GLUE, whose files are in `folder` or in its subfolder for the task."""

    def __init__(self, settings: Settings, folder: Path, vocabulary: Vocabulary) -> None:
        name = settings.task.name.removeprefix("glue/")
        self.spec = spec = TASKS[name]
        super().__init__(settings, vocabulary, spec.head, spec.labels, spec.metric_names)
        self.folder = find_task_folder(folder, name)
        self.files = {split: choose_files(self.folder, stems_of(split), self.notes) for split in spec.rows}
        if "diagnostic" in self.files and not self.files["diagnostic"]:  # beside the folder of MNLI
            root = self.folder.resolve().parent
            self.files["diagnostic"] = choose_files(root / "diagnostic", stems_of("diagnostic"), self.notes)
            self.files["diagnostic"] = self.files["diagnostic"] or choose_files(root / "ax", ["test"], self.notes)
        found = [split for split in spec.rows if self.files[split]]
        if not found:
            raise UserError("missing-data", f"{self.folder} has no files of {self.name}, and no folder {spec.folder}")
        self.notes += [f"{self.folder} has no {split}" for split in spec.rows if "dev" in split and split not in found]
        self.held_out_splits = [split for split in found if split.startswith("dev")]
        self.unlabeled_splits = [split for split in found if split.startswith(("test", "diagnostic"))]

    def load_split(self, name: str, *, with_labels: bool) -> TableSplit:
        spec, files = self.spec, self.files[name]
        if not files:
            raise UserError("missing-split", f"{self.folder} has no {name} file of {self.name}, such as {name}.tsv")
        indices = {str(index): index for index in range(len(spec.labels))}
        row_format = RowFormat(
            columns=spec.columns,
            parse_label=parse_number if spec.head == "regress" else class_parser(spec.labels, indices),
            header=spec.header,
            no_gold_label=spec.no_gold_label,
            is_lenient=spec.is_lenient,
        )
        # Labels are read even to predict a held-out split: they tell which rows to leave out.
        split = self.read_split(name, files, row_format, with_labels=with_labels or name in self.held_out_splits)
        if split.num_examples != spec.rows[name]:
            self.notes.append(f"{name}: {files[0]} has {split.num_examples:,} of {spec.rows[name]:,} published rows")
        return split

    def write_split(self, split: TableSplit, outputs: TaskOutputs, folder: Path) -> Path:
        """Write index and prediction in the format of GLUE's website; the file of a held-out split has its name."""
        predictions = predictions_of(outputs, self.head)
        if self.head == "regress":
            texts = [f"{number:.3f}" for number in np.clip(predictions, 0, 5)]
        else:
            texts = [self.labels[index] if self.spec.submits_labels else str(index) for index in predictions.tolist()]
        path = folder / (SUBMISSIONS.get(split.name, f"{{}}-{split.name}").format(self.spec.folder) + ".tsv")
        rows = [f"{index}\t{text}\n" for index, text in zip(split.ids, texts, strict=True)]
        write_atomically(path, "".join(["index\tprediction\n", *rows]))
        return path


def find_tasks(folder: Path) -> dict[str, bool]:
    """The tasks with a folder in `folder`, in GLUE's order, and whether each has training data."""
    folders = {_normalize(path.name): path for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else {}
    return {name: bool(choose_files(folders[name], stems_of("train"), [])) for name in TASKS if name in folders}


def find_task_folder(folder: Path, name: str) -> Path:
    """The folder with the files of a task: `folder`, or its subfolder named after the task."""
    if not folder.is_dir():
        raise UserError(
            "not-a-folder",
            f"--data {folder} is not a folder; name the folder of GLUE, or its subfolder {TASKS[name].folder}",
        )
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and _normalize(path.name) == name]
    if inside:
        return inside[0]
    if _normalize(folder.resolve().name) in TASKS.keys() - {name}:
        raise UserError("other-task", f"--data {folder} belongs to another task; name the folder {TASKS[name].folder}")
    return folder


def _normalize(name: str) -> str:
    return name.lower().replace("-", "")


def stems_of(split: str) -> list[str]:
    """File names of a split, without suffix."""
    return [split, split.replace("dev", "validation"), *OTHER_STEMS.get(split, [])]
