"""Ctrl-C at any moment: acknowledged at once, nothing half-written, exit code 130, and how to go on."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from bertrain.run import checkpoint
from tests import helpers
from tests.launched import Launched, descendants
from tests.miniature_tasks import command_line

SWALLOWS = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.SIGINT)
    import time
    time.sleep(60)
except KeyboardInterrupt:
    print("swallowed", file=sys.stderr, flush=True)
"""
"""An import during which Ctrl-C is pressed, and that swallows it, as pyarrow's import of pandas does."""

IMPORTS_PANDAS = """
from bertrain.data.feed.loader import Loader
build = Loader.__init__
def import_pandas(self, *given, **named):
    import pandas
    build(self, *given, **named)
Loader.__init__ = import_pandas
"""


def start(folder: Path, *arguments: object, modules: Path | None = None) -> Launched:
    path = {"PYTHONPATH": f"{modules}:{Path(__file__).parents[2]}"} if modules else {}
    return Launched(helpers.command(*arguments), folder, **path)


def pretrain(data: Path, run: Path, **given: object) -> list[object]:
    return ["pretrain", "bert-tiny", "--data", data, "--run", run, *helpers.tiny_arguments(**given)]


def test_an_interrupt_that_an_import_swallowed_still_stops_the_run(tmp_path: Path) -> None:
    data, run, modules = helpers.make_data(tmp_path), tmp_path / "run", tmp_path / "modules"
    (modules / "pandas").mkdir(parents=True)
    (modules / "pandas" / "__init__.py").write_text(SWALLOWS)
    (modules / "sitecustomize.py").write_text(IMPORTS_PANDAS)
    launched = start(tmp_path, *pretrain(data, run), modules=modules)
    assert launched.wait() == 130, launched.err
    assert "swallowed" in launched.err
    assert f"bertrain resume {run}` [interrupted]" in launched.err
    assert "Traceback" not in launched.err
    assert not helpers.losses(run)
    assert command_line("resume", run).code == 0


def test_an_interrupt_during_a_restart_with_other_libraries_waits_for_its_handler(tmp_path: Path) -> None:
    def press() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)

    ended = subprocess.run(
        helpers.command("recipes"), preexec_fn=press, capture_output=True, text=True, env=helpers.environment()
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "bertrain: interrupted; nothing was written\n"


@pytest.mark.parametrize("last_step", [2, 4])
def test_during_an_evaluation_the_evaluation_is_left_and_the_step_saved(tmp_path: Path, last_step: int) -> None:
    data, run, modules = helpers.make_data(tmp_path), tmp_path / "run", tmp_path / "modules"
    (modules / "pandas").mkdir(parents=True)
    (modules / "pandas" / "__init__.py").write_text("import pathlib; pathlib.Path(__file__ + '.imported').touch()")
    # A slow evaluation: the first call of `evaluation` reports itself and then takes its time for each batch.
    (modules / "sitecustomize.py").write_text(
        "import sys, time\n"
        "def slow(function):\n"
        "    def evaluation(self, *given):\n"
        "        for batch in function(self, *given):\n"
        "            print('evaluating', file=sys.stderr, flush=True)\n"
        "            time.sleep(1)\n"
        "            yield batch\n"
        "    return evaluation\n"
        "from bertrain.data.feed.loader import Loader\n"
        "Loader.evaluation = slow(Loader.evaluation)\n"
    )
    given = {
        "evaluate__data": data,
        "evaluate__every_samples": 48,
        "train__max_steps": last_step,
        "batch__token_budget": 64,
    }
    launched = start(tmp_path, *pretrain(data, run, **given), modules=modules)
    try:
        launched.wait_until(lambda: "evaluating" in launched.err, "the evaluation")
        launched.process.send_signal(signal.SIGINT)
        assert launched.wait() == 130, launched.err
    finally:
        launched.kill()
    assert "stopping after this step; Ctrl-C again to quit now" in launched.err
    assert [path.name for path in (modules / "pandas").glob("*.imported")] == [], "pyarrow would swallow an interrupt"
    assert launched.err.count("evaluating") < 5, "of some 30 batches"
    assert [path.name for path in checkpoint.whole_checkpoints(run / "checkpoints")] == ["step-00000002"]
    done = command_line("resume", run)
    assert f"evaluation at step {last_step}" in done.out, "also if it was the last one that was left"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that takes every command a while."""
    return helpers.write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", documents=60_000)


@pytest.mark.parametrize("command", ["extract", "prepare", "vocab"])
def test_a_data_command_ends_with_one_sentence(corpus: Path, tmp_path: Path, command: str) -> None:
    workers = [] if command == "vocab" else ["--workers", 2]
    launched = start(tmp_path, "data", command, corpus, "--out", tmp_path / "out", *workers)
    try:
        launched.wait_until(lambda: _cpu_seconds(launched.process.pid) > 1.5, "its work")
        launched.process.send_signal(signal.SIGINT)
        assert launched.wait() == 130, launched.err
    finally:
        launched.kill()
    assert "Traceback" not in launched.err
    (sentence,) = [line for line in launched.err.splitlines() if line.startswith("bertrain:")]
    assert ("the same command continues" in sentence) == (command == "prepare")
    assert not (tmp_path / "out").exists()


def _cpu_seconds(process: int) -> float:
    """The CPU time of a process and of all below it."""
    ticks = 0
    for one in descendants(process):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            status = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(status[11]) + int(status[12])
    return ticks / os.sysconf("SC_CLK_TCK")
