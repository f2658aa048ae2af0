"""Several labels for each text as users meet them: learnt, scored, predicted, killed, shared out and handed over."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bertrain.base.formatting import THRESHOLD
from bertrain.run.folder import Run
from bertrain.tasks.metrics import sigmoid
from bertrain.tasks.registry import open_task
from bertrain.training.finetune import finetune
from bertrain.training.predict import evaluate_task, predict
from bertrain.training.task_results import metrics_of
from bertrain.weights.export import export, import_weights
from bertrain.weights.source import read_weights
from tests import helpers, miniature_tasks
from tests.launched import kill_when, records
from tests.miniature_tasks import Miniature, arguments, command_line, outputs_of, settings_for

CLASSES = {"task__target": "classes"}


@pytest.fixture(scope="module")
def colors(mini: Miniature) -> Path:
    """A run that finds the colors of a text."""
    run = mini.base.parent / "colors"
    finetune(settings_for(**CLASSES, train__max_steps=60), mini.label_sets, run, init=str(mini.base))
    return run


def words_for(mini: Miniature, **changes: object) -> list[object]:
    return ["finetune", "classify", "--init", mini.base, "--data", mini.label_sets, *arguments(**CLASSES, **changes)]


def test_label_sets_are_learnt_and_predicted(mini: Miniature, colors: Path, tmp_path: Path) -> None:
    found = metrics_of(colors)
    assert found["f1_micro"] > found["baseline_f1_micro"] + 0.1
    assert found["f1_micro_fitted"] > found["baseline_f1_micro"] + 0.1
    assert found["average_precision"] > 0.6
    thresholds = {name: found[f"{THRESHOLD}{name}"] for name in sorted(miniature_tasks.COLOURS)}
    predict(colors, mini.label_sets / "dev.jsonl", tmp_path, device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["labels"] == [name for name, value in row["probabilities"].items() if value >= thresholds[name]]
    texts = [json.loads(line)["text"] for line in (mini.label_sets / "dev.jsonl").read_text().splitlines()[:4]]
    shown = command_line("predict", colors, *texts, "--device", "cpu").out.splitlines()
    for line, row, text in zip(shown, rows, texts, strict=False):
        listed = ", ".join(f"{name} {row['probabilities'][name]:.1%}" for name in row["labels"])
        assert line == f"{listed or 'no label'}  {text}"
    assert len(shown) == 4


def test_other_rows_are_scored_at_the_thresholds_of_the_run(mini: Miniature, colors: Path, tmp_path: Path) -> None:
    own = evaluate_task(colors, device="cpu")
    for name, value in metrics_of(colors).items():
        if name.startswith(("f1", "subset", "average", "baseline", THRESHOLD)):
            assert own[name] == pytest.approx(value, abs=1e-6), name
    assert "on the other half" in own["report"]
    shutil.copy(mini.label_sets / "dev.jsonl", tmp_path / "other.jsonl")
    other = evaluate_task(colors, tmp_path / "other.jsonl", device="cpu")
    assert other["f1_micro"] == pytest.approx(own["f1_micro"], abs=1e-6)
    assert other["f1_micro_fitted"] >= own["f1_micro_fitted"] - 1e-6, "here on the rows that they were fitted on"
    assert not any(name.startswith(THRESHOLD) for name in other)
    assert "that the run fitted" in other["report"]
    shown = command_line("evaluate", colors, "--device", "cpu").out
    assert THRESHOLD not in shown
    assert "recall" in shown


def test_without_an_evaluation_labels_apply_from_one_half_on(mini: Miniature, tmp_path: Path) -> None:
    shutil.copy(mini.label_sets / "train.jsonl", tmp_path / "train.jsonl")
    settings = settings_for(**CLASSES, train__max_steps=1, task__hold_out=0)
    finetune(settings, tmp_path, tmp_path / "run", init=str(mini.base))
    done = command_line("predict", tmp_path / "run", "bato", "--device", "cpu", "--json")
    (answer,) = json.loads(done.out)
    assert answer["labels"] == [name for name, value in answer["probabilities"].items() if value >= 0.5]
    assert "0.5" in done.err
    export(tmp_path / "run", tmp_path / "out")
    assert "thresholds" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_part_of_one_table_of_lists_is_held_out_again(mini: Miniature, tmp_path: Path) -> None:
    shutil.copy(mini.label_sets / "train.jsonl", tmp_path / "mine.jsonl")
    settings = settings_for(**CLASSES, train__max_steps=1, task__hold_out=0.1)
    finetune(settings, tmp_path / "mine.jsonl", tmp_path / "run", init=str(mini.base))
    found = evaluate_task(tmp_path / "run", device="cpu")
    assert found["f1_micro"] == pytest.approx(metrics_of(tmp_path / "run")["f1_micro"], abs=1e-6)


def test_a_model_that_predicts_no_label_is_named(mini: Miniature, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (mini.label_sets / "train.jsonl").read_text().splitlines()]
    rare = [row | {"label": row["label"] if number % 8 == 0 else []} for number, row in enumerate(lines)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rare))
    done = command_line(
        "finetune", "classify", "--init", mini.base, "--data", tmp_path, "--run", tmp_path / "run", "--max-steps", 12,
        *arguments(**CLASSES),
    )  # fmt: skip
    assert metrics_of(tmp_path / "run")["f1_micro"] == 0
    for word in ("no label", "dev", "optimizer.learning_rate"):
        assert word in done.err


def test_class_weights_shift_what_is_predicted(mini: Miniature, tmp_path: Path) -> None:
    """Of one label a text too; and the loss of a step is the same however it falls into bins."""
    calm = {name.replace(".", "__"): value for name, value in miniature_tasks.NO_DROPOUT.items()}
    for data, target, label in ((mini.table, "class", "red"), (mini.label_sets, "classes", "blue")):
        shares = []
        for weight in ("", f"{label}=20"):
            run = tmp_path / f"{target}{weight}"
            settings = settings_for(task__target=target, task__class_weights=weight, train__max_steps=8, **calm)
            finetune(settings, data, run, init=str(mini.base))
            words = Run.open(run).vocabulary()
            split = open_task(Run.open(run).settings, data, words).held_out()["dev"]
            outputs = outputs_of(run, split, words)
            place = Run.open(run).task["labels"].index(label)
            shares.append(float((sigmoid(outputs) if target == "classes" else outputs)[:, place].mean()))
        assert shares[1] > shares[0] + 0.1, target
        small = replace(settings, batch=replace(settings.batch, token_budget=64))
        finetune(small, data, tmp_path / f"{target}-small", init=str(mini.base))
        assert helpers.losses(tmp_path / f"{target}-small") == pytest.approx(helpers.losses(run), rel=1e-4)


# --- guarantees --------------------------------------------------------------------------------------------


def test_killed_and_resumed_is_bitwise_undisturbed(mini: Miniature, tmp_path: Path) -> None:
    words = words_for(mini, checkpoint__every_steps=3, log__every_steps=1, task__class_weights="balanced")
    words += ["--deterministic", "--max-steps", 24]
    run, calm = tmp_path / "run", tmp_path / "calm"
    kill_when(lambda: len(records(run)) >= 8, *words, "--run", run)
    assert 8 <= len(records(run)) < 24
    command_line("resume", run)
    command_line(*words, "--run", calm)
    assert helpers.losses(run) == helpers.losses(calm)
    scores = [
        {name: value for name, value in metrics_of(one).items() if name.startswith(("f1", "average", THRESHOLD))}
        for one in (run, calm)
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 8
    expected = helpers.final_weights(calm)
    for name, tensor in helpers.final_weights(run).items():
        assert torch.equal(tensor, expected[name]), name


def test_two_ranks_are_as_one(mini: Miniature, tmp_path: Path) -> None:
    calm = {name.replace(".", "__"): value for name, value in miniature_tasks.NO_DROPOUT.items()}
    words = [*words_for(mini, task__class_weights="balanced", **calm), "--max-steps", 6]
    command_line(*words, "--run", tmp_path / "two", "--nproc", 2)
    command_line(*words, "--run", tmp_path / "one")
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert helpers.losses(tmp_path / "two") == pytest.approx(helpers.losses(tmp_path / "one"), rel=1e-5)
    for name in one:
        if name.startswith(("f1", "subset", THRESHOLD)):
            assert two[name] == pytest.approx(one[name], abs=1e-4), name
    expected = helpers.final_weights(tmp_path / "one")
    for name, tensor in helpers.final_weights(tmp_path / "two").items():
        tolerance = 1e-2 if name.endswith("qkv.bias") else 1e-5  # Adam enlarges the rounding of a zero gradient
        assert helpers.relative_error(tensor, expected[name]) <= tolerance, name


def test_the_export_is_transformers_model_of_several_labels(mini: Miniature, colors: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export(colors, tmp_path / "out")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.problem_type == "multi_label_classification"
    assert theirs.config.id2label == dict(enumerate(sorted(miniature_tasks.COLOURS)))
    found = metrics_of(colors)
    assert theirs.config.thresholds == {label: found[f"{THRESHOLD}{label}"] for label in theirs.config.label2id}
    lines = [json.loads(line) for line in (mini.label_sets / "dev.jsonl").read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer([row["text"] for row in lines], padding=True, return_tensors="pt")
    words = Run.open(colors).vocabulary()
    split = open_task(Run.open(colors).settings, mini.label_sets, words).held_out()["dev"]
    answers = torch.from_numpy(np.array(split.block.answers))
    with torch.no_grad():
        outputs = theirs(**inputs, labels=answers)
    ours = torch.from_numpy(outputs_of(colors, split, words))
    assert helpers.relative_error(ours, outputs.logits) <= 1e-5
    loss = torch.nn.functional.binary_cross_entropy_with_logits(ours, answers)
    assert float(outputs.loss) == pytest.approx(float(loss), rel=1e-5), "their loss is ours"

    import_weights(tmp_path / "out", tmp_path / "again")
    for name in ("config.json", "vocab.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    again = read_weights(tmp_path / "again")
    assert (again.settings.head, again.settings.num_labels, again.left_over) == ("multilabel", 3, ())
    assert again.thresholds == theirs.config.thresholds


def test_the_head_of_an_export_is_trained_further(
    mini: Miniature, colors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(colors, tmp_path / "out")
    settings = settings_for(**CLASSES, train__max_steps=1, log__level="normal")
    finetune(settings, mini.label_sets, tmp_path / "run", init=str(tmp_path / "out"))
    assert "33 tensors taken" in capsys.readouterr().out


def test_bad_labels_end_in_one_sentence_with_file_and_line(mini: Miniature, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(mini.label_sets, data)
    with open(data / "dev.jsonl", "a") as file:
        file.write('{"text": "bato", "label": ["purple"]}\n')
    words = ["finetune", "classify", "--init", mini.base, "--data", data, "--run", tmp_path / "run", "--max-steps", 1]
    for more, sentence in (
        ([], r"line 61 of .*dev.jsonl.*'purple'.*\[bad-row\]"),
        (["--task.class_weights", "purple=2"], r"'purple'.*\[bad-class-weights\]"),
        (["--task.label", "a,b"], r"'a'.*--task.label.*\[missing-column\]"),
    ):
        ended = command_line(*words, *arguments(**CLASSES), *more, check=False)
        assert ended.code == 2
        assert len(ended.err.splitlines()) == 1
        assert re.search(sentence, ended.err), ended.err
        assert not (tmp_path / "run").exists()
    done = command_line(*words, *arguments(**CLASSES), "--on-error", "skip")
    assert "dev: skipped 1 row" in done.out
