"""Several labels for each text, and weights of classes: reading, loss, thresholds and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from bertrain.base.console import evaluation_text
from bertrain.base.formatting import THRESHOLD
from bertrain.config.settings import Settings, TaskSettings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.fused_heads import _sequence_loss
from bertrain.model.heads import answer_sums
from bertrain.tasks import metrics
from bertrain.tasks.class_weights import weigh_classes, weigh_positives
from bertrain.tasks.multilabel import MultilabelTask, find_separator, split_labels
from bertrain.tasks.registry import open_task
from bertrain.tasks.thresholds import FEWEST_POSITIVES, best_threshold, cross_fitted, fit_thresholds
from bertrain.training.task_settings import resolve_task
from tests import whole_model
from tests.helpers import refused

VOCABULARY = Vocabulary.load()
ROWS = [("good film", ["fun", "long"]), ("bad film", []), ("a film", ["long"]), ("the film", ["dull", "long"])]


def open_rows(folder: Path, *, saved: dict[str, Any] | None = None, **task: Any) -> MultilabelTask:
    settings = Settings(task=TaskSettings(**{"name": "classify", "target": "classes"} | task))
    opened = open_task(settings, folder, VOCABULARY, saved=saved)
    assert isinstance(opened, MultilabelTask)
    return opened


def random_case(seed: int, rows: int = 80, labels: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Targets, one label of which is rare, and outputs that know a little of them."""
    draw = np.random.default_rng(seed)
    targets = (draw.random((rows, labels)) < np.linspace(0.05, 0.6, labels)).astype(np.int64)
    return targets, (targets * 1.5 + draw.normal(size=targets.shape) - 1).astype(np.float32)


# --- reading -----------------------------------------------------------------------------------------------


def write_forms(folder: Path) -> dict[str, dict[str, Any]]:
    """The same rows in every form, each with the settings that read it."""
    (folder / "lists.jsonl").write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in ROWS))
    for name, separator in (("bars", "|"), ("commas", ", ")):
        lines = [f'{text},"{separator.join(names)}"\n' for text, names in ROWS]
        (folder / f"{name}.csv").write_text("".join(["text,label\n", *lines]))
    (folder / "json.tsv").write_text("text\tlabel\n" + "".join(f"{t}\t{json.dumps(n)}\n" for t, n in ROWS))
    lines = [f"{text},{float('dull' in names)},{int('fun' in names)},{'long' in names}\n" for text, names in ROWS]
    (folder / "columns.csv").write_text("".join(["text,dull,fun,long\n", *lines]))
    table = pa.table({"text": [text for text, _ in ROWS], "label": [names for _, names in ROWS]})
    pa.parquet.write_table(table, folder / "lists.parquet")
    names = ["dull", "fun", "long"]
    feature = {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "Sequence"}
    info = json.dumps({"info": {"features": {"text": {"dtype": "string", "_type": "Value"}, "label": feature}}})
    indices = [[names.index(name) for name in row] for _, row in ROWS]
    table = pa.table({"text": [text for text, _ in ROWS], "label": indices})
    pa.parquet.write_table(table.replace_schema_metadata({"huggingface": info}), folder / "classes.parquet")
    files = ("lists.jsonl", "bars.csv", "commas.csv", "json.tsv", "lists.parquet", "classes.parquet")
    return {name: {} for name in files} | {"columns.csv": {"label": "dull, fun,long"}}


def test_every_form_of_labels_is_read_alike(tmp_path: Path) -> None:
    for name, given_settings in write_forms(tmp_path).items():
        task = open_rows(tmp_path / name, **given_settings)
        assert task.labels == ("dull", "fun", "long"), name
        answers = task.training().block.answers
        assert answers is not None
        assert answers.tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 0, 1]], name
        assert answers.dtype == np.float32
    notes = {name: open_rows(tmp_path / name).notes for name in ("bars.csv", "commas.csv")}
    assert any("'|'" in note for note in notes["bars.csv"])
    assert any("','" in note for note in notes["commas.csv"])


