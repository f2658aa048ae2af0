"""MLPerf experiments in miniature: their logs, and what the official checkers make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.mlperf.check import check_results
from bertrain.mlperf.experiment import (
    as_experiment,
    probe_initial_weights,
    run_experiment,
)
from bertrain.mlperf.log import Log, read_log
from bertrain.mlperf.run import experiment_recipe, run_experiments
from bertrain.mlperf.show import show_logs
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run
from bertrain.training.events import Events
from bertrain.training.start import pretrain
from bertrain.training.state import TrainState
from tests import helpers
from tests.miniature import make_miniature, miniature_settings

IN_ORDER = [
    "cache_clear",
    "init_start",
    "submission_benchmark",
    "submission_org",
    "submission_division",
    "submission_status",
    "submission_platform",
    "seed",
    "global_batch_size",
    "d_batch_size",
    "gradient_accumulation_steps",
    "max_predictions_per_seq",
    "opt_learning_rate_training_steps",
    "num_warmup_steps",
    "weights_initialization",
    "opt_base_learning_rate",
    "opt_lamb_epsilon",
    "opt_epsilon",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_lamb_weight_decay_rate",
    "opt_learning_rate_warmup_steps",
    "opt_lamb_learning_rate_decay_poly_power",
    "start_warmup_step",
    "init_stop",
    "run_start",
    "epoch_start",
    "block_start",
    "tracked_stats",
    "eval_start",
    "eval_stop",
    "eval_accuracy",
]
"""The keys of NVIDIA's logs in their order, up to the first accuracy, ranks and data files left out."""
AT_THE_END = ["block_stop", "epoch_stop", "train_samples", "eval_samples", "run_stop", "tracked_stats"]


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_miniature(tmp_path_factory.mktemp("miniature"))


