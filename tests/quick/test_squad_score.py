"""SQuAD's figures, to the last digit: as published for real predictions, and as another implementation has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.tasks.score import score
from bertrain.tasks.squad.files import Answer, Collection, Question, read_squad
from bertrain.tasks.squad.scoring import best_threshold, normalize, score_answer, score_squad
from tests.helpers import SHARED_DATA, refused

SAMPLE = Path(__file__).parents[1] / "data" / "squad"
SQUAD = SHARED_DATA / "squad"


@pytest.mark.skipif(not SQUAD.is_dir(), reason="needs ../shared/data/squad")
@pytest.mark.parametrize(
    ("name", "exact_match", "f1", "missing"),
    [
        ("BERT-ensemble-GoogleAI", 86.20624408703878, 92.19557978351145, 0),
        ("LogisticRegression-Stanford", 40.14191106906339, 50.98153647324461, 13),
    ],
)
def test_real_predictions_score_what_was_published(name: str, exact_match: float, f1: float, missing: int) -> None:
    figures = score("squad/v1.1", SQUAD / "dev-v1.1.json", SQUAD / "predictions" / f"{name}.json")
    assert figures == {"exact_match": exact_match, "f1": f1, "total": 10570, "missing": missing}


def invented_predictions(collection: Collection) -> tuple[dict[str, str], dict[str, float]]:
    """Answers right, nearly right, absent, wrong, and of nothing but an article; and some odds."""
    predictions, odds = {}, {}
    for number, question in enumerate(collection.questions):
        context = collection.contexts[question.context]
        text, start = question.answers[-1] if question.answers else ("", 40)
        around = context[max(0, start - 10) : start + len(text) + 15]
        choices = [text, f"The {text.upper()}!", around, "", context[:20], question.text, "the"]
        predictions[question.id] = choices[number % 7]
        odds[question.id] = (number * 37 % 101 - 50) / 5
    return predictions, odds


def test_version_two_is_as_in_transformers() -> None:
    """The figures are what squad_evaluate of Transformers 4.46.3 (gone since 5.0) says of the same predictions."""
    collection = read_squad(SAMPLE / "dev-v2.0.json", "v2.0")
    predictions, odds = invented_predictions(collection)
    assert score_squad(collection, predictions, "v2.0", null_odds=odds) == {
        "exact": 54.76190476190476,
        "f1": 57.42063492063492,
        "total": 84,
        "missing": 0,
        "HasAns_exact": 20.58823529411765,
        "HasAns_f1": 27.15686274509804,
        "HasAns_total": 34,
        "NoAns_exact": 78.0,
        "NoAns_f1": 78.0,
        "NoAns_total": 50,
        "best_exact": 61.904761904761905,
        "best_exact_thresh": -9.8,
        "best_f1": 62.38095238095238,
        "best_f1_thresh": -7.4,
    }


def test_what_of_an_answer_counts() -> None:
    assert normalize("The  Norman's  (old) castle, and AN apple.") == "normans old castle and apple"
    assert normalize("theatre a la carte") == "theatre la carte"
    assert normalize("d\u2019Artagnan") == "d\u2019artagnan"  # only ASCII's punctuation falls away
    assert score_answer("red castle", {"red", "old red castle"}, "v1.1") == (0.0, 0.8)
    assert score_answer("red red", {"red blue"}, "v1.1") == (0.0, 0.5)


def test_where_the_two_versions_differ() -> None:
    """An answer of nothing but an article: in v1.1 it shares no word with itself; in v2.0 it is no answer."""
    assert score_answer("", {""}, "v1.1") == (1.0, 0.0)
    assert score_answer("", {""}, "v2.0") == (1.0, 1.0)
    assert score_answer("", {"", "red"}, "v1.1") == (1.0, 0.0)
    assert score_answer("", {"", "red"}, "v2.0") == (0.0, 0.0)
    assert score_answer("red", set(), "v2.0") == (0.0, 0.0)
    assert score_answer("", set(), "v2.0") == (1.0, 1.0)


def collection_of(*answers: str | None) -> Collection:
    questions = [
        Question(f"q{number}", "?", 0, () if text is None else (Answer(text, 0),))
        for number, text in enumerate(answers)
    ]
    return Collection(Path("dev.json"), ["red blue"], questions, True, [])


def test_a_missing_prediction_is_wrong_and_counted() -> None:
    figures = score_squad(collection_of("red", "blue", "red", "red"), {"q0": "red", "q2": "blue"}, "v1.1")
    assert figures == {"exact_match": 25.0, "f1": 25.0, "total": 4, "missing": 2}
    figures = score_squad(collection_of("red", None), {"q0": "red"}, "v2.0")
    assert (figures["exact"], figures["NoAns_exact"], figures["missing"]) == (50.0, 0.0, 1)
    odds = {"q0": -5.0, "q1": 9.0}  # that a question has no answer does not make up for an answer that is not there
    figures = score_squad(collection_of("red", None), {"q0": "red"}, "v2.0", null_odds=odds, null_threshold=0.0)
    assert (figures["exact"], figures["f1"], figures["NoAns_f1"]) == (50.0, 50.0, 0.0)
    assert (figures["best_exact"], figures["best_f1"]) == (50.0, 50.0)


def test_the_threshold_by_hand() -> None:
    """Sorted by odds: right, wrong where there is no answer, right, wrong. Best: to give the first three."""
    scores = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0}
    odds = {"d": 9.0, "c": 3.0, "a": -5.0, "b": -1.0, "unknown": 0.0}
    answerable = {"a": True, "b": False, "c": True, "d": True}
    assert best_threshold(scores, dict.fromkeys("abcd", "x"), odds, answerable) == (50.0, -5.0)
    scores["d"] = 0.5
    assert best_threshold(scores, dict.fromkeys("abcd", "x"), odds, answerable) == (62.5, 9.0)
    assert best_threshold(scores, {"b": ""}, odds, answerable) == (87.5, 9.0)


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_a_threshold_without_odds_has_no_effect(version: str, tmp_path: Path) -> None:
    (tmp_path / "predictions.json").write_text("{}")
    for threshold in (0.5, 1.0):
        with refused("option-without-effect", "--null-threshold", "v2.0" if version == "v1.1" else "--null-odds"):
            predictions = tmp_path / "predictions.json"
            score(f"squad/{version}", SAMPLE / f"dev-{version}.json", predictions, null_threshold=threshold)


@pytest.mark.parametrize(
    ("task", "content", "odds", "code", "named"),
    [
        ("squad/v3", "{}", None, "unknown-task", "'squad/v3'"),
        ("sqad/v1.1", "{}", None, "unknown-task", "have a scorer; did you mean 'squad/v1.1'?"),
        ("squad/v1.1", '{"x": "y"}', "{}", "option-without-effect", "--null-odds"),
        ("squad/v2.0", '{"x": "y"}', None, "other-predictions", "dev-v2.0.json"),
        ("squad/v2.0", '{"x": 1}', None, "bad-predictions", '"x"'),
        ("squad/v2.0", '{"x": ', None, "bad-json", "line 1 column 7"),
        ("squad/v2.0", "[]", None, "bad-predictions", "predictions.json"),
        ("squad/v2.0", "{PREDICTIONS}", '{"x": NaN}', "bad-predictions", "odds.json"),
        ("squad/v2.0", "{PREDICTIONS}", f'{{"x": 1{"0" * 400}}}', "bad-json", "odds.json"),
        ("squad/v2.0", "{PREDICTIONS}", '{"x": 1}', "missing-odds", "84 questions"),
    ],
)
def test_what_cannot_be_scored(
    task: str, content: str, odds: str | None, code: str, named: str, tmp_path: Path
) -> None:
    data = SAMPLE / ("dev-v1.1.json" if task == "squad/v1.1" else "dev-v2.0.json")
    if content == "{PREDICTIONS}":
        content = json.dumps(invented_predictions(read_squad(data, "v2.0"))[0])
    (tmp_path / "predictions.json").write_text(content)
    (tmp_path / "odds.json").write_text(odds or "")
    with refused(code, named) as caught:
        score(task, data, tmp_path / "predictions.json", null_odds=tmp_path / "odds.json" if odds is not None else None)
    assert len(str(caught.value)) < 300 + 2 * len(str(tmp_path))


def test_a_file_without_answers_cannot_be_scored(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"id": "1", "context": "red", "question": "what?"}))
    (tmp_path / "predictions.json").write_text('{"1": "red"}')
    with refused("no-answers", file):
        score("squad/v1.1", file, tmp_path / "predictions.json")
