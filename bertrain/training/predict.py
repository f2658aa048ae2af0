"""A fine-tuned model at work: its metrics on held-out data, and its predictions in the task's official format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.base.console import remark
from bertrain.base.errors import UserError
from bertrain.base.files import writing
from bertrain.config.choices import Device
from bertrain.config.resolve import override
from bertrain.config.settings import Settings
from bertrain.ranks import parallel
from bertrain.run.records import to_dict
from bertrain.tasks import registry
from bertrain.tasks.multilabel import MultilabelTask
from bertrain.tasks.squad.task import SquadSplit, SquadTask
from bertrain.tasks.table_task import TableSplit, TableTask
from bertrain.tasks.tables import HUB, stem_of
from bertrain.tasks.tag.task import TagSplit, TagTask
from bertrain.tasks.task import Split, Task
from bertrain.training.engine import Predictor
from bertrain.training.evaluate import load_predictor
from bertrain.training.finetuned import FineTuned
from bertrain.training.prediction_settings import fit_to_machine
from bertrain.training.task_evaluator import TaskEvaluator
from bertrain.weights.companions import FINETUNED_AS
from bertrain.weights.tensors import Weights

FILE_SETTINGS = ("task.on_error", "task.text", "task.text_pair", "task.label")
"""Settings that may differ from one file to another, and so from those that a run was trained on."""
TextSplit = TableSplit | TagSplit | SquadSplit


def evaluate_task(
    run: str | Path,
    data: str | Path | None = None,
    *,
    which: str = "newest",
    device: Device = "auto",
    batch_size: int = 0,
    overrides: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """The task's metrics of a fine-tuned model on the held-out part of `data` (default: that of the run), and its step.

    `run` is a run folder, or fine-tuned weights in Transformers' format. Of a classifier or a tagger also `by_class`,
    precision, recall, F1 and support of each class, and a `report` of them as text, with a classifier's confusion
    matrix. `batch_size` is the evaluation batch size. `overrides`
    may change settings that do not shape the training, such as ("task.null_threshold", "2"), or that say how files are
    read: task.on_error, task.text, task.text_pair, task.label.
    """
    with open_model(run, data, which, device, batch_size, overrides) as model:
        held_out = model.task.held_out()
        if not held_out:
            missing = f"{model.folder} has no examples with known answers to score {run} on"
            hint = _rename_hint(model.folder)
            if not hint and model.task.name in ("classify", "tag"):
                hint = "; --task.label names the column of the answers"
            raise UserError("no-examples", f"{missing}{hint}")
        evaluator = model.evaluator(held_out)
        metrics = evaluator.evaluate(model.predict, model.ranks)
        step = model.finetuned.weights.global_step
        known = {} if step is None else {"step": float(step)}
        by_class = [to_dict(one) for one in evaluator.by_class]
        return known | metrics | ({"by_class": by_class, "report": evaluator.report} if by_class else {})


def predict(
    run: str | Path,
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    texts: str | Sequence[str] = (),
    which: str = "newest",
    device: Device = "auto",
    batch_size: int = 0,
    overrides: Sequence[tuple[str, str]] = (),
) -> Any:
    """Predict the splits of `data` without answers (or else its held-out part), into files in the folder `out`.

    `run`, `batch_size` and `overrides` as in `evaluate_task`. Returns the files and the speed, by split; with `texts`
    (for a task of pairs, two for each) instead of `data` and `out`, the label (or labels) of each and the probability
    of every label, or its number, or its entities: `predict("runs/letters", texts=["Where is my invoice?"])`.

    Example: bertrain.predict("runs/labels", "labels", "predictions")
    """
    if texts and data is None and out is None:
        with open_model(run, None, which, device, batch_size, overrides, has_files=False) as model:
            if isinstance(model.task, SquadTask):
                cure = "put both into a file and give it with --data"
                raise UserError("texts-for-squad", f"{model.task.name} reads questions about paragraphs; {cure}")
            words = [texts] if isinstance(texts, str) else texts
            if not all(word.strip() for word in words):
                raise UserError("empty-text", "one of the texts is empty; give some words")
            return model.answers(model.encode(words))
    if texts or data is None or out is None:
        raise UserError("conflicting-options", "give either texts to predict, or both --data and --out")
    _refuse_own_place(Path(data), Path(out))
    with open_model(run, data, which, device, batch_size, overrides) as model:
        splits: Mapping[str, Split] = model.task.to_predict()
        if not splits:
            raise UserError("no-examples", f"{model.folder} has no examples to predict{_rename_hint(model.folder)}")
        evaluator = model.evaluator(splits)
        result: dict[str, Any] = {}
        for name, split in splits.items():
            outputs, timing = evaluator.outputs(split, model.predict, model.ranks)
            if model.ranks.is_first:
                # SQuAD's files have the same names for every split.
                folder = Path(out) / name if len(splits) > 1 and model.task.head == "span" else Path(out)
                with writing(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    files = [str(file) for file in split.write_predictions(outputs, folder)]
                result[name] = {"files": files} | timing
        return result


def _rename_hint(data: Path) -> str:
    is_training_data = data.is_file() and stem_of(data) == "train"
    return "; a file of this name is training data: copy it under another name" if is_training_data else ""


def _refuse_own_place(data: Path, out: Path) -> None:
    """Refuse to write predictions where they would replace the data."""
    places = [data, data / HUB] if data.is_dir() else [data.parent] if data.suffix in (".jsonl", ".conll") else []
    if out.is_dir() and any(place.is_dir() and out.samefile(place) for place in places):
        why = f"--out {out} is the folder of --data, whose files predictions could replace"
        raise UserError("occupied-folder", f"{why}; choose another --out")


@dataclass(frozen=True)
class TaskModel:
    """A fine-tuned model, ready to predict, and the task with its files."""

    finetuned: FineTuned
    task: Task
    folder: Path
    predict: Predictor
    ranks: parallel.Ranks

    @property
    def settings(self) -> Settings:
        return self.finetuned.settings

    def evaluator(self, splits: Mapping[str, Split]) -> TaskEvaluator:
        """The evaluator of splits that have been read; prints what was found in their files."""
        if self.ranks.is_first:
            for note in self.task.notes:
                remark(note)
        return TaskEvaluator(self.task, splits, self.settings, self.folder, self.finetuned.vocabulary)

    @property
    def reads_pairs(self) -> bool:
        return isinstance(self.task, TableTask) and registry.reads_pairs(self.settings)

    def encode(self, texts: Sequence[Any]) -> TextSplit:
        """Texts, of a task of pairs two for each, as a split; of SQuAD, pairs of a question and its context."""
        if isinstance(self.task, TableTask):
            return self.task.encode(texts, is_pair=self.reads_pairs)
        assert isinstance(self.task, TagTask | SquadTask)
        return self.task.encode(texts)

    def answers(self, given: TextSplit) -> list[dict[str, Any]]:
        """The answer to each text (or pair) of a split."""
        outputs, _ = self.evaluator({given.name: given}).outputs(given, self.predict, self.ranks)
        if isinstance(given, SquadSplit):
            return [one.to_dict(given.settings.null_threshold) for one in given.answers(outputs)]
        return given.answers(outputs)


@contextmanager
def open_model(
    run: str | Path,
    data: str | Path | None,
    which: str,
    device: Device,
    batch_size: int,
    overrides: Sequence[tuple[str, str]],
    has_files: bool = True,
) -> Iterator[TaskModel]:
    """A fine-tuned model, its task with the files of `data` (default: the run's) or none, and its device."""
    opened = FineTuned.open(run, which)
    # Weights need not say what shaped their training; so it may be said here.
    also = FILE_SETTINGS if opened.data else (*FILE_SETTINGS, *FINETUNED_AS)
    settings = override(opened.settings, list(overrides), also=also)
    train, evaluate = replace(settings.train, device=device), replace(settings.evaluate, batch_size=batch_size)
    folder = opened.data if data is None else Path(data)
    if folder is None and has_files:
        raise UserError("missing-option", f"--data is missing; {run} is not a run and does not know its data")
    # Rows that training held out are held out here too.
    is_own = folder is not None and folder.resolve() == opened.data
    of_task = settings.task if is_own else replace(settings.task, hold_out=0.0)
    settings = fit_to_machine(replace(settings, train=train, evaluate=evaluate, task=of_task))
    task = registry.open_task(settings, folder if has_files else None, opened.vocabulary, saved=opened.saved)
    with load_predictor(opened.weights, settings) as (predict, ranks):
        _use_thresholds(task, opened.weights, is_own=is_own)
        yield TaskModel(replace(opened, settings=settings), task, folder or Path(), predict, ranks)


def _use_thresholds(task: Task, weights: Weights, *, is_own: bool) -> None:
    """Decide on several labels at the thresholds that the evaluation at this checkpoint fitted.

    Only the run's own held-out rows, on which it fitted them, fit them again.
    """
    if not isinstance(task, TableTask) or task.head != "multilabel":
        return
    found = weights.thresholds
    if set(found) == set(task.labels):
        task.thresholds = np.array([found[label] for label in task.labels])
    else:
        task.notes.append(f"{weights.origin} has no fitted thresholds: labels apply from probability 0.5 on")
    if isinstance(task, MultilabelTask) and not is_own:
        task.fitted_split = ""
