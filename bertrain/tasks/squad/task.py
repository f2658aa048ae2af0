"""SQuAD: find the answer to a question in a paragraph (v1.1), or say that it is not there (v2.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bertrain.base.errors import UserError, nearest
from bertrain.config.settings import Settings, TaskSettings
from bertrain.data.formats.block import Block
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.squad.answers import Answers, find_answers, write_answers
from bertrain.tasks.squad.files import Collection, Version, find_file, read_squad, shortened
from bertrain.tasks.squad.scoring import score_squad
from bertrain.tasks.squad.windows import Located, Texts, Windows, locate_answers, make_windows, tokenize
from bertrain.tasks.task import Head, Outputs, Split


def squad_version(task: str) -> Version:
    """The version that a task's name, such as squad/v1.1, asks for."""
    for version in get_args(Version):
        if task == f"squad/{version}":
            return version
    names = [f"squad/{version}" for version in get_args(Version)]
    raise UserError(f"there is no task {task!r}; SQuAD's are {' and '.join(names)}{nearest(task, names)}")


@dataclass(frozen=True)
class SquadSplit:
    """The questions of a file, as windows that the model reads."""

    name: str
    version: Version
    collection: Collection
    windows: Windows
    settings: TaskSettings

    @property
    def num_examples(self) -> int:
        return len(self.collection.questions)

    @property
    def block(self) -> Block:
        return self.windows.block

    def answers(self, outputs: Outputs) -> list[Answers]:
        """The answers to each question, in the order of the file."""
        return find_answers(
            self.collection,
            self.windows,
            outputs,
            self.version,
            n_best=self.settings.n_best,
            max_answer_length=self.settings.max_answer_length,
        )

    def metrics(self, outputs: Outputs) -> dict[str, float]:
        """The official script's figures, in percent; in v2.0 also those that the best threshold would have reached."""
        answers = self.answers(outputs)
        given = {one.id: one.given(self.settings.null_threshold) for one in answers}
        figures = score_squad(self.collection, given, self.version)
        if self.version == "v2.0":
            best = {one.id: one.best for one in answers}
            odds = {one.id: one.null_odds for one in answers if one.null_odds is not None}
            sought = score_squad(self.collection, best, self.version, null_odds=odds)
            figures |= {name: value for name, value in sought.items() if name.startswith("best_")}
        return {name: value for name, value in figures.items() if not name.endswith(("total", "missing"))}

    def write_predictions(self, outputs: Outputs, folder: Path) -> list[Path]:
        """Write predictions.json, nbest_predictions.json and, in v2.0, null_odds.json."""
        return write_answers(self.answers(outputs), folder, null_threshold=self.settings.null_threshold)


