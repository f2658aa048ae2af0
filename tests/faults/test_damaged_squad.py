"""SQuAD's files, damaged or of another kind: one sentence with the file and the question, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary
from bertrain.tasks.squad.files import read_squad
from bertrain.tasks.squad.task import SquadTask
from tests.unit.test_squad import SAMPLE, open_task, settings_of

Damage = Callable[[dict[str, Any]], None]


def small(version: str = "v1.1") -> dict[str, Any]:
    """The first paragraph of the sample's training file."""
    content = json.loads((SAMPLE / f"train-{version}.json").read_text())
    content["data"] = content["data"][:1]
    content["data"][0]["paragraphs"] = content["data"][0]["paragraphs"][:1]
    return dict(content)


def first_question(content: dict[str, Any]) -> dict[str, Any]:
    question: dict[str, Any] = content["data"][0]["paragraphs"][0]["qas"][0]
    return question


def set_question(**fields: Any) -> Damage:
    return lambda content: first_question(content).update(fields)


def drop_field(name: str) -> Damage:
    return lambda content: first_question(content).pop(name)


def repeat_question(content: dict[str, Any]) -> None:
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions.append(copy.deepcopy(questions[0]))


def two_articles(damage: Damage) -> Damage:
    """The damage, with an undamaged article behind it."""

    def apply(content: dict[str, Any]) -> None:
        whole = copy.deepcopy(content["data"][0])
        for question in whole["paragraphs"][0]["qas"]:
            question["id"] += "-again"
        damage(content)
        content["data"].append(whole)

    return apply


