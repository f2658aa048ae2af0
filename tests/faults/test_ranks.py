"""What can befall one rank of several: it hangs, is slow, gets a signal, computes nonsense. All of it for real."""

from __future__ import annotations

import math
import os
import platform
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bertrain.base.errors import EXIT_REQUEUE
from bertrain.base.logs import logs
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.reports.watch import look
from bertrain.run import checkpoint
from bertrain.training.start import pretrain
from tests import helpers
from tests.launched import Launched, records

HOST = platform.node()
ROOT = Path(__file__).parents[2]  # the ranks import what this file does to them


def start(folder: Path, *more: object, python_path: Path | None = None, **settings: object) -> tuple[Launched, Path]:
    """Two ranks at work."""
    data, run = helpers.make_data(folder), folder / "run"
    arguments = helpers.tiny_arguments(**{"train__max_steps": 100000} | settings)
    command = helpers.command("pretrain", "bert-tiny", "--data", data, "--run", run, "--nproc", 2, *arguments, *more)
    path = os.pathsep.join(str(part) for part in (python_path, ROOT, os.environ.get("PYTHONPATH")) if part)
    return Launched(command, folder, PYTHONPATH=path), run


def test_a_rank_that_hangs_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    """One rank is stopped, as a dead disk or a broken device stops it; before that all are, as Ctrl-Z stops them."""
    timeout_s = 5
    settings = {"checkpoint__every_steps": 5, "log__every_steps": 1, "train__hang_timeout": f"{timeout_s}s"}
    launched, run = start(tmp_path, "--restarts", 1, **settings)
    try:
        launched.wait_until(lambda: len(records(run)) > 5, "the first checkpoint")
        ranks = launched.ranks()
        for number, pause in ((signal.SIGSTOP, timeout_s + 1), (signal.SIGCONT, 0)):
            for process in ranks.values():
                os.kill(process, number)
            time.sleep(pause)
        done = len(records(run))
        launched.wait_until(lambda: len(records(run)) > done, "going on together")
        assert launched.err == ""
        assert look(run)["state"] == "running"

        os.kill(ranks[1], signal.SIGSTOP)
        launched.wait_until(lambda: "training continued" in launched.err, "going on without hanging")
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait() == EXIT_REQUEUE
    finally:
        launched.kill()
    said, again, went_on, stopped = launched.err.splitlines()
    place = r"(data|forward and backward|sum over ranks|update|reading results|agreeing on what comes next|saving)"
    assert re.fullmatch(
        rf"bertrain: rank 1 on host {HOST} has not moved, nor answered, since step \d+, in {place}; "
        rf"the others wait for it \(nothing moved for {timeout_s}s, train\.hang_timeout\)",
        said,
    )
    assert again == "bertrain: a rank hung; starting all ranks again (1 of 1 without a new checkpoint)"
    assert re.fullmatch(r"bertrain: training continued at step \d+, [\d.]+ s after a rank hung", went_on)
    assert "stopped by SIGTERM" in stopped
    helpers.losses(run)  # each step once, in order

    entries = list(logs(run, level="warning"))
    told = {rank: [entry["event"] for entry in entries if entry["rank"] == rank] for rank in (0, 1)}
    assert told == {0: ["hang", "restart", "stop"], 1: ["restart", "stop"]}, "whose process was stopped said nothing"
    assert entries[0]["text"] == said.removeprefix("bertrain: ")
    seen = look(run)
    assert (seen["state"], seen["starts"], len(seen["ranks"])) == ("stopped", 2, 2)
    assert seen["why"] == stopped.removeprefix("bertrain: ").removesuffix(" [stopped-by-signal]")


@pytest.mark.parametrize("to_one_rank", [False, True])
def test_a_signal_to_launcher_or_rank_saves_once_and_asks_to_be_requeued(tmp_path: Path, to_one_rank: bool) -> None:
    """SIGUSR1 to the launcher, or SIGTERM to a rank: not taken for a failure, whatever restarts are left."""
    launched, run = start(tmp_path, "--restarts", 3, checkpoint__every_steps=0, log__every_steps=1)
    try:
        launched.wait_until(lambda: len(records(run)) > 2, "some steps")
        if to_one_rank:
            os.kill(launched.ranks()[1], signal.SIGTERM)
        else:
            os.kill(launched.process.pid, signal.SIGUSR1)
        assert launched.wait() == EXIT_REQUEUE
    finally:
        launched.kill()
    (saved,) = checkpoint.whole_checkpoints(run / "checkpoints")
    step = checkpoint.read_progress(saved).step
    name = "a signal to another rank" if to_one_rank else "SIGUSR1"
    lines = [line for line in launched.err.splitlines() if not line.startswith("warning:")]  # of busy cores
    assert len(lines) == 1, launched.err
    (line,) = lines
    assert line.startswith(f"bertrain: stopped by {name} after step {step}, ")
    assert line.endswith(f"`bertrain resume {run}` [stopped-by-signal]")
    assert len(helpers.losses(run)) == step


