"""One experiment: the log it writes, and what the official checkers make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bertrain.cli.main import app
from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import resolve
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.block import Block
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.source import DataSource, open_data
from bertrain.mlperf import experiment
from bertrain.mlperf.experiment import (
    as_experiment,
    clear_page_cache,
    hyperparameters,
    tensor_names,
)
from bertrain.mlperf.log import read_log
from bertrain.planning.convergence import mlperf_interval
from tests import helpers
from tests.miniature import make_miniature, miniature_settings


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_miniature(tmp_path_factory.mktemp("miniature"))


def test_the_big_model_has_as_many_tensors_as_in_every_published_log() -> None:
    names = tensor_names(resolve("mlperf-nvidia-1x8x48-packed"))
    assert len(names) == len(set(names)) == 398
    assert "bert/encoder/layer_23/attention/self/query/kernel" in names


@pytest.mark.skipif(not (helpers.SHARED / "golden").is_dir(), reason="the published logs are not here (shared/golden)")
def test_tensors_have_the_published_names() -> None:
    published = read_log(helpers.SHARED / "golden" / "mlperf-logs" / "nvidia-h200x8-v4.0" / "result_0.txt")
    theirs = {entry.metadata["tensor"] for entry in published.all("weights_initialization")}
    assert set(tensor_names(resolve("mlperf-nvidia-1x8x48-packed"))) == theirs


def test_the_page_cache_is_dropped_where_that_is_permitted(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own switch is left alone here: others use this machine."""
    settings = miniature_settings(miniature, mlperf__clear_cache="true")
    monkeypatch.setattr(experiment, "DROP_CACHES", tmp_path / "drop_caches")
    assert clear_page_cache(settings) == (True, "")
    assert (tmp_path / "drop_caches").read_text() == "3\n"
    monkeypatch.setattr(experiment, "DROP_CACHES", tmp_path / "absent" / "drop_caches")
    assert clear_page_cache(settings) == (False, "not permitted: No such file or directory")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not clear_page_cache(settings)[0]


def test_parts_that_there_are_not(miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["mlperf", "run", "bert-tiny", "--data", str(miniature / "train"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*command, "--only", "all"])
    assert str(done.exception) == "--only is 'all'; give the number of an experiment, or probe"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = CliRunner().invoke(app, command)
    assert str(done.exception) == "under torchrun, ranks run one experiment at a time; choose it with --only N"


def test_the_log_names_the_schedule_that_is_followed(miniature: Path) -> None:
    def logged(**given: object) -> dict[str, object]:
        return dict(hyperparameters(miniature_settings(miniature, train__max_steps=700, **given)))

    followed = logged(schedule__warmup_steps=0, schedule__warmup_share=0.1, schedule__decay="square-root")
    assert followed["opt_learning_rate_warmup_steps"] == 70
    assert followed["opt_lamb_learning_rate_decay_poly_power"] == 0.5
    assert logged(schedule__power=0.7)["opt_lamb_learning_rate_decay_poly_power"] == 0.7


def test_nominal_sizes_that_contradict(miniature: Path) -> None:
    with helpers.refused("conflicting-settings", "mlperf.global_batch_size 768", "batch.sequences 32"):
        miniature_settings(miniature, mlperf__global_batch_size=768)


def test_mlperfs_target_and_rule_are_taken_where_none_are_given(miniature: Path) -> None:
    settings = as_experiment(miniature_settings(miniature, evaluate__every_samples=0))
    assert settings.evaluate.target_accuracy == 0.720
    assert settings.evaluate.rule == "mlperf"
    given = as_experiment(miniature_settings(miniature, evaluate__target_accuracy=0.5))
    assert (given.evaluate.target_accuracy, given.evaluate.rule) == (0.5, "every")


# --- recipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("mlperf-")])
def test_recipes_of_published_configurations_make_experiments(name: str, tmp_path: Path) -> None:
    settings = as_experiment(resolve(name, [("evaluate.data", str(tmp_path))]))
    assert settings.mlperf.probe_accuracy == 0.34085
    assert not settings.checkpoint.enabled
    assert (settings.data.max_seq_length, settings.data.max_predictions) == (512, 76)
    assert settings.mlperf.division == ("open" if "samsung" in name or name.endswith("-open") else "closed")
    assert settings.optimizer.name == ("adamw" if "samsung" in name else "lamb")


@pytest.mark.parametrize(
    ("name", "batch", "interval"),
    [
        ("mlperf-nvidia-1x8x48-packed", 768, 150_000),
        ("mlperf-nvidia-8x8x36-packed", 4608, 200_000),
        ("mlperf-nvidia-434x8x2-packed", 13_888, 300_000),
        ("mlperf-samsung-128x8x16", 16_384, 325_000),
        ("mlperf-intel-8x4x64", 2048, 150_000),
        ("mlperf-intel-16x4x48", 3072, 175_000),
    ],
)
def test_recipes_evaluate_when_the_published_ones_did(name: str, batch: int, interval: int) -> None:
    settings = resolve(name)
    assert settings.nominal_sequences == batch
    assert mlperf_interval(settings.nominal_sequences) == interval


@pytest.mark.parametrize("size", [256, 448, 1536, 3072, 4096, 4608, 6144, 6912, 8192, 8704, 12288, 13056, 16384])
def test_the_references_recipes_are_the_librarys_own_points(size: int) -> None:
    import mlperf_logging

    table = Path(mlperf_logging.__path__[0]) / "rcp_checker" / "training_5.0.0" / "rcps_bert.json"
    (point,) = [point for point in json.loads(table.read_text()).values() if point["BS"] == size]
    theirs, ours = point["Hyperparams"], resolve(f"mlperf-reference-{size}")
    assert ours.batch.sequences == size
    assert ours.optimizer.learning_rate == theirs["opt_base_learning_rate"]
    assert ours.optimizer.epsilon == theirs["opt_epsilon"]
    assert ours.train.max_steps == theirs["opt_learning_rate_training_steps"]
    assert ours.schedule.warmup_steps == theirs["num_warmup_steps"]
    assert ours.schedule.start_warmup_step == theirs["start_warmup_step"]
    assert (ours.optimizer.beta1, ours.optimizer.beta2) == (theirs["opt_lamb_beta_1"], theirs["opt_lamb_beta_2"])
    assert ours.optimizer.weight_decay == theirs["opt_lamb_weight_decay_rate"]


class Sealed:
    """Data whose sizes can be read, and nothing else once it is sealed."""

    def __init__(self, opened: DataSource) -> None:
        self._opened, self.is_sealed = opened, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __len__(self) -> int:
        return len(self._opened)

    def read(self, rows: Ints) -> Block:
        assert not self.is_sealed, "an example was read"
        return self._opened.read(rows)


def test_a_rehearsal_has_the_sizes_of_the_step_and_reads_no_example(miniature: Path) -> None:
    data = Sealed(open_data(miniature / "train"))
    loader = Loader(data, miniature_settings(miniature))
    real = loader.step(0, 0)
    data.is_sealed = True
    rehearsed = loader.rehearsal(0, 0)
    assert rehearsed.num_tokens == real.num_tokens
    assert rehearsed.num_predictions == real.num_predictions
    for ours, theirs in zip(rehearsed.bins, real.bins, strict=True):
        assert ours.sequence_lengths == theirs.sequence_lengths
        assert ours.num_predictions == theirs.num_predictions
        assert ours.input_ids.shape == theirs.input_ids.shape
        assert len(np.unique(ours.mlm_labels[: ours.num_predictions])) == 1