def test_the_probe_knows_the_right_weights(miniature: Path, tmp_path: Path) -> None:
    trained = miniature_settings(miniature, checkpoint__enabled="true", train__max_steps=10, evaluate__every_samples=0)
    pretrain(trained, miniature / "train", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    (accuracy,) = [line["mlm_accuracy"] for line in lines if line["kind"] == "evaluation"]
    asked = miniature_settings(miniature, mlperf__probe_accuracy=accuracy, mlperf__probe_tolerance=1e-6)
    assert probe_initial_weights(asked, str(tmp_path / "run")) == pytest.approx(accuracy, abs=1e-9)
    wrong = miniature_settings(miniature, mlperf__probe_accuracy=accuracy + 0.003)
    with helpers.refused("wrong-initial-accuracy", f"{accuracy:.5f}", "held-out"):
        probe_initial_weights(wrong, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("given", "code", "named"),
    [
        ({"evaluate__data": "", "evaluate__every_samples": 0}, "missing-evaluation-data", "--evaluate.data"),
        ({"batch__sequences": 0, "batch__tokens": 900}, "missing-batch-size", "mlperf.global_batch_size"),
        ({"train__budget": "1m"}, "setting-not-for-mlperf", "train.budget"),
        ({"optimizer__name": "adamw", "mlperf__division": "closed"}, "not-closed-division", "adamw"),
        ({"schedule__decay": "cosine", "mlperf__division": "closed"}, "not-closed-division", "cosine"),
        ({"mlperf__probe_accuracy": 0.3}, "missing-init", "--mlperf.probe_accuracy 0"),
    ],
)
def test_what_no_experiment_can_be_made_of(
    miniature: Path, tmp_path: Path, given: dict[str, object], code: str, named: str
) -> None:
    with helpers.refused(code, named):
        run_experiments(miniature_settings(miniature, **given), miniature / "train", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experiments_of_other_settings_keep_to_their_folder(miniature: Path, tmp_path: Path) -> None:
    settings = as_experiment(miniature_settings(miniature))
    (tmp_path / "recipe.toml").write_text(experiment_recipe(settings, miniature / "train", ""))
    assert resolve(str(tmp_path / "recipe.toml")) == settings, "frozen, and the same when it is read again"
    other = miniature_settings(miniature, optimizer__learning_rate=0.01)
    with helpers.refused("other-experiments", tmp_path / "recipe.toml"):
        run_experiments(other, miniature / "train", tmp_path)
    with helpers.refused("folder-exists", miniature):
        run_experiments(other, miniature / "train", miniature)


class Diary(Events):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def building(self, settings: Settings, state: TrainState, loader: Loader) -> None:
        self.told.append("building")

    def starting(self) -> None:
        self.told.append("starting")

    def evaluating(self, samples: int) -> None:
        self.told.append(("evaluating", samples))

    def evaluated(self, samples: int, result: dict[str, float]) -> None:
        self.told.append(("evaluated", samples))

    def ended(self, progress: Progress, reason: str) -> None:
        self.told.append((progress.samples, reason))


def test_the_trainer_tells_what_happens(miniature: Path, tmp_path: Path) -> None:
    diary = Diary()
    settings = miniature_settings(miniature, train__max_steps=3, evaluate__every_samples=64)
    pretrain(settings, miniature / "train", tmp_path / "run", events=diary)
    evaluations = [(what, samples) for samples in (64, 96) for what in ("evaluating", "evaluated")]
    assert diary.told == ["building", "starting", *evaluations, (96, "all 3 steps are done")]


def test_a_seed_from_the_systems_entropy_is_another_each_time_and_kept(miniature: Path, tmp_path: Path) -> None:
    settings = miniature_settings(miniature, train__max_steps=2, train__seed=-1, checkpoint__enabled="true")
    for name in ("one", "other"):
        pretrain(settings, miniature / "train", tmp_path / name)
    seeds = [Run.open(tmp_path / name).settings.train.seed for name in ("one", "other")]
    assert min(seeds) >= 0
    assert seeds[0] != seeds[1]
    pretrain(settings, miniature / "train", tmp_path / "one")
    assert Run.open(tmp_path / "one").settings.train.seed == seeds[0]


@pytest.fixture(scope="module")
def converged(miniature: Path) -> Path:
    """A folder with one experiment, which has converged; its steps are measured in tokens."""
    settings = miniature_settings(
        miniature,
        mlperf__division="closed",
        mlperf__organization="Miniature",
        mlperf__global_batch_size=32,
        batch__sequences=0,
        batch__tokens=880,
    )
    assert run_experiment(settings, miniature / "train", miniature / "converged")
    return miniature / "converged"


def values(log: Log) -> dict[str, Any]:
    return {entry.key: entry.value for entry in reversed(log.entries)}


def test_keys_come_in_the_published_order(converged: Path) -> None:
    log = read_log(converged / "result_0.txt")
    keys = list(dict.fromkeys(entry.key for entry in log.entries))
    assert [key for key in keys if key in IN_ORDER] == IN_ORDER
    assert [entry.key for entry in log.entries[-len(AT_THE_END) :]] == AT_THE_END
    assert len(log.all("weights_initialization")) == 2 * 16 + 14


def test_the_log_says_what_happened(converged: Path) -> None:
    """The batch is nominal, the samples are those of the run, the accuracy is that of its metrics."""
    log, run = read_log(converged / "result_0.txt"), Run.open(converged / "experiments" / "0-1" / "run")
    said = values(log)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert said["seed"] == run.settings.train.seed >= 0
    assert said["global_batch_size"] == 32
    assert said["train_samples"] == evaluations[-1]["samples"]
    steps = [line for line in lines if line["kind"] == "step"]
    assert any(step["samples"] % 32 for step in steps), "tokens fill a step, whatever the number of sequences"
    assert [entry.value for entry in log.all("eval_accuracy")] == [line["mlm_accuracy"] for line in evaluations]
    assert [entry.metadata["epoch_num"] for entry in log.all("eval_accuracy")] == [
        line["samples"] for line in evaluations
    ]
    assert said["eval_samples"] == evaluations[-1]["examples"]
    assert log.status == "success"
    assert evaluations[-1]["mlm_accuracy"] >= 0.72 > evaluations[-2]["mlm_accuracy"]
    assert said["cache_clear"] is False
    assert log.all("cache_clear")[0].metadata["reason"] == "mlperf.clear_cache is false"


@pytest.mark.parametrize("division", ["closed", "open"])
def test_the_official_checker_passes_it(converged: Path, division: str) -> None:
    checked = check_results(converged, division=division)  # type: ignore[arg-type]
    assert [one.passes for one in checked.compliance] == [True, True], checked.compliance
    assert checked.seeds_pass
    assert checked.verdict[0] == "a submission needs 10 results; there are 1"


def test_show_takes_it(converged: Path) -> None:
    (figures,) = show_logs([converged / "result_0.txt"])
    assert figures.has_converged
    assert figures.ranks == 1
    assert figures.organization == "Miniature"
    assert figures.evaluations[-1].samples == figures.train_samples


def test_a_result_is_not_written_over(converged: Path, miniature: Path) -> None:
    settings = miniature_settings(miniature)
    with helpers.refused("result-exists", "result_0.txt"):
        run_experiment(settings, miniature / "train", converged, attempt=2)
    (converged / "experiments" / "7-1").mkdir()
    with helpers.refused("result-exists", "7-1"):
        run_experiment(settings, miniature / "train", converged, number=7)


def test_a_run_that_does_not_converge_is_reported_as_such(miniature: Path, tmp_path: Path) -> None:
    settings = miniature_settings(miniature, train__max_steps=3)
    assert not run_experiment(settings, miniature / "train", tmp_path / "out")
    log = read_log(tmp_path / "out" / "result_0.txt")
    assert log.status == "aborted"
    assert log.all("run_stop")[0].metadata["reason"] == "all 3 steps are done"
    assert values(log)["train_samples"] == 96
    assert all(one.passes for one in check_results(tmp_path / "out").compliance), "an open log may fail to converge"
    as_closed = check_results(tmp_path / "out", division="closed")
    assert not any(one.passes for one in as_closed.compliance)
    assert any("v['value'] >= 0.720" in complaint for complaint in as_closed.compliance[0].complaints)


def test_a_run_that_diverges_is_one_that_does_not_converge(
    miniature: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = miniature_settings(
        miniature, optimizer__learning_rate=1e30, train__max_skipped_steps=2, log__every_steps=1
    )
    assert not run_experiment(settings, miniature / "train", tmp_path / "out")
    assert "experiment 0 diverged: " in capsys.readouterr().out
    log = read_log(tmp_path / "out" / "result_0.txt")
    assert log.status == "aborted"
    assert values(log)["train_samples"] == 3 * 32