@dataclass
class SquadTask:
    """SQuAD v1.1 or v2.0 and its files, each of which is read when it is first asked for."""

    name: str
    settings: Settings
    vocabulary: Vocabulary
    files: dict[str, Path]  # train, dev and test, those that there are
    notes: list[str] = field(default_factory=list)

    head: Head = "span"
    labels: tuple[str, ...] = ()
    main_metric: str = "f1"

    @staticmethod
    def open(settings: Settings, folder: Path, vocabulary: Vocabulary) -> SquadTask:
        """The task that `settings` name, with the files of a folder; or with one file, to score on or to predict."""
        version = squad_version(settings.task.name)
        if folder.is_file():
            return SquadTask(settings.task.name, settings, vocabulary, {"one": folder})
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; --data names SQuAD's files")
        kinds = {"train": ("train",), "dev": ("dev", "validation"), "test": ("test",)}
        found = {kind: find_file(folder, names, version) for kind, names in kinds.items()}
        files = {kind: path for kind, path in found.items() if path is not None}
        if not files:
            raise UserError(
                f"{folder} has no file for squad/{version}: train-{version}.json, dev-{version}.json, or others whose "
                "names begin with train, dev (or validation) and test, and end in .json, .jsonl or .parquet"
            )
        return SquadTask(settings.task.name, settings, vocabulary, files)

    @property
    def version(self) -> Version:
        return squad_version(self.name)

    def training(self) -> Split:
        return self._training

    def held_out(self) -> Mapping[str, Split]:
        return self._splits_to_predict(is_answered=True)

    def unanswered(self) -> Mapping[str, Split]:
        return self._splits_to_predict(is_answered=False)

    def without_answers(self) -> Mapping[str, Split]:
        return self.held_out()

    def describe(self) -> dict[str, Any]:
        return {"version": self.version}

    @cached_property
    def _training(self) -> SquadSplit:
        if "train" not in self.files:
            raise UserError(
                f"--data has no file to train on, such as train-{self.version}.json; it has "
                f"{', '.join(str(path) for path in self.files.values())}"
            )
        split = self._read("train", "train", is_training=True)
        if not split.collection.is_answered:
            raise UserError(f"{self.files['train']} has no answers to learn from")
        return split

    @cached_property
    def _others(self) -> list[SquadSplit]:
        names = {kind: path.stem if kind == "one" else kind for kind, path in self.files.items() if kind != "train"}
        return [self._read(kind, name, is_training=False) for kind, name in names.items()]

    def _splits_to_predict(self, *, is_answered: bool) -> dict[str, Split]:
        return {split.name: split for split in self._others if split.collection.is_answered is is_answered}

    def _read(self, kind: str, name: str, *, is_training: bool) -> SquadSplit:
        """Read a file and cut it into windows, noting what was taken and what was odd."""
        task, data, path = self.settings.task, self.settings.data, self.files[kind]
        collection = read_squad(path, self.version, on_error=task.on_error)
        paragraphs = tokenize(collection.contexts, self.vocabulary)
        collection, located = self._usable(collection, paragraphs, is_training=is_training)
        queries = tokenize([question.text for question in collection.questions], self.vocabulary)
        windows = make_windows(
            collection,
            paragraphs,
            queries,
            located.spans if collection.is_answered else None,
            self.vocabulary,
            max_seq_length=data.max_seq_length,
            doc_stride=task.doc_stride,
            max_query_length=task.max_query_length,
        )
        self._note(name, collection, windows, located, int(np.sum(queries.counts > task.max_query_length)))
        return SquadSplit(name, self.version, collection, windows, task)

    def _usable(self, collection: Collection, paragraphs: Texts, *, is_training: bool) -> tuple[Collection, Located]:
        """Without the questions that cannot be used, or an error for the first of them.

        An answer that is not in its paragraph cannot be learnt, but can be scored: it is its text that counts.
        """
        located = locate_answers(collection, paragraphs)
        usable, problems = [], list(collection.problems)
        for number, question in enumerate(collection.questions):
            if not paragraphs.counts[question.context]:
                what = "has a context without a word in it"
            elif is_training and not located.is_usable[number]:
                what = f"has the answer {shortened(question.answers[0].text)!r}, which does not stand in its context"
            else:
                usable.append(number)
                continue
            sentence = f"{collection.path}: question {question.id} {what}"
            if self.settings.task.on_error == "stop":
                raise UserError(f"{sentence}; mend it, or pass over such rows with --on-error skip")
            problems.append(sentence)
        if not usable:
            raise UserError(f"{collection.path} has no question that can be used; the first: {problems[0]}")
        questions = [collection.questions[number] for number in usable]
        kept = replace(located, spans=located.spans[usable], is_usable=located.is_usable[usable])
        return replace(collection, questions=questions, problems=problems), kept

    def _note(self, name: str, collection: Collection, windows: Windows, located: Located, num_cut: int) -> None:
        path, num_questions = collection.path, len(collection.questions)
        self.notes.append(
            f"{name}: {num_questions:,} questions on {len(collection.contexts):,} paragraphs of {path}, in "
            f"{len(windows.question):,} windows of at most {self.settings.data.max_seq_length} tokens"
        )
        if collection.problems:
            self.notes.append(f"{len(collection.problems):,} passed over; the first: {collection.problems[0]}")
        if located.num_moved:
            self.notes.append(
                f"{located.num_moved:,} answers of {path} do not stand where it says, and were found elsewhere in "
                "their paragraphs"
            )
        if missing := int(np.sum(~located.is_usable)):
            self.notes.append(f"{missing:,} answers of {path} stand nowhere in their paragraphs; scored all the same")
        if num_cut:
            cut = self.settings.task.max_query_length
            self.notes.append(f"{num_cut:,} questions of {path} were cut off after {cut} tokens")
        if self.version == "v2.0" and collection.is_answered and all(one.answers for one in collection.questions):
            self.notes.append(f"every question of {path} has an answer, as in squad/v1.1")
