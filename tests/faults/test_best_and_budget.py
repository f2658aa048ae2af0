"""Killed for real around what is decided once: the best checkpoint, and the lengths that a budget is given."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress, Saver, Snapshot
from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.launched import kill_when


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else {}


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    every = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if line["kind"] == kind]


def test_killed_after_the_budget_was_fitted_it_goes_on_with_the_same_fits(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    asked = {"batch__sequences": 8, "checkpoint__every_steps": 7, "train__deterministic": True}
    kill_when(
        lambda: (run / "checkpoints" / "step-00000007").is_dir(),
        "pretrain", "bert-tiny", "--data", data, "--run", run, "--budget", "20m", *helpers.tiny_arguments(**asked),
    )  # fmt: skip
    fits = read(run / "config.json")["settings"]["train"]["fits"]
    # The same command again, in this process; so that it ends soon, a limit that does not shape the training.
    again = helpers.tiny_settings(**asked, train__budget="20m", train__max_samples=32 * 8)
    assert pretrain(again, data, run).step == 32
    later = read(run / "config.json")["settings"]["train"]["fits"]
    assert f"{later},".startswith(f"{fits},")
    lengths = {int(step): int(last) for step, last in (fit.split(":") for fit in later.split(","))}
    first = min(lengths)
    rates = [line["learning_rate"] for line in lines(run, "step")]
    assert rates[:first] == [0.0, 5e-4, 1e-3, 1e-3][:first]
    for step in range(max(2, first), 32):
        length = lengths[max(fitted for fitted in lengths if fitted <= step)]
        assert rates[step] == 1e-3 * (1 - step / length)
    assert lines(run, "end")[0]["reason"] == "train.max_samples 256 is reached"
    with helpers.refused("other-run", "train.budget (10m here, 20m there)"):
        pretrain(helpers.tiny_settings(**asked, train__budget="10m"), data, run)


def test_killed_while_the_best_is_kept_it_is_still_the_best(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    asked = {
        "batch__sequences": 8, "train__max_steps": 14, "train__deterministic": True, "optimizer__learning_rate": 0.05,
        "evaluate__data": data, "evaluate__every_samples": 8, "evaluate__max_examples": 40,
        "checkpoint__keep_best": True, "checkpoint__every_steps": 1, "checkpoint__keep": 2,
    }  # fmt: skip
    kill_when(
        lambda: len(list((run / "checkpoints").glob("step-*"))) >= 2 and (run / "checkpoints" / "best.json").is_file(),
        "pretrain", "bert-tiny", "--data", data, "--run", run, *helpers.tiny_arguments(**asked),
    )  # fmt: skip
    pretrain(helpers.tiny_settings(**asked), data, run)
    pretrain(helpers.tiny_settings(**asked), data, tmp_path / "calm")
    assert lines(run, "evaluation") == lines(tmp_path / "calm", "evaluation")
    best = max(lines(run, "evaluation"), key=lambda line: line["mlm_accuracy"])
    for folder in (run / "checkpoints", tmp_path / "calm" / "checkpoints"):
        assert read(folder / "best.json") == {"step": best["step"], "figure": best["mlm_accuracy"]}
        kept = {checkpoint.step_of(path) for path in checkpoint.whole_checkpoints(folder)}
        assert kept == {best["step"], 13, 14}
        assert checkpoint.find_damage(checkpoint.find_step(folder, best["step"])) is None


def snapshot(step: int, best_step: int) -> Snapshot:
    progress = Progress(step, 10 * step, best_step=best_step, best_accuracy=0.1 * best_step)
    return Snapshot({"w": torch.full((4, 4), float(step))}, {"m": torch.zeros(4)}, progress)


def test_the_best_is_never_purged_and_a_lost_one_is_said(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2, keep_best=True)
    for step in range(1, 7):
        saver.save(snapshot(step, best_step=min(step, 2)))
        saver.wait()
        assert saver.failure is None
    assert [path.name for path in checkpoint.whole_checkpoints(tmp_path)] == [
        "step-00000002",
        "step-00000005",
        "step-00000006",
    ]
    newest = checkpoint.read_progress(tmp_path / "step-00000006")
    assert checkpoint.settle_best(tmp_path, newest) == (True, "")
    shutil.rmtree(tmp_path / "step-00000002")
    is_there, warning = checkpoint.settle_best(tmp_path, newest)
    assert not is_there
    assert warning.startswith("the best checkpoint, of step 2, is lost (manifest.json is missing)")
    assert checkpoint.read_best(tmp_path) is None


def test_a_signal_where_nothing_is_saved_loses_the_run_and_says_so(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"

    def send_when_it_trains() -> None:
        while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_when_it_trains, daemon=True).start()
    settings = helpers.tiny_settings(train__max_steps=100000, checkpoint__enabled=False, log__every_steps=1)
    with helpers.refused("stopped-by-signal", "SIGTERM", "checkpoint.enabled false"):
        pretrain(settings, data, run)
    assert not (run / "checkpoints").exists()


def test_two_ranks_agree_on_a_budget_and_on_the_clock(tmp_path: Path) -> None:
    """What one clock asks for is done by both, or one would wait for the other for ever."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    arguments = helpers.tiny_arguments(
        batch__sequences=8, evaluate__data=data, evaluate__max_examples=16, checkpoint__every_minutes=0.001,
        checkpoint__keep_best=True, checkpoint__keep=50, train__max_samples=30 * 8,
    )  # fmt: skip
    start = ["pretrain", "bert-tiny", "--data", data, "--run", run, "--nproc", 2, *arguments]
    helpers.bertrain(*start, "--budget", "20m")
    assert [line["step"] for line in lines(run, "evaluation")] == [30], "at the end"
    assert read(run / "config.json")["settings"]["train"]["fits"]
    assert len(checkpoint.whole_checkpoints(run / "checkpoints")) > 2, "by minutes"
    resume(run, [("train.max_samples", "0"), ("train.max_time", "0.001s")])
    assert lines(run, "end")[0]["reason"] == "train.max_time 0.001s is over"


def test_bad_words_about_limits_are_refused_in_a_sentence(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    start = ["pretrain", "bert-tiny", "--data", data, "--run", tmp_path / "run", *helpers.tiny_arguments()]
    done = helpers.bertrain(*start, "--budget", "soon", check=False)
    assert done.returncode == 2
    assert "[invalid-duration]" in done.stderr
    assert not (tmp_path / "run").exists()
