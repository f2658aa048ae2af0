"""A user's own tables of texts: how they are read, split and judged, and what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertrain.base.console import evaluation_text
from bertrain.base.formatting import headline_of
from bertrain.config.settings import Settings, TaskSettings
from bertrain.run.records import ClassScores
from bertrain.tasks import metrics
from bertrain.tasks.classify import sort_labels
from bertrain.tasks.registry import open_task, reads_pairs
from tests.helpers import refused
from tests.quick.test_text_tasks import SAMPLES, VOCABULARY, open_named, said_for_sure


def test_own_table_of_classes(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('text,label\n"good, really",yes\nbad,no\nfine,yes\n')
    (tmp_path / "dev.jsonl").write_text('{"text": "bad", "label": "no", "id": "x"}\n')
    (tmp_path / "test.tsv").write_text("text\nunknown\n")
    task = open_named("classify", tmp_path)
    assert (task.head, task.labels, task.main_metric) == ("classify", ("no", "yes"), "accuracy")
    assert task.training().block.answers[:, 0].tolist() == [1, 0, 1]
    assert set(task.training().block.segment_b - task.training().block.lengths) == {0}
    assert list(task.held_out()) == ["dev"]
    assert list(task.to_predict()) == ["test"]
    (path,) = task.held_out()["dev"].write_predictions(np.array([[0.0, np.log(3)]], np.float32), tmp_path)
    record = json.loads(path.read_text())
    assert record["id"] == "x"
    assert record["label"] == "yes"
    assert record["probabilities"] == pytest.approx({"no": 0.25, "yes": 0.75})


def test_own_table_of_pairs_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text('a\tb\tscore\none\t"two\t1.5\nthree\tfour\t-2\n')
    columns = {"text": "a", "text_pair": "b", "label": "score", "target": "number"}
    task = open_named("classify", tmp_path / "train.tsv", **columns)
    assert (task.head, task.labels, task.main_metric) == ("regress", (), "pearson")
    training = task.training()
    assert training.block.answers[:, 0].tolist() == [1.5, -2.0]
    assert (training.block.segment_b < training.block.lengths).all()
    found = training.metrics(training.block.answers)
    assert found == pytest.approx({"pearson": 1, "spearmanr": 1, "baseline_pearson": 0})
    assert not task.held_out()
    assert any("dev.csv" in note for note in task.notes)
    (path,) = training.write_predictions(training.block.answers, tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"id": "0", "number": 1.5},
        {"id": "1", "number": -2.0},
    ]


def test_what_lies_beside_a_training_file_is_taken_and_said(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text("text,label\na,x\nb,y\n")
    task = open_named("classify", tmp_path / "train.csv")
    assert list(task.held_out()) == ["dev"]
    assert any("beside train.csv" in note for note in task.notes)


def test_labels_are_in_the_order_of_numbers_where_they_are_numbers() -> None:
    assert sort_labels(["10", "9", "-1"]) == ("-1", "9", "10")
    assert sort_labels(["10", "9", "x"]) == ("10", "9", "x")
    assert sort_labels(["inf", "1"]) == ("1", "inf")


def test_decimal_labels_are_classes_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,1.5\nb,2\nc,3\n")
    (tmp_path / "whole.csv").write_text("text,label\na,1.0\nb,2.0\n")
    assert any("--task.target number" in note for note in open_named("classify", tmp_path / "train.csv").notes)
    assert not any("--task.target number" in note for note in open_named("classify", tmp_path / "whole.csv").notes)


def test_names_of_classes_are_those_that_datasets_saved() -> None:
    folder = SAMPLES / "datasets/saved/cola"
    task = open_named("classify", folder, text="sentence")
    assert task.labels == ("acceptable", "unacceptable")
    assert list(task.held_out()) == ["dev"]
    assert list(task.to_predict()) == ["test"]
    alone = open_named("classify", folder / "train", text="sentence")  # one Dataset, saved by itself
    assert np.array_equal(alone.training().block.tokens, task.training().block.tokens)


def test_a_trained_model_needs_no_training_data(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,yes\nb,no\n")
    saved = json.loads(json.dumps(open_named("classify", tmp_path).to_dict()))
    (tmp_path / "train.csv").unlink()
    (tmp_path / "new.csv").write_text("text\nc\n")
    task = open_named("classify", tmp_path / "new.csv", saved=saved)
    assert task.labels == ("no", "yes")
    assert not task.held_out()
    (path,) = task.to_predict()["new"].write_predictions(said_for_sure([1], 2), tmp_path)
    assert path.name == "new.jsonl"
    (tmp_path / "new.csv").write_text("text,label\nc,yes\n")
    scored = open_named("classify", tmp_path / "new.csv", saved=saved)
    assert scored.held_out()["new"].metrics(said_for_sure([1], 2))["accuracy"] == 1


# --- without a dev part -------------------------------------------------------------------------------------


def skewed(folder: Path, count: int = 200) -> Path:
    """A table whose labels are three to one, with the number of each row as its text."""
    rows = [f"{number},{'abba'[number % 4] if number % 3 else 'a'}" for number in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return folder / "mine.csv"


@pytest.mark.parametrize("target", ["class", "number"])
def test_a_table_without_a_dev_part_is_split_once_and_for_all(target: str, tmp_path: Path) -> None:
    path = skewed(tmp_path)
    if target == "number":
        path.write_text("text,label\n" + "".join(f"{number},{number / 7}\n" for number in range(200)))
    task = open_named("classify", path, hold_out=0.15, target=target)
    training, dev = task.training(), task.held_out()["dev"]
    assert (len(training.ids), len(dev.ids), task.hold_out) == (170, 30, 0.15)
    assert sorted([*training.ids, *dev.ids], key=int) == [str(number) for number in range(200)]
    assert any("task.hold_out" in note for note in task.notes)
    everything = np.concatenate([training.targets, dev.targets])
    assert float(np.mean(dev.targets)) == pytest.approx(float(np.mean(everything)), rel=0.05), "each has its share"
    assert list(task.to_predict()) == ["dev"]
    later = open_named("classify", path, saved=task.to_dict(), hold_out=task.hold_out, target=target)
    assert later.to_predict()["dev"].ids == dev.ids
    assert later.labels == task.labels
    whole = open_named("classify", path, saved=task.to_dict(), target=target)
    assert whole.held_out()["mine"].num_examples == 200, "a file that no row of was held out is scored whole"


def test_a_dev_part_is_used_and_nothing_else_held_out(tmp_path: Path) -> None:
    skewed(tmp_path).rename(tmp_path / "train.csv")
    (tmp_path / "dev.csv").write_text("text,label\nx,a\n")
    task = open_named("classify", tmp_path, hold_out=0.5)
    assert (task.training().num_examples, task.held_out()["dev"].num_examples, task.hold_out) == (200, 1, 0)


# --- baselines ----------------------------------------------------------------------------------------------


def test_the_baseline_is_the_most_frequent_class(tmp_path: Path) -> None:
    split = open_named("classify", skewed(tmp_path)).training()
    share = float(np.mean(split.targets == 0))
    assert 0.5 < share < 1
    metrics_of_a = split.metrics(said_for_sure([0] * 200, 2))
    assert metrics_of_a["accuracy"] == metrics_of_a["baseline_accuracy"] == share
    assert split.metrics(said_for_sure(split.targets, 2))["baseline_accuracy"] == share
    assert "mlm" not in evaluation_text(metrics_of_a)
    assert f"accuracy {share:.2%} (baseline {share:.2%})" in evaluation_text(metrics_of_a)
    assert headline_of(["baseline_accuracy", "accuracy"]) == "accuracy"


def test_each_class_is_reported() -> None:
    targets, predictions = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 1, 1, 2])
    report = metrics.report_by_class(["cat", "dog", "cow"], targets, predictions)
    cat = next(line for line in report.splitlines() if "cat" in line)
    assert cat.split() == ["cat", "1.000", "0.500", "0.667", "2"], "precision, recall, F1, rows"
    assert report.endswith("[[1 1 0]\n [0 2 0]\n [0 0 1]]")
    assert metrics.report_by_class([], targets, predictions) == ""
    scores = metrics.scores_by_class(["cat", "dog", "cow"], targets, predictions)
    assert scores[0] == ClassScores("cat", 1.0, 0.5, 2 / 3, 2)
    assert [(one.label, one.precision, one.recall, one.support) for one in scores[1:]] == [
        ("dog", 2 / 3, 1.0, 2),
        ("cow", 1.0, 1.0, 1),
    ]
    assert metrics.scores_by_class([], targets, predictions) == ()


# --- texts without a file -----------------------------------------------------------------------------------


def test_texts_are_encoded_as_rows_of_files_are(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,b,label\nit is good,so so,x\nand bad,no,y\n")
    for second in ("", "b"):
        task = open_named("classify", tmp_path, text_pair=second)
        alone = open_task(task.settings, None, VOCABULARY, saved=task.to_dict())
        texts = ["it is good", "so so", "and bad", "no"] if second else ["it is good", "and bad"]
        assert reads_pairs(alone.settings) == bool(second)
        given = alone.encode(texts, is_pair=bool(second))
        assert given.block.tokens.tolist() == task.training().block.tokens.tolist()
        assert given.block.segment_b.tolist() == task.training().block.segment_b.tolist()
        labels = [answer["label"] for answer in alone.answers(said_for_sure([1, 0], 2))]
        assert labels == ["y", "x"]
    with refused("odd-texts", "classify"):
        alone.encode(["one"], is_pair=True)
    assert [reads_pairs(Settings(task=TaskSettings(name=name))) for name in ("glue/sst2", "glue/rte", "xnli")] == [
        False, True, True,
    ]  # fmt: skip


OWN_MISTAKES = {
    "an unknown label": (
        "text,label\na,x\nb,y\n",
        "text,label\na,x\nb,z\n",
        ("bad-row", "line 3 of ", "dev.csv", "'z'"),
    ),
    "one label": ("text,label\na,x\nb,x\n", "", ("one-label", "'x'", "'label'", "train.csv")),
    "no label": ("text,label\na,\nb,\n", "", ("bad-row", "line 2 of ", "train.csv")),
    "two columns": ("text,label,text\na,x,c\nb,y,d\n", "", ("repeated-column", "train.csv", "2 columns named 'text'")),
    "no such column": ("words,label\na,x\nb,y\n", "", ("missing-column", "'text'", "'words', 'label'", "--task.text")),
    "no label column": ("text,class\na,x\nb,y\n", "", ("missing-column", "'label'", "'text', 'class'", "--task.label")),
    "an empty text": ("text,label\na,x\n  ,y\n", "", ("bad-row", "line 3 of ", "train.csv")),
}


@pytest.mark.parametrize("case", OWN_MISTAKES)
def test_mistakes_in_own_tables_are_named(case: str, tmp_path: Path) -> None:
    training, dev, expected = OWN_MISTAKES[case]
    (tmp_path / "train.csv").write_text(training)
    if dev:
        (tmp_path / "dev.csv").write_text(dev)

    def read_all() -> None:
        task = open_named("classify", tmp_path)
        task.training()
        task.held_out()

    with refused(*expected):
        read_all()


def test_rows_passed_over_bring_no_labels(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n,oops\n")
    assert open_named("classify", tmp_path, on_error="skip").labels == ("x", "y")
    (tmp_path / "train.csv").write_text("text,label\na,x\n,y\n")
    with refused("one-label", "'x'", "'label'"):
        open_named("classify", tmp_path, on_error="skip")


def test_own_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    with refused("missing-data", tmp_path):
        open_named("classify", tmp_path)
    (tmp_path / "a.xlsx").touch()
    with refused("unknown-table-format", "a.xlsx"):
        open_named("classify", tmp_path / "a.xlsx")
    (tmp_path / "dev.csv").write_text("text,label\na,x\n")
    with refused("missing-split", "train.csv"):
        open_named("classify", tmp_path)
    (tmp_path / "train-00000-of-00002.jsonl").write_text('{"text": "a", "label": 1}\n')
    with refused("missing-parts", tmp_path, "train-00000-of-00002.jsonl", 1, 2):
        open_named("classify", tmp_path)


def test_two_files_for_one_part_are_noted(tmp_path: Path) -> None:
    for ending, separator in (("csv", ","), ("tsv", "\t")):
        (tmp_path / f"train.{ending}").write_text(f"text{separator}label\na{separator}x\nb{separator}y\n")
    assert any("train.csv" in note and "train.tsv" in note for note in open_named("classify", tmp_path).notes)


def test_settings_of_another_length_give_other_blocks(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "word " * 50 + ",x\nb,y\n")
    settings = Settings(task=TaskSettings(name="classify"))
    short = replace(settings, data=replace(settings.data, max_seq_length=16))
    assert open_task(settings, tmp_path, VOCABULARY).training().block.lengths.tolist() == [52, 3]
    assert open_task(short, tmp_path, VOCABULARY).training().block.lengths.tolist() == [16, 3]
