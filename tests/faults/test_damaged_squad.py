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
from bertrain.tasks import registry
from bertrain.tasks.squad.files import read_squad
from bertrain.tasks.squad.task import SquadTask
from tests.helpers import refused
from tests.quick.test_squad import SAMPLE, open_task, settings_of

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
    "answer nowhere": (set_question(answers=[{"text": "Atlantis", "answer_start": 3}]), "'Atlantis'"),
    "answer of controls": (set_question(answers=[{"text": "\x07", "answer_start": 3}]), "'text'"),
    "empty question": (set_question(question=" \n"), "'question'"),
    "no question": (drop_field("question"), "'question'"),
    "question of another type": (set_question(question=["what?"]), "'question'"),
    "lone surrogate": (set_question(question="what \ud800?"), "surrogate"),
    "question of controls": (set_question(question="\x00\u200b"), "'question'"),
    "no id": (drop_field("id"), "question 1 of paragraph 1 of article 1"),
    "repeated id": (repeat_question, " id "),
    "answers as a text": (set_question(answers="France"), "'answers'"),
    "answer without text": (set_question(answers=[{"answer_start": 3}]), "'text'"),
    "empty answer": (set_question(answers=[{"text": "", "answer_start": 3}]), "'text'"),
    "answer without a place": (set_question(answers=[{"text": "France"}]), "'answer_start'"),
    "negative place": (set_question(answers=[{"text": "France", "answer_start": -1}]), "'answer_start'"),
    "place as a text": (set_question(answers=[{"text": "France", "answer_start": "9"}]), "'answer_start'"),
    "lists that differ": (set_question(answers={"text": ["a"], "answer_start": []}), "'answer_start'"),
    "empty context": (lambda content: content["data"][0]["paragraphs"][0].update(context=" "), "'context'"),
    "no context": (lambda content: content["data"][0]["paragraphs"][0].pop("context"), "'context'"),
    "context of controls": (
        lambda content: content["data"][0]["paragraphs"][0].update(context="\x00"),
        "'context'",
    ),
    "context of no word": (
        lambda content: content["data"][0]["paragraphs"][0].update(context="\ufffd"),
        "context",
    ),
    "no questions": (lambda content: content["data"][0]["paragraphs"][0].pop("qas"), "paragraph 1 of article 1"),
    "article of another type": (lambda content: content["data"].insert(0, 7), "'paragraphs'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_question_is_named_or_passed_over(name: str, tmp_path: Path) -> None:
    damage, named = DAMAGES[name]
    content = small()
    two_articles(damage)(content)
    file = tmp_path / "train.json"
    file.write_text(json.dumps(content))
    with refused("bad-question", file, named, "--on-error skip"):
        open_task(tmp_path).training()

    task = open_task(tmp_path, task__on_error="skip")
    assert task.training().num_examples >= len(content["data"][-1]["paragraphs"][0]["qas"])
    assert any(str(file) in note and named in note for note in task.notes)


def test_an_answer_that_cannot_be_found_is_scored_by_its_text(tmp_path: Path) -> None:
    content = small()
    first_question(content)["answers"] = [{"text": "Atlantis", "answer_start": 3}]
    (tmp_path / "dev.json").write_text(json.dumps(content))
    task = open_task(tmp_path)
    assert task.held_out()["dev"].num_examples == len(content["data"][0]["paragraphs"][0]["qas"])
    assert any(note.startswith("1 answers") for note in task.notes)


@pytest.mark.parametrize(
    ("version", "damage", "code"),
    [
        ("v1.1", set_question(is_impossible=True, answers=[]), "other-squad-version"),
        ("v1.1", set_question(answers=[]), "partly-answered"),
        ("v2.0", drop_field("answers"), "partly-answered"),
        ("v1.1", lambda content: content.update(data={}), "not-squad"),
        ("v1.1", lambda content: content.update(data=[]), "no-usable-question"),
    ],
)
def test_a_file_of_another_kind_is_refused_whatever_may_be_skipped(
    version: str, damage: Damage, code: str, tmp_path: Path
) -> None:
    content = small()
    damage(content)
    (tmp_path / "train.json").write_text(json.dumps(content))
    for on_error in ("stop", "skip"):
        with refused(code, tmp_path / "train.json"):
            open_task(tmp_path, version, task__on_error=on_error).training()


@pytest.mark.parametrize(
    ("name", "content", "code", "named"),
    [
        ("train.json", b'{"data": [\n {"x": }]}', "bad-json", "line 2 column 8"),
        ("train.json", b"[" * 100_000, "bad-json", "train.json"),
        ("train.json", b'{"data": 1' + b"0" * 5000 + b"}", "bad-json", "train.json"),
        ("train.json", b'{"data": ["caf\xe9"]}', "not-utf8", "byte 14"),
        ("train.json", b"", "bad-json", "line 1 column 1"),
        ("train.json", b'{"id": "1", "context": "red"}', "not-squad", ".jsonl"),
        ("train.jsonl", b'{"id": "1"}\n{"id": \n', "bad-question", "question 1"),
        ("train.jsonl", b"7\n", "bad-question", "line 1"),
        ("train.parquet", b"PAR1 and then nothing PAR1", "damaged-table", "train.parquet"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes, code: str, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(code, tmp_path / name, named):
        open_task(tmp_path).training()
    if name == "train.jsonl":  # no line is left
        with refused("no-usable-question", tmp_path / name):
            open_task(tmp_path, task__on_error="skip").training()


def test_folders_without_files(tmp_path: Path) -> None:
    with refused("missing-data", tmp_path, "train-v1.1.json"):
        open_task(tmp_path)
    with refused("missing-data", tmp_path / "nowhere"):
        registry.open_task(settings_of("v1.1"), tmp_path / "nowhere", LETTERS)
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(small()))
    with refused("missing-split", "train-v1.1.json"):
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
