"""Fine-tuning that is killed, shared out, given bad input or a disk that cannot be written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from bertrain.training.finetune import finetune
from bertrain.training.task_results import metrics_of
from bertrain.weights.export import export
from tests import helpers
from tests import miniature_tasks as tiny_tasks
from tests.launched import kill_when, records
from tests.miniature_tasks import Miniature, command_line, settings_for


@pytest.fixture(scope="module")
def tuned(mini: Miniature) -> Path:
    """A short run, with the model as Transformers has it beside it."""
    run = mini.base.parent / "tuned"
    finetune(settings_for(train__max_steps=2), mini.table, run, init=str(mini.base))
    export(run, mini.base.parent / "exported")
    return run


def test_killed_and_resumed_is_bitwise_undisturbed(mini: Miniature, tmp_path: Path) -> None:
    words = ["finetune", "classify", "--init", mini.base, "--data", mini.table, "--deterministic", "--max-steps", 40,
             *tiny_tasks.arguments(checkpoint__every_steps=3, log__every_steps=1, evaluate__every_epochs=1),
             ]  # fmt: skip
    run, calm = tmp_path / "run", tmp_path / "calm"
    kill_when(lambda: len(records(run)) >= 10, *words, "--run", run)
    assert 10 <= len(records(run)) < 40
    command_line("resume", run, "--max-samples", 30 * 32)
    assert len(records(run)) >= 30
    done = command_line(*words, "--run", run, "--train.max_samples", 0)
    assert "continuing after step 3" in done.out, "the same command goes on where the other stopped"
    command_line(*words, "--run", calm)
    assert helpers.losses(run) == helpers.losses(calm)
    for figure in ("step", "accuracy", "f1_macro"):
        assert [r[figure] for r in records(run, "evaluation")][-1] == records(calm, "evaluation")[-1][figure]
    expected = helpers.final_weights(calm)
    for name, tensor in helpers.final_weights(run).items():
        assert torch.equal(tensor, expected[name]), name
    before = (run / "metrics.jsonl").read_bytes()
    assert command_line(*words, "--run", run).out.splitlines()[-2].startswith("classify")
    assert records(run) == [json.loads(line) for line in before.splitlines() if b'"kind": "step"' in line]


def test_two_ranks_are_as_one(mini: Miniature, tmp_path: Path) -> None:
    """Two seeds, one after the other, on the same two processes; predictions are everybody's too."""
    changes = {name.replace(".", "__"): value for name, value in tiny_tasks.NO_DROPOUT.items()}
    words = ["finetune", "classify", "--init", mini.base, "--data", mini.table, "--max-steps", 6, "--seeds", "1,2",
             "--do", "predict", *tiny_tasks.arguments(**changes)]  # fmt: skip
    done = helpers.bertrain(*words, "--run", tmp_path / "two", "--nproc", 2, "--json")
    command_line(*words, "--run", tmp_path / "one")
    (outcome,) = json.loads(done.stdout)
    assert outcome["seeds"] == [1, 2]
    for seed in ("seed-1", "seed-2"):
        one, two = tmp_path / "one" / seed, tmp_path / "two" / seed
        assert helpers.losses(two) == pytest.approx(helpers.losses(one), rel=1e-5)
        assert metrics_of(two)["accuracy"] == metrics_of(one)["accuracy"]
        expected = helpers.final_weights(one)
        for name, tensor in helpers.final_weights(two).items():
            # Adam makes rounding as large as a gradient where there is none: the bias of a key.
            tolerance = 1e-2 if name.endswith("qkv.bias") else 1e-5
            assert helpers.relative_error(tensor, expected[name]) <= tolerance, name
        answers = [
            [json.loads(line)["label"] for line in (run / "predictions" / "test.jsonl").read_text().splitlines()]
            for run in (one, two)
        ]
        assert answers[0] == answers[1]
        assert len(answers[0]) == 30


def test_a_table_of_results_that_cannot_be_written_costs_no_run(mini: Miniature, tmp_path: Path) -> None:
    (tmp_path / "runs" / "results.json").mkdir(parents=True)
    done = command_line(
        "finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", tmp_path / "runs", "--max-steps", 1,
        "--seeds", "1,2", *tiny_tasks.arguments(),
    )  # fmt: skip
    assert done.err.count("results.json: Is a directory") == 2
    assert "(2 seeds)" in done.out
    assert metrics_of(tmp_path / "runs" / "seed-2")["examples"] == 60


def test_damaged_rows_are_named_or_counted(mini: Miniature, tuned: Path, tmp_path: Path) -> None:
    rows = (mini.table / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([*rows[:50], ",red", "bato bato,", *rows[50:]]) + "\n")
    (tmp_path / "dev.csv").write_text("text,label\nbato,red\nkese,purple\n")
    words = ["finetune", "classify", "--init", mini.base, "--data", tmp_path, "--run", tmp_path / "run",
             "--max-steps", 1, *tiny_tasks.arguments()]  # fmt: skip
    refused = command_line(*words, check=False)
    assert refused.code == 2
    assert "train.csv" in refused.err
    assert "51" in refused.err
    assert not (tmp_path / "run").exists()
    done = command_line(*words, "--on-error", "skip")
    assert re.search(r"train: .* 2 rows.* line \d+ of", done.out)
    assert re.search(r"dev: .* 1 row.* line \d+ of", done.out)
    shown = command_line("evaluate", tmp_path / "run", "--device", "cpu", "--json")
    assert json.loads(shown.out)["examples"] == 1
    assert re.search("dev: .* 1 row", shown.err)
    refused = command_line("evaluate", tuned, "--data", tmp_path, "--device", "cpu", check=False)
    assert refused.code == 2
    assert re.search(r"'purple'.* \[bad-row\]", refused.err)


