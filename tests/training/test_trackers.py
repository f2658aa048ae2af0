"""Trackers: the real MLflow with a store on disk, the real W&B offline, and TensorBoard; and what fails of them."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.resolve import from_dict, override
from bertrain.config.settings import Settings
from bertrain.run import trackers
from bertrain.training.start import preflight, pretrain, resume
from tests import helpers


def settings(names: str, **given: object) -> Settings:
    return helpers.tiny_settings(log__trackers=names, log__level="quiet", train__max_steps=6, **given)


def train_in_two_parts(tmp_path: Path, names: str) -> Path:
    """A run that stops after three of its six steps, and is resumed."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(settings(names, train__max_samples=72, evaluate__data=data, evaluate__max_examples=8), data, run)
    resume(run, {"train.max_samples": 0})
    assert len(helpers.losses(run)) == 6
    return run


def evaluated(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "evaluation"]


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of a test")
    return store


def test_mlflow_has_one_run_of_both_starts(tmp_path: Path, mlflow_store: str) -> None:
    from mlflow import MlflowClient

    run = train_in_two_parts(tmp_path, "mlflow")
    client = MlflowClient(mlflow_store)
    experiment = client.get_experiment_by_name("of a test")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == (run / "trackers" / "mlflow").read_text().strip()
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["train.max_steps"] == "6"
    assert found.data.params.keys() == settings("mlflow").dotted().keys()
    assert found.data.tags["run.checkpoints"] == str(run / "checkpoints")
    history = client.get_metric_history(found.info.run_id, "step/loss")
    assert [(point.step, point.value) for point in history] == list(enumerate(helpers.losses(run), start=1))
    history = client.get_metric_history(found.info.run_id, "evaluation/mlm_accuracy")
    assert [(point.step, point.value) for point in history] == [
        (one["step"], one["mlm_accuracy"]) for one in evaluated(run)
    ]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format, in blocks of 32 KiB, after 7 bytes of W&B's own."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:  # the end of a block is filled up
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_has_one_id_for_both_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train_in_two_parts(tmp_path, "wandb,tensorboard")
    wandb.teardown()  # its own process may still hold the records when finish() returns, until it ends with ours
    known = (run / "trackers" / "wandb").read_text().strip()
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{known}.wandb"] * 2
    losses: dict[int, float] = {}
    accuracies: dict[int, float] = {}
    for path in files:
        for content in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                config = {one.key: json.loads(one.value_json) for one in record.run.config.update}
                assert record.run.run_id == known
                assert config["train.max_steps"] == "6"
                assert config["run.metrics"] == str(run / "metrics.jsonl")
            row = {
                "/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item
            }  # fmt: skip
            losses |= {row["step"]: row["step/loss"]} if "step/loss" in row else {}
            accuracies |= {row["step"]: row["evaluation/mlm_accuracy"]} if "evaluation/mlm_accuracy" in row else {}
    assert losses == dict(enumerate(helpers.losses(run), start=1))
    assert accuracies == {one["step"]: one["mlm_accuracy"] for one in evaluated(run)}
    assert list((run / "tensorboard").glob("events.*")), "beside another tracker"


def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's server is not there, W&B is not logged in, TensorBoard cannot write: a file has the folder's name."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name, value in {
        "MODE": "online",
        "API_KEY": "",
        "CONFIG_DIR": str(tmp_path),
        "BASE_URL": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(settings("none", train__max_samples=24), data, run)
    (run / "tensorboard").write_text("in the way")
    # In a process of its own: W&B remembers the mode of its first run.
    err = helpers.bertrain("resume", run, "--max-samples", 0, "--log.trackers", "tensorboard,mlflow,wandb").stderr
    assert len(helpers.losses(run)) == 6
    for name in ("tensorboard", "mlflow", "wandb"):
        assert err.count(f"warning: the tracker {name} is left out") == 1, err


def test_a_server_that_never_answers_delays_nothing_but_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(trackers, "CLOSE_S", 0.5)
        pretrain(settings("mlflow"), helpers.make_data(tmp_path), tmp_path / "run")
    assert len(helpers.losses(tmp_path / "run")) == 6
    assert capfd.readouterr().err.count("the tracker mlflow is left out from here on (it has not finished") == 1


def test_a_tracker_far_behind_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(trackers, "MOST_WAITING", 3)
        thread = trackers.TrackerThread("mlflow", trackers.TrackedRun(tmp_path, 0, {}, {}))
        for step in range(10):
            thread.log([(step, {"step/loss": 1.0})])
        thread.close()
    assert capfd.readouterr().err.count("3 writes behind") == 1


def test_what_log_trackers_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings("mlflow, wandb").log.tracker_names() == ["mlflow", "wandb"]
    assert settings("auto").log.tracker_names() == ["tensorboard"]
    assert settings("none").log.tracker_names() == settings("").log.tracker_names() == []
    for names in ("tensorbord", "wandb,wandb", "wandb,", "auto,wandb"):
        with helpers.refused("invalid-value", names, "tensorboard, mlflow, wandb"):
            settings(names)
    with helpers.refused("renamed-setting", "log.trackers"):
        override(settings("none"), {"log.tensorboard": "true"})
    for former, now in ((True, "auto"), (False, "none")):
        old = settings("wandb").to_dict()
        old["log"] = {name: value for name, value in old["log"].items() if name != "trackers"} | {"tensorboard": former}
        assert from_dict(old).log.trackers == now, "a run of an older version"
    monkeypatch.setattr(trackers, "is_installed", lambda module: module != "wandb")
    data = helpers.make_data(tmp_path)
    with helpers.refused("missing-package", "bertrain[wandb]"):
        preflight(settings("mlflow,wandb"), data, tmp_path / "run")
    with helpers.refused("missing-package", "bertrain[wandb]"):
        pretrain(settings("wandb"), data, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "before anything is written"
