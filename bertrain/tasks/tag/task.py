"""The task `tag`: a tag for each word of the user's own sentences, such as the names of persons and places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically, write_json_lines
from bertrain.base.formatting import counted
from bertrain.base.seeds import combine, derive
from bertrain.config.settings import Settings
from bertrain.data.formats.block import Block
from bertrain.data.text.records import listed
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED
from bertrain.run.records import ClassScores
from bertrain.tasks.classify import count_held_out, find_files
from bertrain.tasks.metrics import softmax
from bertrain.tasks.tables import BadRows
from bertrain.tasks.tag.encode import encode_words
from bertrain.tasks.tag.files import TAG_FORMATS, TAG_STEMS, Sentence, TextSplit, read_sentences
from bertrain.tasks.tag.schemes import Scheme, recognize
from bertrain.tasks.tag.scoring import report_by_type, score_tags, scores_by_type
from bertrain.tasks.task import Head, TaskOutputs
from bertrain.tasks.windows import overlapping_stride


@dataclass(frozen=True)
class TagSplit:
    """Sentences, their tags in the scheme of the task, and the windows that the model reads."""

    name: str
    sentences: list[Sentence]
    block: Block
    labels: tuple[str, ...]
    scheme: Scheme

    @property
    def num_examples(self) -> int:
        return len(self.sentences)

    @property
    def true_tags(self) -> list[list[str]]:
        """The tags of the file; the split must be labeled."""
        return [sentence.tags or [] for sentence in self.sentences]

    def _by_sentence(self, values: Sequence[Any]) -> list[Any]:
        """Values of all words, cut into those of each sentence."""
        words = iter(values)
        return [[next(words) for _ in sentence.words] for sentence in self.sentences]

    def predicted_tags(self, outputs: TaskOutputs) -> list[list[str]]:
        return self._by_sentence([self.labels[index] for index in outputs.argmax(axis=1).tolist()])

    def metrics(self, outputs: TaskOutputs) -> dict[str, float]:
        return score_tags(self.true_tags, self.predicted_tags(outputs), self.scheme)

    def report(self, outputs: TaskOutputs) -> str:
        """Precision, recall and F1 of each type, as text."""
        return report_by_type(self.true_tags, self.predicted_tags(outputs), self.scheme)

    def scores_by_class(self, outputs: TaskOutputs) -> tuple[ClassScores, ...]:
        return scores_by_type(self.true_tags, self.predicted_tags(outputs), self.scheme)

    def answers(self, outputs: TaskOutputs) -> list[dict[str, Any]]:
        """The text and the entities of each sentence; without entities in the scheme, all its words.

        The score of an entity is the mean probability of its words' tags.
        """
        scores = self._by_sentence(softmax(outputs).max(axis=1).tolist())
        found = []
        for sentence, tags, sure in zip(self.sentences, self.predicted_tags(outputs), scores, strict=True):
            entities = []
            for entity in self.scheme.entities(tags):
                start, end = sentence.span_of(entity)
                score = float(np.mean(sure[entity.first : entity.stop]))
                one = {"start": start, "end": end, "label": entity.type, "score": round(score, 6)}
                entities.append(one | {"text": sentence.text[start:end]})
            found.append({"text": sentence.text, "entities": entities})
        return found

    def write_predictions(self, outputs: TaskOutputs, folder: Path) -> list[Path]:
        """Write NAME.conll (word, true tag if it is known, predicted tag) and NAME.jsonl (text, entities)."""
        blocks, place = [], folder / f"{self.name}.conll"
        for sentence, tags in zip(self.sentences, self.predicted_tags(outputs), strict=True):
            known = [] if sentence.tags is None else [sentence.tags]
            rows = zip(sentence.words, *known, self.scheme.convert(tags, self.scheme), strict=True)
            blocks.append("".join("\t".join(" ".join(field.split()) for field in row) + "\n" for row in rows))
        write_atomically(place, "\n".join(blocks))
        write_json_lines(place.with_suffix(".jsonl"), self.answers(outputs))
        return [place, place.with_suffix(".jsonl")]


class TagTask:
    """Files of sentences. Those to train on are read when they are first used, which adds to `notes`.

    The tags are those of the training data, or those that a trained model `saved`. With these, a single file is not
    trained on but predicted, and evaluated if it has tags. Without `data`, the task only encodes texts.
    """

    name = "tag"
    head: Head = "tag"

    def __init__(
        self, settings: Settings, data: Path | None, vocabulary: Vocabulary, saved: Mapping[str, Any] | None
    ) -> None:
        self.settings, self.data, self.vocabulary = settings, data, vocabulary
        self.notes: list[str] = []
        self._read, self._load = cache(self._read_files), cache(self._load_split)
        self.files: dict[str, list[Path]] = {}
        if data is not None:
            is_whole = saved is not None and not settings.task.hold_out
            self.files = find_files(data, self.notes, is_whole=is_whole, stems=TAG_STEMS, formats=TAG_FORMATS)
        asked = settings.task.text_split
        self.text_split: TextSplit = "punctuation" if asked == "auto" else asked
        if saved is None:
            self.labels, self.scheme = self._find_labels()
            if asked == "auto" and all(sentence.is_of_words for sentence in self._read("train")[0]):
                self.text_split = "spaces"  # parts of words were not trained on
        else:
            self.labels, self.scheme = tuple(saved["labels"]), Scheme(saved["scheme"], saved["is_prefixed"])
        self.main_metric = "accuracy" if self.scheme.name == "words" else "f1"
        others = [split for split in self.files if split != "train"]
        self._held_out = [split for split in others if self._is_labeled(split)]
        self._unlabeled = [split for split in others if split not in self._held_out]
        self.hold_out = settings.task.hold_out if "train" in self.files and not self._held_out else 0.0
        if self.hold_out:
            self._held_out = ["dev"]
            share = f"{self.hold_out:.0%} of its sentences are held out (task.hold_out)"
            self.notes.append(f"{data} has no dev part: {share}")
        elif not self._held_out and saved is None:
            self.notes.append(f"{data} has no held-out tags, such as a dev.conll: there will be no evaluation")

    def training(self) -> TagSplit:
        return self._load("train")

    def held_out(self) -> Mapping[str, TagSplit]:
        return {name: self._load(name) for name in self._held_out}

    def to_predict(self) -> Mapping[str, TagSplit]:
        return {name: self._load(name) for name in self._unlabeled or self._held_out}

    def to_dict(self) -> dict[str, Any]:
        scheme = {"scheme": self.scheme.name, "is_prefixed": self.scheme.is_prefixed}
        return {"name": self.name, "head": self.head, "labels": list(self.labels)} | scheme

    def encode(self, texts: Sequence[str]) -> TagSplit:
        """Texts that are given themselves as a split."""
        return self._split("texts", [Sentence.of_text(text, split=self.text_split) for text in texts])

    def _find_labels(self) -> tuple[tuple[str, ...], Scheme]:
        """The classes and the scheme of the training data."""
        sentences, found = self._read("train")
        path = self.files["train"][0]
        if not self._is_labeled("train"):
            raise UserError("no-answers", f"{path} has no tags to train on")
        scheme = Scheme("BIO") if found.name == "IOB1" else found
        labels = scheme.labels(sentence.tags or () for sentence in sentences)
        if len(labels) < 2:
            raise UserError("one-label", f"{path} has only the tag {labels[0]!r}; training needs two or more")
        described = {"words": "a class for each word, without entities", "IOB1": "IOB1, trained on as BIO"}
        self.notes.append(f"{path}: tags in the scheme {described.get(found.name, found.name)}; {len(labels)} classes")
        return labels, scheme

    def _is_labeled(self, split: str) -> bool:
        return self._read(split)[0][0].tags is not None

    def _read_files(self, split: str) -> tuple[list[Sentence], Scheme]:
        """The sentences of a split with their tags repaired, and the scheme of its files."""
        if split not in self.files:
            raise UserError("missing-split", f"--data {self.data} has no {split}.conll, .jsonl or .parquet")
        bad_rows = BadRows(self.settings.task.on_error)
        sentences = read_sentences(self.files[split], self.settings.task, bad_rows, self.text_split)
        if bad_rows.count:
            self.notes.append(f"{split}: skipped {counted(bad_rows.count, 'sentence')}; the first: {bad_rows.first}")
        try:
            scheme = recognize([sentence.tags or [] for sentence in sentences])
        except ValueError as error:
            raise UserError("mixed-schemes", f"{self.files[split][0]} has {error}; use one scheme") from None
        repaired = [_converted(sentence, scheme, scheme) for sentence in sentences]
        broken = [new for new, old in zip(repaired, sentences, strict=True) if new.tags != old.tags]
        if broken:
            count = f"{counted(len(broken), 'sentence')} with a broken sequence, such as I- after O"
            self.notes.append(f"{split}: repaired {count}; the first: {broken[0].place}")
        return repaired, scheme

    def _load_split(self, name: str) -> TagSplit:
        source = "train" if self.hold_out and name == "dev" else name
        sentences, scheme = self._read(source)
        if self.hold_out and name in ("train", "dev"):
            count = count_held_out(len(sentences), self.hold_out, self.data)
            is_held_out = _draw_held_out(len(sentences), count)
            chosen = np.flatnonzero(is_held_out if name == "dev" else ~is_held_out)
            sentences = [sentences[number] for number in chosen]
        return self._split(name, [_converted(sentence, scheme, self.scheme) for sentence in sentences])

    def _split(self, name: str, sentences: list[Sentence]) -> TagSplit:
        """Encode sentences; notes windows and unknown tags."""
        indices = {label: index for index, label in enumerate(self.labels)}
        labels = [
            IGNORED if sentence.tags is None else indices.get(sentence.tags[place], IGNORED)
            for sentence in sentences
            for place in range(len(sentence.words))
        ]
        longest, stride = self.settings.data.max_seq_length, self.settings.task.doc_stride
        words = [sentence.words for sentence in sentences]
        block = encode_words(self.vocabulary, words, np.array(labels, np.int64), longest, stride)
        if len(block) > len(sentences):
            overlap = f"one every {overlapping_stride(stride, longest)} (--task.doc_stride)"
            windows = f"{len(block):,} windows of at most {longest} tokens, {overlap}"
            self.notes.append(f"{name}: {counted(len(sentences), 'sentence')} in {windows}")
        unknown = sorted({tag for one in sentences for tag in one.tags or () if tag not in indices})
        if unknown:
            self.notes.append(f"{name}: has tags that are not in the training data: {listed(unknown)}")
        return TagSplit(name, sentences, block, self.labels, self.scheme)


def _converted(sentence: Sentence, scheme: Scheme, to: Scheme) -> Sentence:
    return sentence if sentence.tags is None else replace(sentence, tags=scheme.convert(sentence.tags, to))


def _draw_held_out(size: int, count: int) -> npt.NDArray[np.bool_]:
    """Which sentences are held out. It depends on these numbers alone: runs of all seeds hold out the same."""
    order = np.argsort(combine(derive("hold out"), np.arange(size)))
    is_held_out = np.zeros(size, bool)
    is_held_out[order[:count]] = True
    return is_held_out
