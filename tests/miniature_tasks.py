"""Miniature tasks that a model of two layers learns in a second, and the command line without a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bertrain.cli import main
from bertrain.config.settings import Settings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.ranks.parallel import Ranks
from bertrain.run.folder import Run
from bertrain.tasks.registry import open_task
from bertrain.tasks.task import Split, TaskOutputs
from bertrain.training.engine import predictor
from bertrain.training.start import pretrain
from bertrain.training.task_evaluator import TaskEvaluator
from bertrain.training.task_settings import resolve_task
from bertrain.weights.source import build_model, read_weights
from tests import helpers

COLOURS = ("red", "green", "blue")
TOPICS = [helpers.vocabulary_words()[first::6] for first in range(6)]
QUICK = {
    "data.max_seq_length": "32",
    "optimizer.learning_rate": "3e-3",
    "train.threads": "1",
    "train.device": "cpu",
    "train.precision": "fp32",
    "evaluate.every_epochs": "0",
    "log.trackers": "none",
}
"""Settings over a task's recipe with which a miniature is learnt."""
NO_DROPOUT = {"model.hidden_dropout": "0", "model.attention_dropout": "0", "model.head_dropout": "0"}


@dataclass(frozen=True)
class Miniature:
    """Weights to begin with, and the data of four tasks."""

    base: Path
    table: Path
    numbers: Path
    questions: Path
    label_sets: Path
    names: Path


def make_miniature(folder: Path) -> Miniature:
    """Everything in one folder. The weights are hardly trained, but large enough to tell words apart at once."""
    data = helpers.make_data(folder, documents=10)
    made = Miniature(*(folder / name for name in ("base", "table", "numbers", "questions", "label_sets", "names")))
    settings = helpers.tiny_settings(
        train__max_steps=1, schedule__warmup_steps=0, model__initializer_range=0.2, log__level="quiet"
    )
    pretrain(settings, data, made.base)
    for place in (made.table, made.numbers, made.questions, made.label_sets, made.names):
        place.mkdir()
    for name, count, seed in (("train", 240, 1), ("dev", 60, 2)):
        (made.table / f"{name}.csv").write_text("text,label\n" + "".join(map("{},{}\n".format, *coloured(count, seed))))
        (made.numbers / f"{name}.tsv").write_text(shares(count, seed))
        (made.questions / f"{name}-v1.1.json").write_text(questions(count, seed))
        (made.label_sets / f"{name}.jsonl").write_text(label_sets(count, seed))
        (made.names / f"{name}.conll").write_text(names(count, seed))
    texts, _ = coloured(30, 3)
    (made.table / "test.csv").write_text("id,text\n" + "".join(f"row-{n},{text}\n" for n, text in enumerate(texts)))
    return made


def coloured(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts of the words of one topic, and the colour of that topic."""
    draw = random.Random(seed)
    topics = [draw.randrange(3) for _ in range(count)]
    texts = [" ".join(draw.choices(TOPICS[topic], k=draw.randint(4, 9))) for topic in topics]
    return texts, [COLOURS[topic] for topic in topics]


def shares(count: int, seed: int) -> str:
    """A table of texts of two topics, and the share of the first."""
    draw, rows = random.Random(seed), ["text\tlabel"]
    for _ in range(count):
        length = draw.randint(4, 8)
        first = draw.randint(0, length)
        words = draw.choices(TOPICS[0], k=first) + draw.choices(TOPICS[1], k=length - first)
        draw.shuffle(words)
        rows.append(f"{' '.join(words)}\t{first / length:.3f}")
    return "\n".join(rows) + "\n"


def label_sets(count: int, seed: int) -> str:
    """JSON lines of texts with words of any of three topics, and the colors of these topics, rarer and rarer."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        topics = [topic for topic, share in enumerate((0.6, 0.45, 0.15)) if draw.random() < share]
        words = [word for topic in topics for word in draw.choices(TOPICS[topic], k=3)] or draw.choices(TOPICS[5], k=3)
        draw.shuffle(words)
        rows.append(json.dumps({"text": " ".join(words), "label": [COLOURS[topic] for topic in topics]}) + "\n")
    return "".join(rows)


def questions(count: int, seed: int) -> str:
    """SQuAD in which the answer is the one word of its topic in the text."""
    draw, paragraphs = random.Random(seed), []
    for number in range(count):
        words = draw.choices(TOPICS[2] + TOPICS[3], k=8)
        place, answer = draw.randrange(8), draw.choice(TOPICS[1])
        words[place] = answer
        found = {"text": answer, "answer_start": len(" ".join([*words[:place], ""]))}
        asked = {"id": f"{seed}-{number}", "question": "bato bato", "answers": [found]}
        paragraphs.append({"context": " ".join(words), "qas": [asked]})
    return json.dumps({"version": "1.1", "data": [{"title": "miniature", "paragraphs": paragraphs}]})


def names(count: int, seed: int) -> str:
    """CoNLL in which the topic of a word tells its tag; entities have one or two words, some words several pieces."""
    draw, blocks = random.Random(seed), []
    first, second = {"person": TOPICS[0], "place": TOPICS[1]}, {"person": TOPICS[4], "place": TOPICS[5]}
    for _ in range(count):
        rows = []
        for _ in range(draw.randint(2, 4)):
            kind = draw.choice(("person", "place"))
            words = [(draw.choice(TOPICS[2] + TOPICS[3]), "O"), (draw.choice(first[kind]), f"B-{kind}")]
            words += [(draw.choice(second[kind]), f"I-{kind}")] * draw.randint(0, 1)
            rows += [f"{word}{draw.choice(('', 'tose'))}\t{tag}\n" for word, tag in words]
        blocks.append("".join(rows))
    return "\n".join(blocks)


def settings_for(task: str = "classify", **changes: object) -> Settings:
    """A task's recipe made quick; keys with __ for the dot."""
    given = {key.replace("__", "."): str(value).lower() for key, value in changes.items()}
    if task.startswith("squad/"):
        given = {"task.max_query_length": "8"} | given
    return resolve_task(task, list((QUICK | {"log.level": "quiet"} | given).items()))


def arguments(**changes: object) -> list[str]:
    """The same as words of the command line."""
    given = QUICK | {key.replace("__", "."): str(value).lower() for key, value in changes.items()}
    return [word for key, value in given.items() for word in (f"--{key}", value)]


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str


def command_line(*words: object, check: bool = True, as_on_terminal: bool = False) -> Ended:
    """`bertrain ...` in this process, which has torch loaded; what ranks print is not in `out`.

    As on a terminal, `out` and `err` both hold all lines in the order in which they were printed.
    """
    out = io.StringIO()
    err = out if as_on_terminal else io.StringIO()
    code: Any = None
    with (
        mock.patch.object(sys, "argv", ["bertrain", *map(str, words)]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main.main()
        except SystemExit as ending:
            code = ending.code
    ended = Ended(int(code or 0), helpers.unwrapped(out.getvalue()), helpers.unwrapped(err.getvalue()))
    assert not check or ended.code == 0, ended
    return ended


def outputs_of(run: Path, split: Split, words: Vocabulary) -> TaskOutputs:
    """What a run's model says of a split, computed in flat bins."""
    settings, cpu = Run.open(run).settings, torch.device("cpu")
    task = open_task(settings, Run.open(run).data, words)
    judge = TaskEvaluator(task, {split.name: split}, settings, Run.open(run).data, words)
    said, _ = judge.outputs(split, predictor(build_model(read_weights(run)), settings, cpu), Ranks(0, 1, cpu))
    return said
