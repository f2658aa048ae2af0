"""`bertrain sweep`: real runs, several at once, that fail, are stopped and are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bertrain
from tests import helpers, miniature_tasks
from tests.launched import Launched, children, records
from tests.miniature_tasks import command_line

RATES = ("learning_rate=1e-3", "learning_rate=2e-3")


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> miniature_tasks.Miniature:
    return miniature_tasks.make_miniature(tmp_path_factory.mktemp("mini"))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a command, of which nothing is left after the test."""
    started: list[Launched] = []

    def start(*command: object) -> Launched:
        started.append(Launched(helpers.command(*command), tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def sweep(data: Path, out: Path, *more: object, **given: object) -> list[object]:
    grid = ["--grid", "optimizer.learning_rate=1e-3,2e-3"]
    return ["sweep", "bert-tiny", "--data", data, "--out", out, *grid, *more, *helpers.tiny_arguments(**given)]


def trains(run: Path) -> bool:
    path = run / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def test_a_task_with_a_run_that_fails(mini: miniature_tasks.Miniature, tmp_path: Path) -> None:
    """The others are ranked and compared; the same command tries the failed one again."""
    command = [
        "sweep", "classify", "--init", mini.base, "--data", mini.table, "--out", tmp_path / "out", "--grid",
        "optimizer.learning_rate=1e30,3e-3", "--seeds", "2", "--epochs", 1, "--train.max_skipped_steps", 2,
        *(word for key, value in miniature_tasks.QUICK.items() if key != "optimizer.learning_rate"
          for word in (f"--{key}", value)),
    ]  # fmt: skip
    done = command_line(*command, check=False)
    assert done.code == 2, done.err
    bad = [f"learning_rate=1e30,seed={seed}" for seed in (1, 2)]
    assert f"2 runs failed: {', '.join(sorted(bad))}" in done.err.replace(", ".join(reversed(bad)), ", ".join(bad))
    assert all(f"warning: {name} failed: the loss" in done.err for name in bad)
    assert "[failed-runs]" in done.err
    again = command_line(*command, "--json", check=False)
    assert again.code == 2
    found = json.loads(again.out)
    assert found["failed"].keys() == set(bad)
    assert found["metric"] == "accuracy"
    (point,) = found["points"]
    assert point["settings"] == {"optimizer.learning_rate": "3e-3"}
    assert point["mean"] == pytest.approx(sum(point["values"]) / 2)
    assert point["values"] == sorted(point["values"], reverse=True)
    (row,) = [line for line in done.out.splitlines() if line.startswith("3e-3")]
    assert f"{point['mean']:.2%} ± " in row
    assert all(len(line) <= 100 for line in done.out.splitlines() if str(tmp_path) not in line)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 runs" in page
    assert "learning_rate=3e-3,seed=1" in page
    assert bad[0] not in page


def test_killed_in_the_middle_it_continues_to_the_same_losses(launch: Callable[..., Launched], tmp_path: Path) -> None:
    data, out = helpers.make_data(tmp_path), tmp_path / "out"
    command = sweep(data, out, "--at-once", 2, "--deterministic", train__max_steps=60, checkpoint__every_steps=3)
    launched = launch(*command)
    saved = [out / name / "checkpoints" for name in RATES]
    launched.wait_until(lambda: any(list(place.glob("step-*")) for place in saved), "a run has saved")
    started = children(launched.process.pid)
    assert started
    refused = command_line(*command, check=False)
    assert "[already-running]" in refused.err
    launched.process.send_signal(signal.SIGKILL)
    launched.wait()
    other = command_line(*command, "--seeds", 2, check=False)
    assert other.code == 2
    assert "[other-request]" in other.err
    command_line(*command)
    assert not any(map(alive, started)), "the runs of the killed one ended with it"
    assert out.joinpath("report.html").is_file()
    assert sorted(json.loads((out / "sweep.json").read_text())["done"]) == sorted(RATES), (
        "some before the kill, perhaps"
    )
    rates = {name: float(name.partition("=")[2]) for name in RATES}
    for name, rate in rates.items():
        settings = helpers.tiny_settings(
            train__max_steps=60, optimizer__learning_rate=rate, train__deterministic=True, log__level="quiet"
        )
        bertrain.pretrain(settings, data, tmp_path / name)
        assert helpers.losses(out / name) == helpers.losses(tmp_path / name)


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 75)]
)
def test_a_signal_stops_every_run_after_its_step(
    launch: Callable[..., Launched], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    data, out = helpers.make_data(tmp_path), tmp_path / "out"
    command = sweep(data, out, "--at-once", 2, "--seeds", 3, train__max_steps=100_000)
    launched = launch(*command)
    runs = [out / f"{name},seed=1" for name in RATES]
    launched.wait_until(lambda: all(map(trains, runs)), "both runs train")
    started = children(launched.process.pid)
    os.kill(launched.process.pid, number)
    assert launched.wait() == code, launched.err
    assert not any(map(alive, started))
    assert "0 of 6 runs are done; the same command continues" in launched.err
    assert "failed" not in launched.err
    assert {path.name for path in out.iterdir() if path.name.startswith("learning")} == {run.name for run in runs}
    assert all(list((run / "checkpoints").glob("step-*")) for run in runs), "saved"


def test_a_run_that_somebody_kills_is_named_and_tried_again(launch: Callable[..., Launched], tmp_path: Path) -> None:
    data, out = helpers.make_data(tmp_path), tmp_path / "out"
    command = sweep(data, out, "--at-once", 1, train__max_steps=24, checkpoint__every_steps=3)
    launched = launch(*command)
    launched.wait_until(lambda: bool(list((out / RATES[0] / "checkpoints").glob("step-*"))), "the first run trains")
    (process,) = children(launched.process.pid)
    os.kill(process, signal.SIGKILL)
    assert launched.wait() == 2
    assert f"{RATES[0]} failed: " in launched.err
    assert "killed by SIGKILL" in launched.err
    assert f"{RATES[1]}: done, 1 of 2" in launched.out
    done = command_line(*command)
    assert "1 of them done; 1 at once" in done.out
    assert len(helpers.losses(out / RATES[0])) == 24


def test_the_table_without_evaluations_is_by_the_last_losses(tmp_path: Path) -> None:
    data, out = helpers.make_data(tmp_path), tmp_path / "out"
    settings = dict(zip((words := helpers.tiny_arguments(train__max_steps=3))[::2], words[1::2], strict=True))
    overrides = {key.removeprefix("--"): value for key, value in settings.items()}
    found = bertrain.sweep("bert-tiny", data, out, grid={"optimizer.learning_rate": [1e-5, 0.01]}, overrides=overrides)
    assert found.metric == "mlm_loss"
    last = {point.settings["optimizer.learning_rate"]: point.mean for point in found.points}
    assert [*last] == ["0.01", "1e-05"]
    for rate, loss in last.items():
        assert loss == pytest.approx(records(out / f"learning_rate={rate}")[-1]["mlm_loss"])
    assert not found.failed
    before = time.time_ns()
    assert bertrain.sweep(
        "bert-tiny", data, out, grid={"optimizer.learning_rate": [1e-5, 0.01]}, overrides=overrides
    ) == found  # fmt: skip
    assert (out / "learning_rate=0.01" / "metrics.jsonl").stat().st_mtime_ns < before, "nothing was trained again"
