"""Fine-tuning as users meet it: miniature_tasks tasks that are learnt, scored, predicted and handed over, on a CPU."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertrain.base.errors import AgreedError
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model import bert
from bertrain.model.batch import Batch
from bertrain.model.bert import Bert
from bertrain.model.heads import answer_sums
from bertrain.model.initialization import initialize
from bertrain.ranks.parallel import Ranks
from bertrain.run.folder import Run
from bertrain.tasks.registry import open_task
from bertrain.tasks.task import Split, TaskOutputs
from bertrain.training.engine import predictor
from bertrain.training.finetune import finetune
from bertrain.training.predict import evaluate_task, predict
from bertrain.training.resolved_run import resolve_run
from bertrain.training.start import preflight_resume, pretrain, resume
from bertrain.training.state import TrainState
from bertrain.training.task_evaluator import TaskEvaluator
from bertrain.training.task_results import SPEED, SPEED_OVERALL, Outcome, metrics_of, table
from bertrain.training.task_settings import resolve_task, usual_budget
from bertrain.weights.export import export
from bertrain.weights.source import build_model, copy_weights, read_weights
from tests import helpers, miniature_tasks
from tests.launched import records
from tests.miniature_tasks import Miniature, command_line, settings_for

GLUE = Path(__file__).parents[1] / "data" / "glue"


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    return miniature_tasks.make_miniature(tmp_path_factory.mktemp("miniature_tasks"))


@pytest.fixture(scope="module")
def colours(mini: Miniature) -> Path:
    """A run that tells three colours apart."""
    run = mini.base.parent / "colours"
    settings = settings_for(train__max_steps=30, evaluate__every_epochs=1, checkpoint__keep_best=True)
    finetune(settings, mini.table, run, init=str(mini.base))
    return run


@pytest.fixture(scope="module")
def answers(mini: Miniature) -> Path:
    """A run that finds words in texts."""
    run = mini.base.parent / "answers"
    finetune(settings_for("squad/v1.1", train__max_steps=30), mini.questions, run, init=str(mini.base))
    return run


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
    with helpers.refused("no-examples", tmp_path):
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


# --- how long ----------------------------------------------------------------------------------------------


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


def test_a_dry_run_says_all_and_writes_nothing(mini: Miniature, tmp_path: Path) -> None:
    before = sorted(mini.base.parent.rglob("*"))
    words = ["finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", tmp_path / "run", "--dry-run"]
    done = command_line(*words, *miniature_tasks.arguments(data__max_seq_length=8))
    assert "steps: 23, about 3.1 epochs" in done.out
    assert re.search(r"train: .* [\d,]+ rows of 240 to 8 tokens", done.out)
    assert "model.head = classify" in done.out
    assert not list(tmp_path.iterdir())
    assert sorted(mini.base.parent.rglob("*")) == before


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


# --- options of training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classify", "squad/v1.1"])
def test_what_is_computed_again_is_the_same(mini: Miniature, tmp_path: Path, task: str) -> None:
    found = []
    for what in ("none", "selective", "full"):
        settings = settings_for(task, train__max_steps=4, train__activation_checkpointing=what)
        data = mini.table if task == "classify" else mini.questions
        finetune(settings, data, tmp_path / what, init=str(mini.base))
        found.append(helpers.losses(tmp_path / what))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_layers_have_the_rates_they_are_given(mini: Miniature, tmp_path: Path) -> None:
    """Three steps of PyTorch's own AdamW, a group for each parameter."""
    asked = settings_for(
        train__max_steps=3, optimizer__layer_decay=0.5, optimizer__clip_norm=0, schedule__warmup_share=0,
        schedule__decay="constant", model__hidden_dropout=0, model__attention_dropout=0, model__head_dropout=0,
    )  # fmt: skip
    resolved = resolve_run(asked, mini.table, tmp_path / "run", init=str(mini.base))
    settings = resolved.settings
    finetune(asked, mini.table, tmp_path / "run", init=str(mini.base))

    model = Bert(settings.model)
    initialize(model, settings.train.seed)
    with torch.no_grad():
        copy_weights(dict(model.named_parameters()), read_weights(mini.base))
    rates = {"embeddings": 0.5**3, "layers.0": 0.5**2, "layers.1": 0.5, "answer": 1.0}
    groups: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        rate = next(rate for prefix, rate in rates.items() if name.startswith(prefix))
        decay = settings.optimizer.weight_decay if parameter.ndim > 1 else 0.0
        groups.append({"params": [parameter], "lr": settings.optimizer.learning_rate * rate, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=settings.optimizer.epsilon)
    loader = Loader(resolved.data, settings)
    for number in range(3):
        step = loader.step(number, 32 * number)
        optimizer.zero_grad()
        for batch in step.bins:
            outputs = model.train()(batch).answers
            assert outputs is not None
            (answer_sums(outputs, batch, "classify").sequence_loss / step.num_sequences).backward()
        optimizer.step()
    trained = helpers.final_weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        # The bias of a key has no gradient but rounding, which Adam makes as large as any other.
        tolerance = 1e-3 if name.endswith("qkv.bias") else 1e-5
        assert helpers.relative_error(trained[name], parameter) <= tolerance, name


def test_frozen_layers_have_no_say_in_clipping(mini: Miniature, tmp_path: Path) -> None:
    norms = {}
    for clipping in ("global", "local", "bucket"):
        settings = settings_for(
            train__max_steps=1, optimizer__frozen_layers=1, optimizer__clip_norm=1e-3, optimizer__clipping=clipping
        )
        settled = resolve_run(settings, mini.table, tmp_path / "x", init=str(mini.base)).settings
        state = TrainState.build(settled, Ranks(0, 1, torch.device("cpu")))
        state.arena.gradients.fill_(1e-9)
        for name, gradient in state.arena.named(state.arena.gradients).items():
            if name.startswith(("embeddings.", "layers.0.")):
                gradient.fill_(torch.nan)
        before = state.arena.gradients.clone()
        state.exchange.begin()
        state.exchange.finish()
        norms[clipping], _ = state.exchange.norm_and_factor()
        for name, gradient in state.arena.named(state.arena.gradients).items():
            is_frozen = name.startswith(("embeddings.", "layers.0."))
            assert torch.equal(
                gradient, torch.zeros_like(gradient) if is_frozen else before.new_full(gradient.shape, 1e-9)
            )
    assert norms["global"] == norms["local"] == norms["bucket"] > 0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_layers_stay_as_they_are(mini: Miniature, tmp_path: Path, name: str) -> None:
    rule = {"optimizer__name": name, "optimizer__learning_rate": 1e-3, "optimizer__layer_decay": 0.9}
    settings = settings_for(train__max_steps=3, optimizer__frozen_layers=1, **rule)
    finetune(settings, mini.table, tmp_path / "run", init=str(mini.base))
    began, trained = read_weights(mini.base).tensors, helpers.final_weights(tmp_path / "run")
    for name, tensor in trained.items():
        if name in began:
            is_frozen = name.startswith(("embeddings.", "layers.0."))
            assert torch.equal(tensor, began[name]) == is_frozen, name
    assert not torch.equal(trained["answer.pool.weight"], began["next_sentence.pool.weight"])


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
    def says_nothing(batch: Batch) -> bert.Outputs:
        return bert.Outputs(answers=torch.full((len(batch.nsp_labels), 3), torch.nan))

    monkeypatch.setattr("bertrain.training.evaluate.predictor", lambda *_: says_nothing)
    with helpers.refused("diverged", "dev", kind=AgreedError):
        evaluate_task(colours)


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
    with helpers.refused("cannot-write", "train.csv"):
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


# --- weights -----------------------------------------------------------------------------------------------


def outputs_of(run: Path, split: Split, words: Vocabulary) -> TaskOutputs:
    """What a run's model says of a split, computed in flat bins."""
    settings, cpu = Run.open(run).settings, torch.device("cpu")
    task = open_task(settings, Run.open(run).data, words)
    judge = TaskEvaluator(task, {split.name: split}, settings, Run.open(run).data, words)
    said, _ = judge.outputs(split, predictor(build_model(read_weights(run)), settings, cpu), Ranks(0, 1, cpu))
    return said


def test_a_classifier_is_transformers_too(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = command_line("weights", "export", colours, "--out", tmp_path / "out")
    assert "AutoModelForSequenceClassification" in done.out
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.id2label == dict(enumerate(sorted(miniature_tasks.COLOURS)))
    texts = [line.split(",")[0] for line in (mini.table / "dev.csv").read_text().splitlines()[1:]]
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**read).logits
    words = Run.open(colours).vocabulary()
    split = open_task(Run.open(colours).settings, mini.table, words).held_out()["dev"]
    assert helpers.relative_error(torch.from_numpy(outputs_of(colours, split, words)), logits) <= 1e-5

    export(tmp_path / "out", tmp_path / "again")
    for name in ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    once, twice = (helpers.load_weights(tmp_path / name) for name in ("out", "again"))
    assert list(once) == list(twice)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    assert "33 of 33 tensors are equal" in command_line("weights", "compare", colours, tmp_path / "again").out
    assert command_line("weights", "compare", colours, mini.base, check=False).code == 1
    assert "answer.classify.weight  3x32" in command_line("weights", "show", colours).out
    refused = command_line("weights", "export", colours, "--to", "nvidia", "--out", tmp_path / "pt", check=False)
    assert "[no-pretraining-head]" in refused.err


def test_a_finder_of_answers_is_transformers_too(mini: Miniature, answers: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export(answers, tmp_path / "out")
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    words = Run.open(answers).vocabulary()
    split = open_task(Run.open(answers).settings, mini.questions, words).held_out()["dev"]
    ours, place = outputs_of(answers, split, words), 0
    asked = json.loads((mini.questions / "dev-v1.1.json").read_text())["data"][0]["paragraphs"]
    for paragraph in asked[:10]:
        read = tokenizer(paragraph["qas"][0]["question"], paragraph["context"], return_tensors="pt")
        with torch.no_grad():
            said = theirs(**read)
        expected = torch.stack([said.start_logits[0], said.end_logits[0]], 1)
        there = ours[place : place + len(expected)]
        place += len(expected)
        assert helpers.relative_error(torch.from_numpy(there), expected) <= 1e-5


def test_a_head_is_taken_where_it_fits_and_said_where_it_does_not(
    mini: Miniature, colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(colours, tmp_path / "out")
    said = {"log__level": "normal", "train__max_steps": 1}

    def begun(name: str, data: Path, task: str = "classify") -> str:
        finetune(settings_for(task, **said), data, tmp_path / name, init=str(tmp_path / "out"))
        return capsys.readouterr().out

    kept = begun("same", mini.table)
    assert "33 tensors taken" in kept
    assert "afresh" not in kept
    rows = (mini.table / "train.csv").read_text().splitlines()
    for name, lines in (
        ("two", [row for row in rows if not row.endswith("blue")]),
        ("renamed", [row.replace("blue", "azure") for row in rows]),
    ):
        (tmp_path / f"{name}-data").mkdir()
        (tmp_path / f"{name}-data" / "train.csv").write_text("\n".join(lines) + "\n")
    assert "initialized afresh: answer.classify.weight, answer.classify.bias" in begun("two", tmp_path / "two-data")
    assert "though its classes were blue, green, red" in begun("renamed", tmp_path / "renamed-data")
    other = begun("other", mini.questions, "squad/v1.1")
    assert "initialized afresh: answer.score.weight, answer.score.bias" in other
    assert "left over: answer.pool.weight" in other

    settings = helpers.tiny_settings(train__max_steps=1)
    pretrain(settings, mini.base.parent / "data", tmp_path / "further", init=str(tmp_path / "out"))
    further = capsys.readouterr().out
    assert "31 tensors taken" in further
    assert "initialized afresh: masked_words.bias" in further
    trained = helpers.final_weights(tmp_path / "further")["next_sentence.pool.weight"]
    assert helpers.relative_error(trained, read_weights(colours).tensors["answer.pool.weight"]) < 0.1


def test_words_come_with_the_weights_or_by_name(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    export(colours, bare)
    vocabulary = (bare / "vocab.txt").read_text()
    for name in ("vocab.txt", "tokenizer.json"):
        (bare / name).unlink()
    (tmp_path / "cased.txt").write_text(vocabulary.replace("bato\n", "Bato\n"))
    settings = settings_for(train__max_steps=1)
    with helpers.refused("missing-vocabulary", bare, "--data.vocab"):
        finetune(settings, mini.table, tmp_path / "run", init=str(bare))
    named = replace(settings, data=replace(settings.data, vocab=str(tmp_path / "cased.txt")))
    finetune(named, mini.table, tmp_path / "run", init=str(bare))
    assert Run.open(tmp_path / "run").vocabulary().lower_case is False, "it has capitals"


def test_the_contests_recipes_are_its_settings() -> None:
    baseline = resolve_task("glue/mnli", recipe="contest-mnli-1x1")
    assert (baseline.batch.sequences, baseline.train.activation_checkpointing) == (24, "none")
    optimised = resolve_task("glue/mnli", recipe="contest-mnli-2x4")
    assert (optimised.batch.sequences, optimised.train.activation_checkpointing) == (48 * 8, "selective")
    assert baseline.train.budget == optimised.train.budget == "20m"