def test_labels_in_lists_may_contain_a_separator(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": ["food, drink", "x|y"]}, {"text": "b", "label": [3, 4.0]}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert open_rows(tmp_path).labels == ("3", "4", "food, drink", "x|y")
    assert find_separator(["a;b", "c, d", '["e|f"]', ""]) == ";"
    assert split_labels("", "|") == split_labels("[]", "") == []
    assert split_labels("a, b", "") == ["a, b"]


BAD_LABELS = {
    '{"text": "a", "label": null}': "has no labels",
    '{"text": "a", "label": ["x", [1]]}': "[1]",
    '{"text": "a", "label": ["x", ""]}': "empty label",
    '{"text": "a", "label": {"x": 1}}': "dict",
    '{"text": "a", "label": "[\'x\']"}': "JSON list",
    '{"text": ["a"], "label": ["x"]}': "list in 'text'",
    '{"text": "a", "label": [1.5]}': "1.5",
    '{"text": "a", "label": [0, 1, 0]}': "a column of 0 and 1 for each label",
}


@pytest.mark.parametrize("line", BAD_LABELS)
def test_bad_labels_are_refused_by_line_or_counted(line: str, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": names}) + "\n" for text, names in ROWS) + line + "\n")
    with refused("bad-row", f"line 5 of {file}", BAD_LABELS[line], "--on-error skip"):
        open_rows(tmp_path).training()
    assert open_rows(tmp_path, on_error="skip").training().num_examples == 4


def test_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_forms(tmp_path)
    (tmp_path / "two.csv").write_text("text,dull,fun\nfilm,0,2\n")
    with refused("bad-row", f"line 2 of {tmp_path / 'two.csv'}", "'2'", "'fun'", "not 0 or 1"):
        open_rows(tmp_path / "two.csv", label="dull,fun").training()
    with refused("missing-column", "'sad'", "--task.label"):
        open_rows(tmp_path / "two.csv", label="dull,sad").training()
    with refused("repeated-column", "dull,dull"):
        open_rows(tmp_path / "two.csv", label="dull,dull")
    (tmp_path / "marks.jsonl").write_text('{"text": "film", "label": [0, 1, 0]}\n')
    with refused("bad-row", f"line 1 of {tmp_path / 'marks.jsonl'}", "[0, 1, 0]"):
        open_rows(tmp_path / "marks.jsonl")
    (tmp_path / "one.csv").write_text("text,label\nfilm,\nfilms,dull\n")
    with refused("one-label", "'dull'", tmp_path / "one.csv"):
        open_rows(tmp_path / "one.csv")
    with refused("bad-row", "list in 'label'", "--task.target classes"):
        open_task(Settings(task=TaskSettings(name="classify")), tmp_path / "lists.jsonl", VOCABULARY)
    with refused("no-examples", "two.csv", "1 row", "--task.hold_out"):
        (tmp_path / "two.csv").write_text("text,dull,fun\nfilm,0,1\n")
        open_rows(tmp_path / "two.csv", label="dull,fun", hold_out=0.1).training()
    trained_on_lists = open_rows(tmp_path / "lists.jsonl").to_dict()
    for name in ("bars.csv", "commas.csv"):
        assert open_rows(tmp_path / name, saved=trained_on_lists).held_out(), name
    saved = open_rows(tmp_path / "bars.csv").to_dict()
    assert saved["separator"] == "|"
    (tmp_path / "new.csv").write_text("text,label\nfilm,fun|sad\n")
    with refused("bad-row", "line 2 of", "'sad'", "'dull', 'fun', 'long'"):
        open_rows(tmp_path / "new.csv", saved=saved).held_out()
    with refused("other-labels", "'dull', 'fun'", "'long'"):
        open_rows(tmp_path / "two.csv", saved=saved, label="dull,fun").held_out()


def test_names_of_the_task_elsewhere_lead_here() -> None:
    for name in ("multilabel", "multi_label"):
        with refused("unknown-task", name, "finetune classify --task.target classes"):
            resolve_task(name)


def test_held_out_rows_are_spread_over_rare_labels(tmp_path: Path) -> None:
    rows = [{"text": f"film {n}", "label": ["common"] * (n % 2) + ["rare"] * (n % 20 == 0)} for n in range(400)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = open_rows(tmp_path, hold_out=0.1)
    held_out = task.held_out()["dev"]
    assert held_out.num_examples == 40
    assert held_out.targets.sum(axis=0).tolist() == [20, 2]
    assert task.training().targets.sum(axis=0).tolist() == [180, 18]


# --- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("head", ["classify", "multilabel"])
def test_the_loss_by_hand_is_that_of_autograd(head: str, is_weighted: bool) -> None:
    torch.manual_seed(1)
    batch = whole_model.random_batch([7, 1, 12, 2], 25, 6, 7, 12, 50)
    batch = whole_model.with_answers(batch, head, 3, is_weighted=is_weighted)
    logits = (5 * torch.randn(len(batch.is_real), 3)).requires_grad_()
    sums = answer_sums(logits, batch, head)
    sums.sequence_loss.backward()
    loss, correct, gradient = _sequence_loss(logits.detach(), batch, head)
    assert logits.grad is not None
    torch.testing.assert_close(loss, sums.sequence_loss.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-5, atol=1e-6)
    assert correct == sums.sequence_correct

    real, count, answers = batch.is_real, int(batch.is_real.sum()), batch.answers
    assert answers is not None
    weights = torch.ones_like(answers, dtype=torch.float32) if batch.answer_weights is None else batch.answer_weights
    if head == "multilabel":
        expected = torch.nn.BCEWithLogitsLoss(weight=weights[real])(logits[real], answers[real])
    else:
        expected = (F.cross_entropy(logits[real], answers[real, 0], reduction="none") * weights[real, 0]).mean()
    assert float(sums.sequence_loss.detach()) / count == pytest.approx(float(expected.detach()), rel=1e-6)


def test_weights_of_positive_rows_are_those_of_torch() -> None:
    targets, outputs = random_case(1)
    labels = ["a", "b", "c", "d"]
    factors = weigh_positives("balanced", labels, targets)
    assert factors == pytest.approx((len(targets) - targets.sum(0)) / targets.sum(0))
    weights = torch.from_numpy(np.where(targets > 0, factors, 1.0))
    logits, answers = torch.from_numpy(outputs).double(), torch.from_numpy(targets).double()
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=torch.from_numpy(factors))(logits, answers)
    assert torch.allclose(F.binary_cross_entropy_with_logits(logits, answers, weights), expected)
    assert weigh_positives("b=3", labels, targets).tolist() == [1, 3, 1, 1]
    assert weigh_positives("balanced", ["a", "b"], np.array([[1, 0], [1, 0]])).tolist() == [1, 1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_weights_of_classes_have_mean_one(classes: list[int]) -> None:
    found = np.array(classes)
    for text in ("balanced", "a=2,c=0.5"):
        factors = weigh_classes(text, ["a", "b", "c", "d"], found)
        assert factors[found].mean() == pytest.approx(1)
        if text != "balanced":
            assert factors / factors[1] == pytest.approx(np.array([2, 1, 0.5, 1]))
    balanced = weigh_classes("balanced", ["a", "b", "c", "d"], found)
    shares = [balanced[label] * (found == label).sum() for label in set(classes)]
    assert shares == pytest.approx([len(classes) / len(set(classes))] * len(shares))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\nfilm,1\nbook,2\n")
    for text, word in (("3=2", "'3'"), ("1", "'1'"), ("1=0", "'0'"), ("1=x", "'x'"), ("1=inf", "'inf'")):
        with refused("bad-class-weights", word, "task.class_weights"):
            open_task(Settings(task=TaskSettings(name="classify", class_weights=text)), tmp_path, VOCABULARY).training()
    numbers = TaskSettings(name="classify", target="number", class_weights="balanced")
    with refused("bad-class-weights", "numbers"):
        open_task(Settings(task=numbers), tmp_path, VOCABULARY).training()
    for name in ("squad/v1.1", "tag", "similarity"):
        for setting in ({"class_weights": "1=2"}, {"target": "classes"}):
            with refused("option-without-effect", name, *setting):
                open_task(Settings(task=TaskSettings(name=name, **setting)), tmp_path, VOCABULARY)
    task = open_task(Settings(task=TaskSettings(name="classify", class_weights="1=3")), tmp_path, VOCABULARY)
    weights = task.training().block.answer_weights
    assert weights is not None
    assert weights.tolist() == [[1.5], [0.5]]
    assert any("1 1.5, 2 0.5" in note for note in task.notes)


# --- thresholds and metrics --------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
def test_no_threshold_has_a_higher_f1(seed: int) -> None:
    targets, outputs = random_case(seed, rows=25, labels=2)
    target, probabilities = targets[:, 1], metrics.sigmoid(outputs[:, 1].round(1))  # some are equal

    def f1(threshold: float) -> float:
        decided = probabilities >= threshold
        return 2 * (decided & (target > 0)).sum() / max(1, decided.sum() + target.sum())

    found = best_threshold(target, probabilities)
    if target.any():
        assert f1(found) == pytest.approx(max(map(f1, probabilities)))
    else:
        assert found == 0.5


def test_rare_labels_share_a_threshold() -> None:
    targets, outputs = random_case(2, rows=120)
    probabilities = metrics.sigmoid(outputs)
    found, positives = fit_thresholds(targets, probabilities), targets.sum(axis=0)
    assert (positives < FEWEST_POSITIVES).tolist() == [True, False, False, False]
    assert found[0] == best_threshold(targets.ravel(), probabilities.ravel())
    for label in (1, 2, 3):
        assert found[label] == best_threshold(targets[:, label], probabilities[:, label])


def test_no_row_is_decided_at_a_threshold_fitted_on_it() -> None:
    """Outputs without meaning score on their own rows above what they score across halves."""
    own, across = [], []
    for seed in range(30):
        draw = np.random.default_rng(seed)
        targets, probabilities = (draw.random((60, 3)) < 0.4).astype(np.int64), draw.random((60, 3))
        decided = cross_fitted(targets, probabilities)
        changed = targets.copy()
        changed[0] = 1 - changed[0]
        assert (cross_fitted(changed, probabilities)[0] == decided[0]).all()
        scores = (
            metrics.compute_metrics(["f1_micro"], targets, each.astype(np.int64), metrics.LABEL_SET_METRICS)["f1_micro"]
            for each in (probabilities >= fit_thresholds(targets, probabilities), decided)
        )
        for scored, score in zip((own, across), scores, strict=True):
            scored.append(score)
    assert np.mean(own) > np.mean(across) + 0.01
    one = np.array([[1, 0]])
    assert cross_fitted(one, np.array([[0.6, 0.4]])).tolist() == [[True, False]]


def test_metrics_are_those_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn import metrics as theirs

    targets, outputs = random_case(3, rows=100)
    rows = [
        {"text": "film", "label": [name for name, is_on in zip("abcd", row, strict=True) if is_on]} for row in targets
    ]
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = open_rows(tmp_path)
    split, other = task.held_out().values()
    found = split.metrics(outputs)
    decided, probabilities = outputs >= 0, 1 / (1 + np.exp(-outputs.astype(np.float64)))
    assert task.main_metric == next(iter(found)) == "f1_micro"
    assert found["f1_micro"] == pytest.approx(theirs.f1_score(targets, decided, average="micro"))
    assert found["f1_macro"] == pytest.approx(theirs.f1_score(targets, decided, average="macro"))
    assert found["subset_accuracy"] == pytest.approx(theirs.accuracy_score(targets, decided))
    assert found["average_precision"] == pytest.approx(theirs.average_precision_score(targets, probabilities))
    constants = [np.tile(row, (100, 1)) for row in np.ndindex(2, 2, 2, 2)]
    best = max(theirs.f1_score(targets, constant, average="micro", zero_division=0) for constant in constants)
    assert found["baseline_f1_micro"] == pytest.approx(best), "no constant answer is better"
    across = cross_fitted(targets, probabilities)
    assert found["f1_macro_fitted"] == pytest.approx(theirs.f1_score(targets, across, average="macro"))
    thresholds = [found[f"{THRESHOLD}{label}"] for label in "abcd"]
    assert thresholds == fit_thresholds(targets, metrics.sigmoid(outputs)).tolist()
    assert THRESHOLD not in evaluation_text(found)

    elsewhere = other.metrics(outputs)  # the thresholds of the first split
    assert not any(name.startswith(THRESHOLD) for name in elsewhere)
    expected = theirs.f1_score(targets, probabilities >= thresholds, average="micro")
    assert elsewhere["f1_micro_fitted"] == pytest.approx(expected)
    for one in (split, other):
        report = one.report_by_class(outputs)
        expected_rows = theirs.classification_report(
            targets, one.decide(outputs), target_names=list("abcd"), digits=3, zero_division=0
        )
        assert expected_rows.splitlines()[2:6] == report.splitlines()[3:7]
        numbers = [
            f"{s.label} {s.precision:.3f} {s.recall:.3f} {s.f1:.3f} {s.support}" for s in one.scores_by_class(outputs)
        ]
        assert numbers == [" ".join(row.split()) for row in expected_rows.splitlines()[2:6]]


def test_predictions_name_every_label_above_its_threshold(tmp_path: Path) -> None:
    write_forms(tmp_path)
    task = open_rows(tmp_path / "lists.jsonl")
    outputs = np.array([[3.0, -3.0, 0.5], [-3.0, -3.0, -3.0], [0, 0, 0], [0, 0, 0]], dtype=np.float32)
    split = task.training()
    (path,) = split.write_predictions(outputs, tmp_path)
    first, second, *_ = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["labels"] == ["dull", "long"]
    assert second == {"id": "1", "labels": [], "probabilities": dict.fromkeys(task.labels, 0.047426)}
    task.thresholds = np.array([0.5, 0.01, 0.9])
    assert task.answers(outputs)[0]["labels"] == ["dull", "fun"]
    assert split.describe_constant(np.zeros((4, 3), dtype=np.int64)) == "no label"
    assert split.describe_constant(np.tile([0, 1, 1], (4, 1))) == "'fun', 'long'"
    assert split.describe_constant(split.targets) == ""


def test_a_report_on_many_classes_has_no_matrix() -> None:
    classes = np.arange(30)
    report = metrics.report_by_class([f"class-{n}" for n in classes], classes, classes)
    assert "class-29" in report
    assert "matrix" not in report
    assert "matrix" in metrics.report_by_class(["a", "b"], np.array([0, 1]), np.array([0, 1]))
    assert metrics.report_by_class([], classes, classes) == ""