BAD = {
    "no weights": (["finetune", "classify"], r"\[missing-init\]"),
    "nothing there": (["finetune", "classify", "--init", "nowhere"], "nowhere"),
    "a task by a slip": (["finetune", "clasify", "--init", "BASE"], r"'classify'.*\[unknown-task\]"),
    "another slip": (["finetune", "glue/sst", "--init", "BASE"], r"'glue/sst2'.*\[unknown-task\]"),
    "no data": (["finetune", "classify", "--init", "BASE", "--data", "nowhere"], "nowhere"),
    "other data": (["finetune", "xnli", "--init", "BASE"], "train.csv.*'premise'"),
    "no questions": (
        ["finetune", "squad/v1.1", "--init", "BASE", "--task.max_query_length", "8"],
        "train-v1.1.json",
    ),
    "no GLUE": (["finetune", "glue", "--init", "BASE"], r"\[no-examples\]"),
    "no training": (["finetune", "classify", "--init", "BASE", "--data", "ONLY_DEV"], "train.csv"),
    "labels unknown": (
        ["finetune", "classify", "--init", "BASE", "--task.label", "text"], "line 2 of .*dev.csv",
    ),
    "no column": (["finetune", "classify", "--init", "BASE", "--task.label", "colour"], "--task.label"),
    "too long": (
        ["finetune", "classify", "--init", "BASE", "--data.max_seq_length", "128"],
        "data.max_seq_length 128 .*model.max_positions 64",
    ),
    "seeds": (["finetune", "classify", "--init", "BASE", "--seeds", "1,x"], "--seeds"),
    "a seed twice": (["finetune", "classify", "--init", "BASE", "--seeds", "1,1"], "--seeds"),
    "two lengths": (
        ["finetune", "classify", "--init", "BASE", "--budget", "5s", "--max-steps", "5"],
        r"\[conflicting-options\]",
    ),
    "two evaluations": (
        ["finetune", "classify", "--init", "BASE", "--evaluate.data", "x"], "evaluate.data",
    ),
    "other words": (
        ["finetune", "classify", "--init", "BASE", "--data.vocab", "VOCAB"], r"505.* 54.*\[other-vocabulary\]",
    ),
    "a taken place": (
        ["finetune", "classify", "--init", "BASE", "--run", "TUNED"], r"\[other-run\]",
    ),
    "another head": (
        ["finetune", "classify", "--init", "BASE", "--run", "TUNED", "--task.target", "number", "--data", "NUMBERS"],
        r"model.head \(regress here, classify there\).*\[other-run\]",
    ),
    "a recipe of a task": (
        ["pretrain", "finetune-glue", "--data", "DATA"], "`bertrain finetune glue/mnli`",
    ),
    "a recipe of a task, with weights": (
        ["pretrain", "contest-mnli-1x1", "--data", "DATA", "--init", "BASE", "--dry-run"], "task.name",
    ),
    "a task in pre-training": (
        ["pretrain", "bert-tiny", "--data", "DATA", "--task.name", "nonsense"], "task.name",
    ),
    "a head in pre-training": (
        ["pretrain", "bert-tiny", "--data", "DATA", "--model.head", "span"], "model.head span",
    ),
    "masks": (["fill-mask", "TUNED", "bato [MASK]"], "tuned"),
    "masks of others": (["fill-mask", "EXPORTED", "bato [MASK]"], "exported"),
    "predicting what?": (["predict", "BASE", "--data", "TABLE", "--out", "out"], r"\[no-task\]"),
    "scoring on what?": (["evaluate", "BASE"], "--data"),
    "a setting of tasks": (
        ["evaluate", "BASE", "--data", "DATA", "--task.n_best", "5"], "--task.n_best",
    ),
    "a part that shapes it": (["evaluate", "TUNED", "--task.target", "number"], "task.target"),
    "some of a task": (["evaluate", "TUNED", "--max-examples", "5"], "--max-examples"),
    "no best": (["evaluate", "TUNED", "--checkpoint", "best"], r"\[no-best-checkpoint\]"),
    "no step": (["evaluate", "TUNED", "--checkpoint", "7"], r"step 7.*: 2 \[unknown-checkpoint\]"),
    "a part that shapes": (["resume", "TUNED", "--train.epochs", "2"], "train.epochs"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence(mini: Miniature, tuned: Path, tmp_path: Path, what: str) -> None:
    words, sentence = BAD[what]
    (tmp_path / "dev-only").mkdir()
    (tmp_path / "dev-only" / "dev.csv").write_text("text,label\nbato,red\n")
    (tmp_path / "vocab.txt").write_text("\n".join([*helpers.SPECIAL, *map(str, range(500))]) + "\n")
    places = {
        "BASE": mini.base, "TUNED": tuned, "TABLE": mini.table, "NUMBERS": mini.numbers,
        "EXPORTED": mini.base.parent / "exported", "DATA": mini.base.parent / "data",
        "ONLY_DEV": tmp_path / "dev-only", "VOCAB": tmp_path / "vocab.txt",
    }  # fmt: skip
    given = [str(places.get(word, word)) for word in words]
    if given[0] == "finetune":
        given[2:2] = tiny_tasks.arguments()
        given += [] if "--data" in given else ["--data", str(mini.table)]
    if given[0] in ("finetune", "pretrain") and "--run" not in given:
        given += ["--run", str(tmp_path / "run")]
    before = sorted(tuned.rglob("*"))
    ended = command_line(*given, check=False)
    assert ended.code == 2, ended
    assert ended.err.startswith("bertrain: ")
    assert len(ended.err.splitlines()) == 1
    assert re.search(sentence, ended.err)
    assert not (tmp_path / "run").exists()
    assert sorted(tuned.rglob("*")) == before
