"""Killed for real around what is decided once: the best checkpoint, and the lengths that a budget is given."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bertrain.base.errors import RequeueError
from bertrain.ranks.signals import StopSignal
from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress, Saver, Snapshot
from bertrain.run.folder import Run
from bertrain.training.evaluate import HeldOutEvaluator
from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.launched import kill_when
from tests.miniature_tasks import command_line


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else {}


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    every = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if line["kind"] == kind]


def test_killed_after_the_budget_was_fitted_it_goes_on_with_the_same_fits(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    asked = {"batch__sequences": 8, "checkpoint__every_steps": 7, "train__deterministic": True}

    def fits_so_far() -> str:
        return read(run / "config.json")["settings"]["train"]["fits"] if (run / "config.json").is_file() else ""

    kill_when(
        lambda: fits_so_far() and checkpoint.whole_checkpoints(run / "checkpoints"),
        "pretrain", "bert-tiny", "--data", data, "--run", run, "--budget", "20m", *helpers.tiny_arguments(**asked),
    )  # fmt: skip
    fits, saved = fits_so_far(), checkpoint.whole_checkpoints(run / "checkpoints")
    # The same command again, in this process; so that it ends soon, a limit that does not shape the training.
    last = checkpoint.step_of(saved[0]) + 25
    again = helpers.tiny_settings(**asked, train__budget="20m", train__max_samples=last * 8)
    assert pretrain(again, data, run).step == last
    later = fits_so_far()
    assert f"{later},".startswith(f"{fits},")
    lengths = {int(step): int(last) for step, last in (fit.split(":") for fit in later.split(","))}
    first = min(lengths)
    rates = [line["learning_rate"] for line in lines(run, "step")]
    assert rates[:first] == [0.0, 5e-4, *[1e-3] * last][:first]
    for step in range(max(2, first), last):
        length = lengths[max(fitted for fitted in lengths if fitted <= step)]
        assert rates[step] == 1e-3 * (1 - step / length)
    assert lines(run, "end")[0]["reason"] == f"train.max_samples {last * 8:,} is reached"
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
    assert checkpoint.reconcile_best(tmp_path, newest) == ""
    assert checkpoint.with_best(tmp_path, newest) == newest
    shutil.rmtree(tmp_path / "step-00000002")
    warning = checkpoint.reconcile_best(tmp_path, newest)
    assert warning.startswith("the best checkpoint, of step 2, is lost (manifest.json is missing)")
    assert checkpoint.read_best(tmp_path) is None
    assert checkpoint.with_best(tmp_path, newest).best_step == 0


def test_a_best_that_was_evaluated_after_it_was_saved_stays(tmp_path: Path) -> None:
    """A signal ended the last evaluation, which was made up for when the run was resumed."""
    for step in (2, 4):
        checkpoint.write_checkpoint(tmp_path, snapshot(step, best_step=2))
    checkpoint.write_best(tmp_path, Progress(4, 40, best_step=4, best_accuracy=0.4))
    newest = checkpoint.read_progress(tmp_path / "step-00000004")
    assert checkpoint.reconcile_best(tmp_path, newest) == ""
    known = checkpoint.with_best(tmp_path, newest)
    assert (known.best_step, known.best_accuracy) == (4, 0.4), "a longer run must not replace it by a worse one"


def test_a_complete_run_whose_last_evaluation_was_stopped_is_judged_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    limits = {
        "train__max_steps": 4,
        "evaluate__data": data,
        "evaluate__every_samples": 48,
        "checkpoint__keep_best": True,
    }
    settings = helpers.tiny_settings(**limits, checkpoint__every_steps=2)
    whole = HeldOutEvaluator.evaluate
    evaluated = list[int]()

    def stopped_at_the_end(evaluator: HeldOutEvaluator, predict: Any, ranks: Any, stop: StopSignal) -> dict[str, float]:
        evaluated.append(1)
        if len(evaluated) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(evaluator, predict, ranks, stop)

    with monkeypatch.context() as patched:
        patched.setattr(HeldOutEvaluator, "evaluate", stopped_at_the_end)
        with pytest.raises(RequeueError):
            pretrain(settings, data, run)
    assert checkpoint.read_best(run / "checkpoints") == 2
    resume(run)
    scores = {one["step"]: one["mlm_accuracy"] for one in lines(run, "evaluation")}
    assert set(scores) == {2, 4}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert checkpoint.read_best(run / "checkpoints") == best
    resume(run)
    assert checkpoint.read_best(run / "checkpoints") == best


def test_a_disk_that_is_full_when_a_run_continues_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(train__max_samples=24), data, run)

    def full(self: Run, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "config.json"))

    monkeypatch.setattr(Run, "write_config", full)
    with helpers.refused("cannot-write", "config.json", "No space left", "bertrain resume"):
        resume(run, [("train.max_samples", "48")])


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
        checkpoint__keep_best=True, checkpoint__keep=50, train__max_samples=200 * 8,
    )  # fmt: skip
    start = ["pretrain", "bert-tiny", "--data", data, "--run", run, "--nproc", 2, *arguments]
    command_line(*start, "--budget", "1m")
    assert [line["step"] for line in lines(run, "evaluation")] == [200], "at the end"
    assert read(run / "config.json")["settings"]["train"]["fits"]
    assert len(checkpoint.whole_checkpoints(run / "checkpoints")) > 2, "by minutes"
    resume(run, [("train.max_samples", "0"), ("train.max_time", "0.001s")])
    assert lines(run, "end")[0]["reason"] == "train.max_time 0.001s is over"


def test_bad_words_about_limits_are_refused_in_a_sentence(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    start = ["pretrain", "bert-tiny", "--data", data, "--run", tmp_path / "run", *helpers.tiny_arguments()]
    done = command_line(*start, "--budget", "soon", check=False)
    assert done.code == 2
    assert "[invalid-duration]" in done.err
    assert not (tmp_path / "run").exists()
