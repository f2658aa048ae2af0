"""SQuAD: find the answer to a question in a paragraph (v1.1), or predict that it is not there (v2.0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings, TaskSettings
from bertrain.data.formats.block import Block
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.squad.answers import Answers, find_answers, write_answers
from bertrain.tasks.squad.files import Collection, Question, Version, find_file, read_squad, shorten
from bertrain.tasks.squad.scoring import score_squad
from bertrain.tasks.squad.windows import AnswerSpans, TokenizedTexts, Windows, locate_answers, make_windows, tokenize
from bertrain.tasks.tables import SKIP_HINT
from bertrain.tasks.task import Head, Split, TaskOutputs

PREFIXES = {"train": ("train",), "dev": ("dev", "validation"), "test": ("test",)}
"""How the file names of each split start."""
VERSIONS: dict[str, Version] = {f"squad/{version}": version for version in get_args(Version)}
"""By the name of the task."""
SINGLE = "single"  # the key of a file given by itself; its split has the name of the file, and is never trained on


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

    def answers(self, outputs: TaskOutputs) -> list[Answers]:
        """The predicted answers to each question, in the order of the file."""
        return find_answers(self.collection, self.windows, outputs, self.version, self.settings)

    def metrics(self, outputs: TaskOutputs) -> dict[str, float]:
        """The metrics of the official script, in percent; in v2.0 also those at the best null threshold."""
        answers = self.answers(outputs)
        predictions = {answer.id: answer.prediction(self.settings.null_threshold) for answer in answers}
        metrics = score_squad(self.collection, predictions, self.version)
        if self.version == "v2.0":
            best = {answer.id: answer.best for answer in answers}
            odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
            at_best = score_squad(self.collection, best, self.version, null_odds=odds)
            metrics |= {name: value for name, value in at_best.items() if name.startswith("best_")}
        return {name: value for name, value in metrics.items() if not name.endswith(("total", "missing"))}

    def write_predictions(self, outputs: TaskOutputs, folder: Path) -> list[Path]:
        """Write predictions.json, nbest_predictions.json and, in v2.0, null_odds.json."""
        return write_answers(self.answers(outputs), folder, null_threshold=self.settings.null_threshold)


@dataclass
class SquadTask:
    """SQuAD v1.1 or v2.0 and its files, each read when it is first used."""

    name: str
    settings: Settings
    vocabulary: Vocabulary
    files: dict[str, Path]  # train, dev, test, or SINGLE
    notes: list[str] = field(default_factory=list)

    head: Head = "span"
    labels: tuple[str, ...] = ()
    main_metric: str = "f1"

    @staticmethod
    def open(settings: Settings, folder: Path, vocabulary: Vocabulary) -> SquadTask:
        """Open the files of a folder; or a single file, to evaluate on or to predict."""
        version = VERSIONS[settings.task.name]
        if folder.is_file():
            return SquadTask(settings.task.name, settings, vocabulary, {SINGLE: folder})
        if not folder.is_dir():
            raise UserError(
                "not-a-folder", f"--data {folder} is neither a file nor a folder; name that of SQuAD's files"
            )
        found = {split: find_file(folder, prefixes, version) for split, prefixes in PREFIXES.items()}
        files = {split: path for split, path in found.items() if path is not None}
        if not files:
            names = "names start with train, dev, validation or test and end in .json, .jsonl or .parquet"
            raise UserError("missing-data", f"{folder} has no train-{version}.json or other file of squad; {names}")
        return SquadTask(settings.task.name, settings, vocabulary, files)

    @property
    def version(self) -> Version:
        return VERSIONS[self.name]

    def training(self) -> Split:
        return self._training

    def held_out(self) -> Mapping[str, Split]:
        return {split.name: split for split in self._others if split.collection.has_answers}

    def to_predict(self) -> Mapping[str, Split]:
        unlabeled = {split.name: split for split in self._others if not split.collection.has_answers}
        return unlabeled or self.held_out()

    def to_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    @cached_property
    def _training(self) -> SquadSplit:
        if "train" not in self.files:
            files = ", ".join(map(str, self.files.values()))
            raise UserError("missing-split", f"--data has no train-{self.version}.json or similar; it has {files}")
        split = self._read("train", "train")
        if not split.collection.has_answers:
            raise UserError("no-answers", f"{self.files['train']} has no answers to train on")
        return split

    @cached_property
    def _others(self) -> list[SquadSplit]:
        others = {key: path for key, path in self.files.items() if key != "train"}
        return [self._read(key, path.stem if key == SINGLE else key) for key, path in others.items()]

    def _read(self, key: str, name: str) -> SquadSplit:
        """Read a file and cut it into windows; adds to `notes`."""
        collection = read_squad(self.files[key], self.version, on_error=self.settings.task.on_error)
        return self._split(name, collection, is_training=key == "train")

    def encode(self, pairs: Sequence[tuple[str, str]]) -> SquadSplit:
        """Questions and the context of each, which are given themselves, as a split."""
        contexts = {context: number for number, context in enumerate(dict.fromkeys(context for _, context in pairs))}
        questions = [Question(str(number), text, contexts[context], ()) for number, (text, context) in enumerate(pairs)]
        return self._split("texts", Collection(Path("texts"), list(contexts), questions, False, []), is_training=False)

    def _split(self, name: str, collection: Collection, *, is_training: bool) -> SquadSplit:
        task = self.settings.task
        paragraphs = tokenize(collection.contexts, self.vocabulary)
        collection, spans = self._drop_unusable(collection, paragraphs, is_training=is_training)
        queries = tokenize([question.text for question in collection.questions], self.vocabulary)
        targets = spans.spans if collection.has_answers else None
        windows = make_windows(collection, paragraphs, queries, targets, self.vocabulary, self.settings)
        self._add_notes(name, collection, windows, spans, int(np.sum(queries.counts > task.max_query_length)))
        return SquadSplit(name, self.version, collection, windows, task)

    def _drop_unusable(
        self, collection: Collection, paragraphs: TokenizedTexts, *, is_training: bool
    ) -> tuple[Collection, AnswerSpans]:
        """Drop the unusable questions, or stop at the first.

        An answer that is not in its paragraph cannot be trained on, but it can be scored, as scoring compares texts.
        """
        spans = locate_answers(collection, paragraphs)
        usable, problems = [], list(collection.problems)
        for number, question in enumerate(collection.questions):
            if not paragraphs.counts[question.context]:
                problem = "has a context without a token"
            elif is_training and not spans.is_usable[number]:
                problem = f"has the answer {shorten(question.answers[0].text)!r}, which is not in its context"
            else:
                usable.append(number)
                continue
            sentence = f"{collection.path}: question {question.id} {problem}"
            if self.settings.task.on_error == "stop":
                raise UserError("bad-question", f"{sentence}; {SKIP_HINT}")
            problems.append(sentence)
        if not usable:
            raise UserError(
                "no-usable-question", f"{collection.path} has no usable question; the first problem: {problems[0]}"
            )
        questions = [collection.questions[number] for number in usable]
        kept = replace(spans, spans=spans.spans[usable], is_usable=spans.is_usable[usable])
        return replace(collection, questions=questions, problems=problems), kept

    def _add_notes(
        self, name: str, collection: Collection, windows: Windows, spans: AnswerSpans, num_truncated: int
    ) -> None:
        path, task = collection.path, self.settings.task
        num_missing = int(np.sum(~spans.is_usable))
        is_v2 = self.version == "v2.0" and collection.has_answers
        self.notes.append(
            f"{name}: {len(collection.questions):,} questions about {len(collection.contexts):,} paragraphs of {path}, "
            f"in {len(windows.question):,} windows of at most {self.settings.data.max_seq_length} tokens"
        )
        if collection.problems:
            self.notes.append(f"skipped {len(collection.problems):,}; the first: {collection.problems[0]}")
        if spans.num_moved:
            self.notes.append(f"{spans.num_moved:,} answers of {path} were found elsewhere than at their answer_start")
        if num_missing:
            self.notes.append(f"{num_missing:,} answers of {path} are not in their paragraphs; they are scored as text")
        if num_truncated:
            self.notes.append(f"truncated {num_truncated:,} questions of {path} to {task.max_query_length} tokens")
        if is_v2 and all(question.answers for question in collection.questions):
            self.notes.append(f"every question of {path} has an answer, as in squad/v1.1")
