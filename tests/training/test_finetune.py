"""Fine-tuning as users meet it: small tasks that are learnt, scored and predicted, on a CPU."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from bertrain.base.errors import AgreedError
from bertrain.model.batch import Batch
from bertrain.model.encoder import Outputs
from bertrain.run.folder import Run
from bertrain.training.evaluate import evaluate
from bertrain.training.finetune import finetune
from bertrain.training.predict import evaluate_task, predict
from bertrain.training.start import resume
from bertrain.training.task_results import metrics_of
from tests import helpers, miniature_tasks
from tests.launched import records
from tests.miniature_tasks import Miniature, command_line, settings_for

GLUE = Path(__file__).parents[1] / "data" / "glue"


# --- what is learnt ----------------------------------------------------------------------------------------


def test_a_table_is_learnt(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    figures = metrics_of(colours)
    assert figures["accuracy"] >= 0.9, "one in three by guessing"
    assert figures["f1_macro"] >= 0.9
    assert figures["train_examples_per_s"] > 0
    assert figures["train_examples_per_s_overall"] > 0
    evaluated = [record["samples"] for record in records(colours, "evaluation")]
    assert evaluated == [256, 480, 736, 960], "after each pass over 240 rows, and at the end"
    result = predict(colours, mini.table, tmp_path, device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    _, expected = miniature_tasks.coloured(30, 3)
    assert [row["id"] for row in rows] == [f"row-{number}" for number in range(30)]
    assert sum(row["label"] == colour for row, colour in zip(rows, expected, strict=True)) >= 26
    assert all(sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5) for row in rows)
    assert result["test"]["files"] == [str(tmp_path / "test.jsonl")]


def test_numbers_are_learnt(mini: Miniature, tmp_path: Path) -> None:
    settings = settings_for(task__target="number", train__max_steps=30)
    finetune(settings, mini.numbers, tmp_path / "run", init=str(mini.base))
    assert metrics_of(tmp_path / "run")["pearson"] >= 0.6
    predict(tmp_path / "run", mini.numbers / "dev.tsv", tmp_path, device="cpu")
    numbers = [json.loads(line)["number"] for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    known = [float(line.split("\t")[1]) for line in (mini.numbers / "dev.tsv").read_text().splitlines()[1:]]
    assert np.corrcoef(numbers, known)[0, 1] == pytest.approx(metrics_of(tmp_path / "run")["pearson"], abs=1e-6)


def test_answers_are_found_in_texts_never_seen(mini: Miniature, answers: Path, tmp_path: Path) -> None:
    assert metrics_of(answers)["exact_match"] >= 60, "one word of eight by guessing"
    predict(answers, mini.questions / "dev-v1.1.json", tmp_path, device="cpu")
    scored = command_line(
        "score", "squad/v1.1", "--data", mini.questions / "dev-v1.1.json", "--predictions",
        tmp_path / "predictions.json", "--json",
    )  # fmt: skip
    assert json.loads(scored.out)["exact_match"] == metrics_of(answers)["exact_match"]
    (tmp_path / "both").mkdir()
    for part in ("dev", "test"):
        shutil.copy(mini.questions / "dev-v1.1.json", tmp_path / "both" / f"{part}-v1.1.json")
    predict(answers, tmp_path / "both", tmp_path / "apart", device="cpu")
    for part in ("dev", "test"):
        found = (tmp_path / "apart" / part / "predictions.json").read_bytes()
        assert found == (tmp_path / "predictions.json").read_bytes(), "each has a folder"
    shorter = command_line("evaluate", answers, "--device", "cpu", "--task.n_best", 1, "--json")
    assert 0 < json.loads(shorter.out)["exact_match"] <= metrics_of(answers)["exact_match"]


# --- one run and several -----------------------------------------------------------------------------------


def test_several_seeds_have_a_mean_and_a_deviation(mini: Miniature, tmp_path: Path) -> None:
    run = tmp_path / "runs"
    words = ["finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", run, "--max-steps", 2,
             "--seeds", "1,2,3", "--do", "predict", *miniature_tasks.arguments()]  # fmt: skip
    (outcome,) = json.loads(command_line(*words, "--json").out)
    assert outcome["seeds"] == [1, 2, 3]
    values = [metrics_of(run / f"seed-{seed}")["accuracy"] for seed in (1, 2, 3)]
    assert outcome["figures"]["accuracy"] == {
        "mean": statistics.fmean(values), "deviation": float(np.std(values, ddof=1)), "values": values,
    }  # fmt: skip
    for seed, number in ((1, 0), (3, 2)):
        own = json.loads(command_line("evaluate", run / f"seed-{seed}", "--device", "cpu", "--json").out)
        assert [row["label"] for row in own["by_class"]] == [row["label"] for row in outcome["by_class"]]
        assert all(f"{row['label']} " in own["report"] for row in own["by_class"])
        for row, over_seeds in zip(own["by_class"], outcome["by_class"], strict=True):
            for name in ("precision", "recall", "f1", "support"):
                assert over_seeds[name]["values"][number] == row[name], (seed, row["label"], name)
        assert statistics.fmean(row["f1"] for row in own["by_class"]) == pytest.approx(own["f1_macro"])
        assert sum(row["support"] for row in own["by_class"]) == own["examples"]
    assert list(outcome["predictions"]) == [str(run / f"seed-{seed}") for seed in (1, 2, 3)]
    del outcome["predictions"]
    assert json.loads((run / "results.json").read_text()) == [outcome]
    weights = [helpers.final_weights(run / f"seed-{seed}")["answer.classify.weight"] for seed in (1, 2)]
    assert not torch.equal(*weights)

    before = {path: path.read_bytes() for path in run.glob("seed-*/checkpoints/*/*")}
    again = command_line(*words)
    assert "(3 seeds)" in again.out
    assert f"accuracy {statistics.fmean(values):.2%} +- {statistics.stdev(values):.2%}" in again.out
    assert {path: path.read_bytes() for path in run.glob("seed-*/checkpoints/*/*")} == before, "nothing is redone"


def test_all_of_glue_in_one_command(mini: Miniature, tmp_path: Path) -> None:
    run = tmp_path / "glue"
    done = command_line(
        "finetune", "glue", "--init", mini.base, "--data", GLUE, "--run", run, "--max-steps", 1, "--do", "predict",
        *miniature_tasks.arguments(log__level="quiet"),
    )  # fmt: skip
    assert "glue/qnli is left out" in done.err
    table = [line for line in done.out.splitlines() if line.startswith("glue/")]
    names = ["cola", "sst2", "mrpc", "stsb", "rte", "wnli", "mnli"]
    assert [line.split()[0] for line in table] == [f"glue/{name}" for name in names]
    figures = ["matthews", "accuracy", "f1", "pearson", "accuracy", "accuracy", "accuracy"]
    assert [line.split()[1] for line in table] == figures
    assert [one["task"] for one in json.loads((run / "results.json").read_text())] == [f"glue/{name}" for name in names]
    submission = (run / "cola" / "predictions" / "CoLA.tsv").read_text().splitlines()
    assert submission[0] == "index\tprediction"
    assert len(submission) == len((GLUE / "CoLA" / "test.tsv").read_text().splitlines())


def test_a_run_without_a_held_out_part_ends_well_and_says_so(mini: Miniature, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text((mini.table / "train.csv").read_text())
    words = ["finetune", "classify", "--init", mini.base, "--data", tmp_path, "--run", tmp_path / "run"]
    done = command_line(*words, "--max-steps", 2, *miniature_tasks.arguments(task__hold_out=0))
    assert "dev.csv" in done.out
    *_, scores, following = done.out.splitlines()
    assert " sentences/s" in scores
    assert following.startswith(f"next: bertrain predict {tmp_path / 'run'} ")
    with helpers.refused("no-examples", tmp_path, "--task.label"):
        evaluate_task(tmp_path / "run")


def test_a_single_table_is_split_and_later_verbs_see_the_same_rows(mini: Miniature, tmp_path: Path) -> None:
    """Trained, continued, evaluated and predicted on the same rows; the rate follows the weights, and is kept."""
    data, run = tmp_path / "mine.csv", tmp_path / "run"
    shutil.copy(mini.table / "train.csv", data)
    words = ["finetune", "classify", "--init", mini.base, "--data", data, "--run", run, "--max-steps", 40]
    words += miniature_tasks.arguments(optimizer__learning_rate=-1)
    done = command_line(*words)
    assert "task.hold_out" in done.out
    assert "optimizer.learning_rate 0.001" in done.out
    settings = Run.open(run).settings
    assert (settings.optimizer.learning_rate, settings.task.hold_out) == (1e-3, 0.1)
    scored = metrics_of(run)
    assert scored["examples"] == 24
    assert scored["baseline_accuracy"] < 0.6
    assert f"(baseline {scored['baseline_accuracy']:.2%})" in done.out.splitlines()[-2]
    assert scored["accuracy"] > scored["baseline_accuracy"]

    steps = records(run, "step")
    command_line(*words)
    assert records(run, "step") == steps, "the same command finds it done"
    resume(run)
    for given in ((), ("--data", data)):
        again = json.loads(command_line("evaluate", run, "--device", "cpu", "--json", *given).out)
        assert {name: again[name] for name in ("accuracy", "f1_macro", "examples")} == {
            name: scored[name] for name in ("accuracy", "f1_macro", "examples")
        }
    predict(run, data, tmp_path / "out", device="cpu")
    assert len((tmp_path / "out" / "dev.jsonl").read_text().splitlines()) == 24
    shutil.copy(data, tmp_path / "other.csv")
    assert evaluate_task(run, tmp_path / "other.csv", device="cpu")["examples"] == 240


def test_texts_are_predicted_without_a_file(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    texts, expected = miniature_tasks.coloured(12, 4)
    found = predict(colours, texts=texts, device="cpu")
    assert sum(one["label"] == colour for one, colour in zip(found, expected, strict=True)) >= 10
    assert predict(colours, texts=texts[0], device="cpu") == [
        {"label": found[0]["label"], "probabilities": pytest.approx(found[0]["probabilities"], abs=1e-4)}
    ]
    done = command_line("predict", colours, texts[0], "--task.on_error", "skip", texts[1], "--device", "cpu")
    for line, text, one in zip(done.out.splitlines(), texts[:2], found, strict=False):
        assert line.startswith(one["label"])
        assert line.endswith(text)
    assert len(done.out.splitlines()) == 2
    with helpers.refused("conflicting-options", "--data", "--out"):
        predict(colours, mini.table, tmp_path, texts=texts)
    with helpers.refused("conflicting-options", "--data", "--out"):
        predict(colours)


def test_pairs_are_predicted_two_texts_at_a_time(mini: Miniature, tmp_path: Path) -> None:
    words = helpers.vocabulary_words()[:4]
    rows = [f"{words[n % 4]},{words[n // 4]},{n % 2 + 0.5}\n" for n in range(16)]
    (tmp_path / "train.csv").write_text("".join(["text,b,label\n", *rows]))
    settings = settings_for(task__text_pair="b", task__target="number", train__max_steps=1)
    finetune(settings, tmp_path, tmp_path / "run", init=str(mini.base))
    found = predict(tmp_path / "run", texts=words, device="cpu")
    shown = command_line("predict", tmp_path / "run", *words, "--device", "cpu").out.splitlines()
    assert len(found) == 2
    assert shown == [
        f"{one['number']:.4g}  {a} | {b}" for one, a, b in zip(found, words[::2], words[1::2], strict=True)
    ]


def test_a_model_that_predicts_one_class_is_named_with_the_cure(mini: Miniature, tmp_path: Path) -> None:
    texts, _ = miniature_tasks.coloured(100, 5)
    for name in ("train", "dev"):  # nothing to learn, but that most are plain
        rows = [f"{text},{'plain' if number % 10 else 'rare'}\n" for number, text in enumerate(texts)]
        (tmp_path / f"{name}.csv").write_text("".join(["text,label\n", *rows]))
    words = ["finetune", "classify", "--init", mini.base, "--data", tmp_path, "--run", tmp_path / "run"]
    done = command_line(*words, "--max-steps", 6, *miniature_tasks.arguments())
    (recorded,) = records(tmp_path / "run", "evaluation")
    assert recorded["accuracy"] == recorded["baseline_accuracy"] == 0.9
    for word in ("'plain'", "dev", "optimizer.learning_rate", "0.003", "0.001"):
        assert word in done.err
    shown = command_line("evaluate", tmp_path / "run", "--device", "cpu")
    assert "recall" in shown.out
    assert "[[90  0]\n [10  0]]" in shown.out


# --- a run that is there -----------------------------------------------------------------------------------


def test_figures_do_not_depend_on_how_many_are_asked_at_once(mini: Miniature, colours: Path) -> None:
    known = metrics_of(colours)
    for words in ([], ["--data", mini.table], ["--batch-size", 1], ["--batch-size", 7]):
        found = json.loads(command_line("evaluate", colours, "--device", "cpu", "--json", *words).out)
        assert found["step"] == 30
        assert {name: found[name] for name in ("accuracy", "f1_macro", "examples")} == pytest.approx(
            {name: known[name] for name in ("accuracy", "f1_macro", "examples")}
        )
        latencies = [found[f"latency_ms_p{share}"] for share in (50, 90, 95, 99, 100)]
        assert latencies == sorted(latencies)
        assert latencies[0] > 0
        assert found["examples_per_s"] > 0
    shown = command_line("evaluate", colours, "--device", "cpu", "--batch-size", 4).out
    assert re.search(r"a batch took [\d.]+ ms \(p50\), .* ms \(p99\)", shown)


def test_a_model_that_has_diverged_has_no_figures(colours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def says_nothing(batch: Batch) -> Outputs:
        return Outputs(answers=torch.full((len(batch.nsp_labels), 3), torch.nan))

    monkeypatch.setattr("bertrain.training.evaluate.predictor", lambda *_: says_nothing)
    with helpers.refused("diverged", "dev", kind=AgreedError):
        evaluate_task(colours)


def test_a_task_is_not_evaluated_on_a_part_of_its_examples(colours: Path) -> None:
    with helpers.refused("pretraining-only", "--max-examples"):
        evaluate(colours, max_examples=3)


def test_the_same_command_again_finds_it_done(mini: Miniature, colours: Path) -> None:
    metrics = (colours / "metrics.jsonl").read_bytes()
    settings = settings_for(train__max_steps=30, evaluate__every_epochs=1, checkpoint__keep_best=True)
    assert finetune(settings, mini.table, colours, init=str(mini.base)).step == 30
    assert resume(colours).step == 30
    steps = [line for line in metrics.splitlines() if b'"end"' not in line]
    assert (colours / "metrics.jsonl").read_bytes().splitlines()[: len(steps)] == steps


def test_data_are_read_again_when_they_or_the_model_are_others(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    """In one process, as in a notebook: what is kept in memory is only what is still so."""
    rows = (mini.table / "train.csv").read_text()
    (tmp_path / "train.csv").write_text(rows)
    settings = settings_for(train__max_steps=1)
    finetune(settings, tmp_path, tmp_path / "one", init=str(mini.base))
    (tmp_path / "train.csv").write_text(rows.replace("blue", "azure"))
    finetune(settings, tmp_path, tmp_path / "two", init=str(mini.base))
    assert Run.open(tmp_path / "one").task["labels"] == ["blue", "green", "red"]
    assert Run.open(tmp_path / "two").task["labels"] == ["azure", "green", "red"]
    for run, blue in (("one", "blue"), ("two", "azure")):
        predict(tmp_path / run, mini.table / "test.csv", tmp_path / "out", device="cpu")
        answer = json.loads((tmp_path / "out" / "test.jsonl").read_text().splitlines()[0])
        assert set(answer["probabilities"]) == {blue, "green", "red"}
    with helpers.refused("unwritable-file", "train.csv"):
        predict(colours, mini.table, tmp_path / "train.csv", device="cpu")
    with helpers.refused("occupied-folder", "--out"):
        predict(colours, mini.table, mini.table, device="cpu")
    asked = tmp_path / "new.jsonl"
    asked.write_text('{"text": "red"}\n')
    with helpers.refused("occupied-folder", "--out"):
        predict(colours, asked, tmp_path, device="cpu")
    assert asked.read_text() == '{"text": "red"}\n'


def test_runs_are_reported_side_by_side(mini: Miniature, colours: Path, answers: Path, tmp_path: Path) -> None:
    finetune(settings_for(train__max_steps=5), mini.table, tmp_path / "short", init=str(mini.base))
    command_line("report", colours, tmp_path / "short", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "accuracy" in page
    assert "masked" not in page, "nothing of pre-training"
    command_line("report", answers, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "exact match" in page
    assert re.search(r"Best evaluation</dt><dd><b>[\d.]+</b> <small>f1, at step 30", page), "by its main figure"
    command_line("report", colours, mini.base, "--out", tmp_path / "page.html")
