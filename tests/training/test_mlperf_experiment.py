"""MLPerf experiments in miniature, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.mlperf.experiment import (
    as_experiment,
    probe_initial_weights,
)
from bertrain.mlperf.run import experiment_recipe, run_experiments
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run
from bertrain.training.events import Events
from bertrain.training.start import pretrain
from bertrain.training.state import TrainState
from tests import helpers
from tests.miniature import make_miniature, miniature_settings


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
