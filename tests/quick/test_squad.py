"""SQuAD's windows and answers against a plain twin, on real questions, and what becomes of characters."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.text.tokenizer import build_pipeline
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.squad.answers import Candidate, rank_answers
from bertrain.tasks.squad.files import find_file, read_squad
from bertrain.tasks.squad.task import SquadSplit, SquadTask
from bertrain.tasks.squad.windows import find_nearest
from tests.helpers import SHARED_DATA, refused
from tests.plain_squad import PlainWindow, plain_answers, plain_windows

SAMPLE = Path(__file__).parents[1] / "data" / "squad"
SQUAD = SHARED_DATA / "squad"


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.load()


def settings_of(version: str, **given: object) -> Settings:
    values = {
        "task.name": f"squad/{version}",
        "model.max_positions": "512",
        "data.max_seq_length": "384",
        "batch.token_budget": "4096",
    } | {key.replace("__", "."): str(value) for key, value in given.items()}
    return resolve("bert-tiny", list(values.items()))


def open_task(folder: Path, version: str = "v1.1", **given: object) -> SquadTask:
    return SquadTask.open(settings_of(version, **given), folder, vocabulary())


def dev_of(task: SquadTask) -> SquadSplit:
    (split,) = task.held_out().values()
    assert isinstance(split, SquadSplit)
    return split


def twin_windows(split: SquadSplit, settings: Settings) -> list[list[PlainWindow]]:
    pipeline = build_pipeline(vocabulary())
    found = []
    for question in split.collection.questions:
        context = pipeline.encode(split.collection.contexts[question.context])
        answer = None
        if question.answers:
            answer = (question.answers[0].start, question.answers[0].start + len(question.answers[0].text))
        found.append(
            plain_windows(
                pipeline.encode(question.text).ids,
                context.ids,
                context.offsets,
                answer,
                cls=vocabulary().id_of("[CLS]"),
                sep=vocabulary().id_of("[SEP]"),
                max_seq_length=settings.data.max_seq_length,
                doc_stride=settings.task.doc_stride,
                max_query_length=settings.task.max_query_length,
            )
        )
    return found


NARROW = {"data__max_seq_length": 70, "task__doc_stride": 17, "task__max_query_length": 9}
WIDE_STRIDE = {"data__max_seq_length": 96, "task__doc_stride": 500}


@pytest.mark.parametrize("n_best", [1, 2, 20])
def test_the_best_text_is_known_though_no_answer_comes_before_it(n_best: int) -> None:
    answers = rank_answers("q", [Candidate("Paris", 4.0, 5.0)], Candidate("", 5.0, 4.5), n_best)
    assert answers.null_odds == 0.5
    assert (answers.prediction(0.0), answers.prediction(1.0)) == ("", "Paris")


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
@pytest.mark.parametrize("given", [{}, NARROW, WIDE_STRIDE], ids=["usual", "narrow", "wide-stride"])
def test_windows_and_answers_are_those_of_the_plain_twin(version: str, given: dict[str, int], tmp_path: Path) -> None:
    given = {"task__n_best": 5, "task__max_answer_length": 6} | given
    task = open_task(SAMPLE, version, **given)
    split = dev_of(task)
    block, twins = split.block, twin_windows(split, task.settings)
    flat = [window for windows in twins for window in windows]
    assert block.tokens.tolist() == [token for window in flat for token in window.tokens]
    assert block.lengths.tolist() == [len(window.tokens) for window in flat]
    assert block.segment_b.tolist() == [window.segment_b for window in flat]
    assert block.answers is not None
    assert block.answers.tolist() == [list(window.answer) for window in flat]
    assert not block.is_random.any()
    assert block.lengths.max() <= task.settings.data.max_seq_length
    for windows in twins:
        for one, other in pairwise(windows):
            assert 4 * (one.first + one.count - other.first) >= one.count - 3, "windows overlap, whatever the stride"

    # Rounded, so that many scores are equal and the order of equal ones shows.
    outputs = np.random.default_rng(1).normal(size=(len(block.tokens), 2)).round(1).astype(np.float32)
    files = {path.name: json.loads(path.read_text()) for path in split.write_predictions(outputs, tmp_path)}
    expected_lists, expected_odds, rows = {}, {}, iter(np.split(outputs, np.cumsum(block.lengths)[:-1]))
    for question, windows in zip(split.collection.questions, twins, strict=True):
        expected_lists[question.id], expected_odds[question.id] = plain_answers(
            windows,
            [[tuple(pair) for pair in next(rows).tolist()] for _ in windows],
            split.collection.contexts[question.context],
            n_best=5,
            max_answer_length=6,
            with_null=version == "v2.0",
        )
    listed = files["nbest_predictions.json"]
    assert list(listed) == [question.id for question in split.collection.questions]
    for identifier, expected in expected_lists.items():
        probabilities = [one.pop("probability") for one in expected]
        assert [one.pop("probability") for one in listed[identifier]] == pytest.approx(probabilities, rel=1e-12)
        assert listed[identifier] == expected
    best = {identifier: next((one["text"] for one in some if one["text"]), "") for identifier, some in listed.items()}
    if version == "v1.1":
        assert files["predictions.json"] == best
        assert "null_odds.json" not in files
    else:
        assert files["null_odds.json"] == pytest.approx(expected_odds, rel=1e-12)
        given_out = {identifier: "" if odds > 0 else best[identifier] for identifier, odds in expected_odds.items()}
        assert files["predictions.json"] == given_out
        assert set(given_out.values()) > {""}


def right_outputs(split: SquadSplit, strength: float = 20.0) -> Any:
    """What a model says that has learnt the answers by heart."""
    block = split.block
    assert block.answers is not None
    outputs = np.random.default_rng(0).normal(size=(len(block.tokens), 2)).astype(np.float32)
    for side in (0, 1):
        outputs[block.offsets[:-1] + block.answers[:, side], side] += strength
    return outputs


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_a_model_that_is_right_scores_full_marks(version: str) -> None:
    split = dev_of(open_task(SAMPLE, version, task__max_answer_length=100))
    figures = split.metrics(right_outputs(split))
    assert figures["f1"] == 100.0
    assert figures["exact_match" if version == "v1.1" else "exact"] == 100.0
    if version == "v2.0":
        assert figures["HasAns_f1"] == figures["NoAns_f1"] == figures["best_f1"] == 100.0


def test_the_best_threshold_reaches_the_figure_it_promises() -> None:
    split = dev_of(open_task(SAMPLE, "v2.0"))
    outputs = right_outputs(split, strength=2.5)
    promised = split.metrics(outputs)
    assert promised["best_f1"] > promised["f1"]
    with_it = dev_of(open_task(SAMPLE, "v2.0", task__null_threshold=promised["best_f1_thresh"]))
    assert with_it.metrics(outputs)["f1"] == pytest.approx(promised["best_f1"], abs=1e-9)


def write_flat(path: Path, context: str, *rows: tuple[str, int]) -> Path:
    """A table of questions on one context; each row is an answer and its place."""
    lines = [
        json.dumps(
            {
                "id": f"q{number}",
                "context": context,
                "question": "what is it?",
                "answers": {"text": [text], "answer_start": [start]},
            }
        )
        for number, (text, start) in enumerate(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_answers_keep_their_characters(tmp_path: Path) -> None:
    """Case, accents (composed or not), punctuation and odd spaces stand in the answer as in the paragraph."""
    answers = ["The  CAFE\u0301", "Z\u00fcrich\u2019s", "(1990s)", "\u97d3\u570b", "$3.5\u00a0million", "co\u00adop"]
    context = "; ".join(["In it", *answers, "and more."])
    file = write_flat(tmp_path / "dev.jsonl", context, *((answer, context.index(answer)) for answer in answers))
    split = dev_of(open_task(file))
    given = [one.best for one in split.answers(right_outputs(split))]
    assert given == answers


def test_an_answer_within_a_word_is_the_word(tmp_path: Path) -> None:
    context = "It was in the 1990s that it began."
    split = dev_of(open_task(write_flat(tmp_path / "dev.jsonl", context, ("1990", 14))))
    (given,) = split.answers(right_outputs(split))
    assert given.best == "1990s"


def test_an_answer_that_stands_elsewhere_is_found_there(tmp_path: Path) -> None:
    context = "red and blue and red and green"
    write_flat(tmp_path / "train.jsonl", context, ("red", 17), ("red", 2), ("green", 0), ("blue", 999))
    task = open_task(tmp_path)
    split = task.training()
    assert split.block.answers is not None
    tokens_before_context = 6  # [CLS] what is it ? [SEP]
    assert (split.block.answers - tokens_before_context).tolist() == [[4, 4], [0, 0], [6, 6], [2, 2]]
    assert any(note.startswith("3 answers") for note in task.notes)
    assert find_nearest("ab ab ab", "ab", 4) == 3
    assert find_nearest("ab ab ab", "ab", 5) == 6
    assert find_nearest("ab", "c", 0) == -1


def test_tables_are_read_as_the_official_form_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    for version in ("v1.1", "v2.0"):
        official = read_squad(SAMPLE / f"dev-{version}.json", version)  # type: ignore[arg-type]
        rows = [
            {
                "id": question.id,
                "title": "",
                "context": official.contexts[question.context],
                "question": question.text,
                "answers": {
                    "text": [answer.text for answer in question.answers],
                    "answer_start": [answer.start for answer in question.answers],
                },
            }
            for question in official.questions
        ]
        lines, table = tmp_path / f"{version}.jsonl", tmp_path / f"{version}.parquet"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), table)
        for path in (lines, table):
            read = read_squad(path, version)  # type: ignore[arg-type]
            assert (read.contexts, read.questions) == (official.contexts, official.questions)
            assert read.has_answers


def test_which_file_is_taken(tmp_path: Path) -> None:
    def found(*names: str, version: str = "v1.1") -> str | None:
        for old in tmp_path.iterdir():
            old.unlink()
        for name in names:
            (tmp_path / name).touch()
        path = find_file(tmp_path, ("dev", "validation"), version)  # type: ignore[arg-type]
        return path and path.name

    assert found("dev-v1.1.json", "dev-v2.0.json") == "dev-v1.1.json"
    assert found("dev-v1.1.json", "dev-v2.0.json", version="v2.0") == "dev-v2.0.json"
    assert found("dev-v2.0-cs224n.json", "dev-v1.1.json", version="v2.0") == "dev-v2.0-cs224n.json"
    assert found("dev-v1.1.json", "dev-v1.1-small.json") == "dev-v1.1.json"
    assert found("validation-00000-of-00001.parquet", "train-00000-of-00001.parquet")
    assert found("dev.jsonl", "developers.json", "dev.txt") == "dev.jsonl"
    assert found("dev-v2.0.json") is None
    with refused("ambiguous-files", tmp_path, "dev-a.json", "dev-b.json"):
        found("dev-a.json", "dev-b.json")


def test_a_file_without_answers_is_to_be_predicted(tmp_path: Path) -> None:
    content = json.loads((SAMPLE / "dev-v1.1.json").read_text())
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                del question["answers"]
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(content))
    task = open_task(file)
    assert not task.held_out()
    assert list(task.to_predict()) == ["questions"]
    split = task.to_predict()["questions"]
    assert split.block.answers is None
    assert split.num_examples == 65
    outputs = np.zeros((len(split.block.tokens), 2), np.float32)
    predictions = json.loads(split.write_predictions(outputs, tmp_path / "out")[0].read_text())
    assert len(predictions) == 65
    with refused("missing-split", "train-v1.1.json", file):
        task.training()


def test_a_question_needs_room_for_a_text_beside_it() -> None:
    with refused("query-too-long", "task.max_query_length 64"):
        settings_of("v1.1", data__max_seq_length=67)
    settings_of("v1.1", data__max_seq_length=68)