DAMAGES: dict[str, tuple[Damage, str]] = {
    "answer nowhere": (set_question(answers=[{"text": "Atlantis", "answer_start": 3}]), "'Atlantis', which does not"),
    "answer of controls": (set_question(answers=[{"text": "\x07", "answer_start": 3}]), "an empty 'text'"),
    "empty question": (set_question(question=" \n"), "has an empty 'question'"),
    "no question": (drop_field("question"), "has no 'question'"),
    "question of another type": (set_question(question=["what?"]), "'question' that is no text"),
    "lone surrogate": (set_question(question="what \ud800?"), "lone surrogate"),
    "question of controls": (set_question(question="\x00\u200b"), "has an empty 'question'"),
    "no id": (drop_field("id"), "question 1 of paragraph 1 of article 1 has no 'id'"),
    "repeated id": (repeat_question, "has the id of another"),
    "answers as a text": (set_question(answers="France"), "'answers' that are no list"),
    "answer without text": (set_question(answers=[{"answer_start": 3}]), "has no 'text'"),
    "empty answer": (set_question(answers=[{"text": "", "answer_start": 3}]), "has an empty 'text'"),
    "answer without a place": (set_question(answers=[{"text": "France"}]), "'answer_start' is no place"),
    "negative place": (set_question(answers=[{"text": "France", "answer_start": -1}]), "'answer_start' is no place"),
    "place as a text": (set_question(answers=[{"text": "France", "answer_start": "9"}]), "'answer_start' is no place"),
    "lists that differ": (set_question(answers={"text": ["a"], "answer_start": []}), "without as many 'text'"),
    "empty context": (lambda content: content["data"][0]["paragraphs"][0].update(context=" "), "an empty 'context'"),
    "no context": (lambda content: content["data"][0]["paragraphs"][0].pop("context"), "has no 'context'"),
    "context of controls": (
        lambda content: content["data"][0]["paragraphs"][0].update(context="\x00"),
        "an empty 'con",
    ),
    "context of no word": (
        lambda content: content["data"][0]["paragraphs"][0].update(context="\ufffd"),
        "without a word",
    ),
    "no questions": (lambda content: content["data"][0]["paragraphs"][0].pop("qas"), "paragraph 1 of article 1 has no"),
    "article of another type": (lambda content: content["data"].insert(0, 7), "article 1 has no list 'paragraphs'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_question_is_named_or_passed_over(name: str, tmp_path: Path) -> None:
    damage, sentence = DAMAGES[name]
    content = small()
    two_articles(damage)(content)
    file = tmp_path / "train.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        open_task(tmp_path).training()
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)
    assert "--on-error skip" in str(caught.value)

    task = open_task(tmp_path, task__on_error="skip")
    assert task.training().num_examples >= len(content["data"][-1]["paragraphs"][0]["qas"])
    assert any("passed over" in note and sentence in note for note in task.notes)


def test_an_answer_that_cannot_be_found_is_scored_by_its_text(tmp_path: Path) -> None:
    content = small()
    first_question(content)["answers"] = [{"text": "Atlantis", "answer_start": 3}]
    (tmp_path / "dev.json").write_text(json.dumps(content))
    task = open_task(tmp_path)
    assert task.held_out()["dev"].num_examples == len(content["data"][0]["paragraphs"][0]["qas"])
    assert any(note.startswith("1 answers") and "nowhere" in note for note in task.notes)


@pytest.mark.parametrize(
    ("version", "damage", "sentence"),
    [
        ("v1.1", set_question(is_impossible=True, answers=[]), "the task for this file is squad/v2.0"),
        ("v1.1", set_question(answers=[]), "has no answers while others do"),
        ("v2.0", drop_field("answers"), "has no answers while others do"),
        ("v1.1", lambda content: content.update(data={}), "has no list 'data' at its top"),
        ("v1.1", lambda content: content.update(data=[]), "holds no question"),
    ],
)
def test_a_file_of_another_kind_is_refused_whatever_may_be_skipped(
    version: str, damage: Damage, sentence: str, tmp_path: Path
) -> None:
    content = small()
    damage(content)
    (tmp_path / "train.json").write_text(json.dumps(content))
    for on_error in ("stop", "skip"):
        with pytest.raises(UserError) as caught:
            open_task(tmp_path, version, task__on_error=on_error).training()
        assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("train.json", b'{"data": [\n {"x": }]}', "line 2, column 8"),
        ("train.json", b"[" * 100_000, "is no JSON that can be read"),
        ("train.json", b'{"data": 1' + b"0" * 5000 + b"}", "is no JSON that can be read"),
        ("train.json", b'{"data": ["caf\xe9"]}', "is not UTF-8 text (byte 14 is not)"),
        ("train.json", b"", "line 1, column 1"),
        ("train.json", b'{"id": "1", "context": "red"}', "should be called .jsonl"),
        ("train.jsonl", b'{"id": "1"}\n{"id": \n', "line 2 is no JSON"),
        ("train.jsonl", b"[]\n", "line 1 is no object"),
        ("train.parquet", b"PAR1 and then nothing PAR1", "is no Parquet file"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_task(tmp_path).training()
    if name == "train.jsonl" and "line 2" in sentence:  # the first line is damaged too
        with pytest.raises(UserError, match="holds no question"):
            open_task(tmp_path, task__on_error="skip").training()
    else:
        assert sentence in str(caught.value)


def test_folders_without_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no file for squad/v1.1: train-v1.1.json"):
        open_task(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        open_task(tmp_path / "nowhere")
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(small()))
    with pytest.raises(UserError, match=r"no file to train on, such as train-v1.1.json"):
        open_task(tmp_path).training()


# --- fuzz ----------------------------------------------------------------------------------------------------

LETTERS = Vocabulary((*SPECIAL_WORDS, *ascii_lowercase, *("##" + letter for letter in ascii_lowercase)), True)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "qas", "id"]), inner),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    found = [(value, key) for key, _ in items]
    for _, inner in items:
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), version=st.sampled_from(["v1.1", "v2.0"]), on_error=st.sampled_from(["stop", "skip"]))
def test_changed_values_end_in_a_sentence_or_are_read(
    room: Path, data: st.DataObject, version: str, on_error: str
) -> None:
    content = small(version)
    for _ in range(data.draw(st.integers(1, 3))):
        if not (there := places(content)):
            break
        container, key = data.draw(st.sampled_from(there))
        if data.draw(st.booleans()):
            container[key] = data.draw(values)
        elif isinstance(container, dict):
            del container[key]
    file = room / f"train-{version}.json"
    file.write_text(json.dumps(content))
    try:
        split = SquadTask.open(settings_of(version, task__on_error=on_error), room, LETTERS).training()
    except UserError:
        return
    assert split.num_examples
    assert split.block.answers is not None
    assert (split.block.answers < split.block.lengths[:, None]).all()


@given(data=st.data(), ending=st.sampled_from(["json", "jsonl", "parquet"]))
def test_changed_bytes_end_in_a_sentence_or_are_read(room: Path, data: st.DataObject, ending: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    paragraph = small()["data"][0]["paragraphs"][0]
    rows = [question | {"context": paragraph["context"]} for question in paragraph["qas"]]
    file = room / f"changed.{ending}"
    if ending == "json":
        file.write_text(json.dumps(small()))
    elif ending == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))])
    with contextlib.suppress(UserError):
        assert read_squad(file, "v1.1").questions