POISON = """
import os
if os.environ.get("RANK") == "1":
    from tests.faults.test_ranks import poison
    poison(bins_per_step=1)
"""


def is_poisoned(step: int) -> bool:
    return step == 5 or step >= 9


def poison(bins_per_step: int) -> Any:
    """Have the second bin of a step give NaN where `is_poisoned`; it is the only one of the second of two ranks."""
    calls = [-2]  # the two of the warm-up

    def spoil(module: torch.nn.Module, _: Any, outputs: Any) -> Any:
        if type(module).__name__ != "Bert":
            return None
        step, bin = divmod(calls[0], bins_per_step)
        calls[0] += 1
        is_second = bin == min(1, bins_per_step - 1)
        if not (is_second and is_poisoned(step + 1)):
            return None
        return replace(outputs, mlm_logits=outputs.mlm_logits * math.nan)

    return torch.nn.modules.module.register_module_forward_hook(spoil)


def test_nonsense_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    """Two ranks, the second of which gives NaN, against one that computes the same."""
    settings = {
        "batch__token_budget": 520, "log__every_steps": 1, "train__max_skipped_steps": 3, "train__max_steps": 100,
    }  # fmt: skip
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(POISON)
    launched, run = start(tmp_path, python_path=tmp_path / "hook", **settings)
    try:
        assert launched.wait() == 2
    finally:
        launched.kill()
    assert len(launched.err.splitlines()) == 1
    assert "in 3 steps in a row, the last of them step 11" in launched.err
    assert "[diverged]" in launched.err

    alone, loader = tmp_path / "alone", Loader(Shards.open(tmp_path / "data"), helpers.tiny_settings(**settings))
    assert all(loader.step(number, 24 * number).num_bins == 3 for number in range(11)), (
        "one for the second of two ranks"
    )
    hook = poison(bins_per_step=3)
    try:
        with helpers.refused("diverged", "step 11"):
            pretrain(helpers.tiny_settings(**settings), tmp_path / "data", alone)
    finally:
        hook.remove()
    for record, expected in zip(records(run), records(alone), strict=True):
        assert record["applied"] is expected["applied"] is not is_poisoned(record["step"])
        if record["applied"]:
            assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    """The second rank is stopped for most of the time, a little at a time."""
    launched, run = start(tmp_path, log__every_steps=4)
    is_over = threading.Event()

    def hold_back(process: int) -> None:
        while not is_over.wait(0.02):
            os.kill(process, signal.SIGSTOP)
            is_over.wait(0.1)
            os.kill(process, signal.SIGCONT)

    brake = threading.Thread(target=lambda: hold_back(launched.ranks()[1]), daemon=True)
    try:
        launched.wait_until(lambda: len(records(run)) >= 4, "the first log line")
        brake.start()
        launched.wait_until(lambda: "warning" in launched.err, "a warning")
        is_over.set()
        brake.join()
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait() == EXIT_REQUEUE
    finally:
        is_over.set()
        launched.kill()
    warning = launched.err.splitlines()[0]
    assert re.match(rf"warning: rank 1 on host {HOST} takes [\d.]+ times as long per token as the median", warning)

    told = records(run, "ranks")
    assert [record["step"] for record in told] == list(range(4, 4 * len(told) + 1, 4))
    by_step = {record["step"]: record for record in records(run)}
    for record in told:
        first, second = record["ranks"]
        assert (first["rank"], second["rank"], first["host"], second["host"]) == (0, 1, HOST, HOST)
        steps = [by_step[step] for step in range(record["step"] - 3, record["step"] + 1)]
        assert first["tokens"] + second["tokens"] == pytest.approx(sum(step["tokens"] for step in steps) / 4)
        for phase, seconds in first["seconds"].items():
            assert seconds == pytest.approx(sum(step["seconds"][phase] for step in steps) / 4)
    waited = [sum(record["ranks"][rank]["seconds"]["reduction"] for record in told[-3:]) for rank in (0, 1)]
    assert waited[0] > waited[1], "it is the quick rank that waits"
