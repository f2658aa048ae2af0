"""Fine-tuning: how long a run is, when it evaluates, what it keeps, and what is refused before it begins."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertrain.config.settings import Settings
from bertrain.run.folder import Run
from bertrain.training.finetune import finetune
from bertrain.training.predict import evaluate_task, predict
from bertrain.training.resolved_run import resolve_run
from bertrain.training.start import preflight_resume
from bertrain.training.task_results import SPEED, SPEED_OVERALL, Outcome, metrics_of, table
from bertrain.training.task_settings import resolve_task, usual_budget
from bertrain.weights.source import read_weights
from tests import helpers, miniature_tasks
from tests.launched import records
from tests.miniature_tasks import Miniature, command_line, settings_for


def test_the_length_of_a_run_is_said_once(mini: Miniature, tmp_path: Path) -> None:
    def settled(*changes: tuple[str, str], recipe: str = "") -> Settings:
        asked = resolve_task("classify", [*miniature_tasks.QUICK.items(), *changes], recipe=recipe)
        return resolve_run(asked, mini.table, tmp_path / "none", init=str(mini.base)).settings

    assert settled().train.max_steps == 23, "3 x 240 / 32, rounded up"
    assert settled(("train.epochs", "1"), ("data.slice", "0:0.5")).train.max_steps == 4
    assert settled(("train.max_steps", "7")).train.max_steps == 7
    assert settled(("batch.sequences", "0"), ("batch.tokens", "500")).train.max_steps > 1
    contest = settled(("train.max_steps", "300"), recipe="contest-mnli-1x1").train
    assert (contest.max_steps, contest.budget) == (300, "")
    assert settled(("train.epochs", "2"), recipe="contest-mnli-2x4").train.budget == ""
    budgeted = settled(("train.budget", "20m"))
    assert (budgeted.train.epochs, budgeted.schedule.warmup_steps, budgeted.schedule.warmup_share) == (0, 0, 0.1)
    assert settled(("train.budget", "1m"), recipe="contest-mnli-1x1").schedule.warmup_steps == 290
    with helpers.refused("contradicting-settings", "train.budget and train.max_steps"):
        settled(("train.max_steps", "7"), ("train.budget", "1m"))
    mine = tmp_path / "mine.toml"
    mine.write_text('[train]\nbudget = "1m"\n')
    by_file = resolve_task("classify", settings_file=mine)
    assert (by_file.train.budget, by_file.train.epochs, by_file.schedule.warmup_share) == ("1m", 0, 0.1)
    by_both = resolve_task("classify", [("train.max_steps", "7")], settings_file=mine)
    assert (by_both.train.budget, by_both.train.max_steps, by_both.schedule.warmup_share) == ("", 7, 0.1)
    mine.write_text('[train]\nbudget = "1m"\nmax_steps = 9\n')
    with helpers.refused("contradicting-settings", "train.budget and train.max_steps"):
        resolve_task("classify", settings_file=mine)


def test_when_to_evaluate_is_said_once(mini: Miniature, tmp_path: Path) -> None:
    quick = {name: value for name, value in miniature_tasks.QUICK.items() if name != "evaluate.every_epochs"}

    def settled(*changes: tuple[str, str], text: str = "") -> tuple[float, int]:
        (tmp_path / "mine.toml").write_text(text)
        asked = resolve_task("classify", [*quick.items(), *changes], settings_file=tmp_path / "mine.toml")
        evaluate = resolve_run(asked, mini.table, tmp_path / "none", init=str(mini.base)).settings.evaluate
        return evaluate.every_epochs, evaluate.every_samples

    assert settled() == (1.0, 240)
    assert settled(("evaluate.every_epochs", "0.5")) == (0.5, 120)
    assert settled(("evaluate.every_samples", "50")) == (0, 50)
    assert settled(text="[evaluate]\nevery_samples = 70\n") == (0, 70)
    assert settled(("evaluate.every_epochs", "2"), text="[evaluate]\nevery_samples = 70\n") == (2, 480)
    with helpers.refused("contradicting-settings", "evaluate.every_epochs and evaluate.every_samples"):
        settled(("evaluate.every_samples", "50"), ("evaluate.every_epochs", "1"))


def test_a_resumed_task_evaluates_as_it_is_told(mini: Miniature, tmp_path: Path) -> None:
    settings = settings_for(train__max_steps=2, evaluate__every_epochs=1)
    finetune(settings, mini.table, tmp_path / "run", init=str(mini.base))

    def told(*changes: tuple[str, str]) -> tuple[float, int]:
        evaluate = preflight_resume(tmp_path / "run", list(changes)).settings.evaluate
        return evaluate.every_epochs, evaluate.every_samples

    assert told() == (1.0, 240)
    assert told(("evaluate.every_epochs", "0.25")) == (0.25, 60)
    assert told(("evaluate.every_samples", "100")) == (0, 100)


def test_bins_hold_a_ranks_share_of_a_step(mini: Miniature) -> None:
    settings = settings_for()
    lengths = np.array([10, 20, 30] * 100)
    alone, shared = usual_budget(settings, lengths, 1), usual_budget(settings, lengths, 4)
    draw = np.random.default_rng(1)
    steps = draw.permutation(np.tile(lengths, 8))[: 32 * 70].reshape(70, 32).sum(1)
    assert steps.max() <= alone <= 1.5 * steps.mean()
    assert shared < alone / 2
    assert shared % 64 == 0
    settings = replace(settings, batch=replace(settings.batch, sequences=384))
    of_eight = usual_budget(settings, lengths, 8)
    totals = draw.choice(lengths, (1000, 384)).sum(1)
    assert ((totals > 7 * of_eight) & (totals <= 8 * of_eight)).mean() > 0.95, "a bin for each rank"
    assert usual_budget(settings, np.array([5, 5]), 1) >= settings.data.max_seq_length


def test_the_table_has_scores_speed_and_the_average_of_glue() -> None:
    of_mrpc = {"f1": (0.8, 0.9), "accuracy": (0.7, 0.8), "examples": (408.0, 408.0), "baseline_f1": (0.81, 0.81)}
    mrpc = Outcome("glue/mrpc", (1, 2), of_mrpc)
    mnli = Outcome(
        "glue/mnli",
        (1,),
        {"accuracy": (0.6,), "dev_mismatched/accuracy": (0.5,), SPEED: (1234.5,), SPEED_OVERALL: (1e3,)},
    )
    assert table([mrpc, mnli]).splitlines() == [
        "glue/mrpc (2 seeds)  f1 0.85 +- 0.071 (baseline 0.81)  accuracy 75.00% +- 7.07%",
        "glue/mnli  accuracy 60.00%  dev_mismatched/accuracy 50.00%  1,234 sentences/s, 1,000 overall",
        "average    0.675 of 2 tasks",
    ]
    assert len(table([mrpc]).splitlines()) == 1


def test_a_target_in_the_wrong_measure_is_refused(mini: Miniature, tmp_path: Path) -> None:
    for task, data, target in (("squad/v1.1", mini.questions, 0.9), ("classify", mini.table, 90.0)):
        settings = settings_for(task, evaluate__target_accuracy=target)
        with helpers.refused("bad-target", f"{target:g}", task):
            resolve_run(settings, data, tmp_path / "run", init=str(mini.base))


def test_a_model_of_another_size_than_the_weights_is_refused(mini: Miniature, tmp_path: Path) -> None:
    there = Run.open(mini.base).settings.model
    settings = settings_for("classify", model__num_layers=there.num_layers)
    fitted = resolve_run(settings, mini.table, tmp_path / "run", init=str(mini.base)).settings
    assert fitted.model.num_layers == there.num_layers
    settings = settings_for("classify", model__num_layers=there.num_layers + 1)
    with helpers.refused("other-model", "model.num_layers", mini.base, there.num_layers):
        resolve_run(settings, mini.table, tmp_path / "run", init=str(mini.base))


def test_files_that_differ_from_those_trained_on_can_be_read(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("sentence,label\nred blue,purple\none,two,three\ngreen red,mauve\n")
    done = command_line(
        "predict", colours, "--data", tmp_path / "other.csv", "--out", tmp_path / "out", "--task.text", "sentence",
        "--on-error", "skip", "--device", "cpu",
    )  # fmt: skip
    assert " 1 row" in done.err
    assert len((tmp_path / "out" / "other.jsonl").read_text().splitlines()) == 2, "whatever the labels say"
    refused = command_line(
        "predict", colours, "--data", tmp_path / "other.csv", "--out", tmp_path / "no", "--task.doc_stride", "9",
        check=False,
    )  # fmt: skip
    assert (refused.code, "task.doc_stride" in refused.err) == (2, True)


def test_what_is_wrong_is_said_before_any_training(mini: Miniature, tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        shutil.copy(next(mini.table.glob(f"{split}.*")), tmp_path)
    with open(tmp_path / "test.csv", "a") as file:
        file.write("row-99\n")
    done = command_line(
        "finetune", "classify", "--init", mini.base, "--data", tmp_path, "--run", tmp_path / "run", "--do", "predict",
        *miniature_tasks.arguments(), check=False,
    )  # fmt: skip
    assert (done.code, "test.csv" in done.err) == (2, True)
    assert not (tmp_path / "run").exists()


def test_a_budget_ends_saves_and_scores(mini: Miniature, tmp_path: Path) -> None:
    done = command_line(
        "finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", tmp_path / "run", "--budget", "4s",
        *miniature_tasks.arguments(batch__sequences=8),
    )  # fmt: skip
    settings = Run.open(tmp_path / "run").settings
    assert (settings.schedule.warmup_share, settings.train.epochs) == (0.1, 0)
    (end,) = records(tmp_path / "run", "end")
    assert end["step"] == len(records(tmp_path / "run")) > 4
    assert records(tmp_path / "run", "evaluation")[-1]["step"] == end["step"]
    assert read_weights(tmp_path / "run").global_step == end["step"]
    assert "train.budget 4s: " in done.out
    assert evaluate_task(tmp_path / "run", device="cpu")["accuracy"] == metrics_of(tmp_path / "run")["accuracy"]
    assert finetune(settings_for(batch__sequences=8, train__budget="4s"), mini.table, tmp_path / "run",
                    init=str(mini.base)).step == end["step"], "its length was fixed then"  # fmt: skip


def test_a_dry_run_says_all_and_writes_nothing(
    mini: Miniature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(mini.base.parent.rglob("*"))
    words = ["finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", tmp_path / "run", "--dry-run"]
    done = command_line(*words, *miniature_tasks.arguments(data__max_seq_length=8))
    assert "steps: 23, about 3.1 epochs" in done.out
    assert re.search(r"train: .* [\d,]+ rows of 240 to 8 tokens", done.out)
    assert "model.head = classify" in done.out
    assert not list(tmp_path.iterdir())
    assert sorted(mini.base.parent.rglob("*")) == before
    monkeypatch.setenv("RANK", "1")
    assert not command_line(*words, *miniature_tasks.arguments(data__max_seq_length=8)).out, "the first rank says it"


def test_a_target_ends_a_run_and_the_best_is_kept(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    reached = {record["step"]: record["accuracy"] for record in records(colours, "evaluation")}
    target = sorted(reached.values())[1]
    first = next(step for step, accuracy in reached.items() if accuracy >= target)
    settings = settings_for(train__max_steps=30, evaluate__every_epochs=1, evaluate__target_accuracy=target)
    assert finetune(settings, mini.table, tmp_path / "run", init=str(mini.base)).step == first
    assert records(tmp_path / "run", "end")[0]["reason"] == f"evaluate.target_accuracy {target:g} is reached"
    best = json.loads((colours / "checkpoints" / "best.json").read_text())
    assert best["figure"] == max(reached.values()) == reached[best["step"]]
    shown = command_line("evaluate", colours, "--checkpoint", "best", "--device", "cpu", "--json")
    assert json.loads(shown.out)["step"] == best["step"]
    assert json.loads(shown.out)["accuracy"] == best["figure"]
    assert metrics_of(colours)["accuracy"] == best["figure"]


def test_the_figures_and_predictions_of_a_run_that_keeps_the_best_are_the_bests(
    mini: Miniature, tmp_path: Path
) -> None:
    """A rate that rises until it ruins what was learnt leaves the best behind."""
    run = tmp_path / "run"
    words = ("finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", run, "--do", "predict")
    rates = {"optimizer__learning_rate": 0.2, "schedule__warmup_share": 0.95}
    changes = {"checkpoint__keep_best": True, "evaluate__every_epochs": 0.5} | rates
    done = command_line(*words, "--max-steps", 40, *miniature_tasks.arguments(**changes))
    evaluated = {record["step"]: record["accuracy"] for record in records(run, "evaluation")}
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["figure"] == max(evaluated.values()) > evaluated[40], "the last is not the best"
    assert "at the best evaluation" in done.out
    (result,) = json.loads((run / "results.json").read_text())
    assert result["evaluation"] == "best"
    assert result["figures"]["accuracy"]["values"] == [best["figure"]]
    predict(run, mini.table, tmp_path / "best", which="best", device="cpu")
    predict(run, mini.table, tmp_path / "newest", device="cpu")
    written, of_best, of_newest = (
        (folder / "test.jsonl").read_text() for folder in (run / "predictions", tmp_path / "best", tmp_path / "newest")
    )
    assert written == of_best != of_newest
