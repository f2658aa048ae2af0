"""A launcher that is killed leaves nothing behind: its ranks save and end, and the run can be resumed."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import helpers
from tests.launched import PATIENCE_S, Launched, as_job, children, records

MARK = "BERTRAIN_TEST_MARK"
SETTINGS = {"train__max_steps": 100_000, "checkpoint__every_steps": 100_000, "log__every_steps": 1}


def marked(mark: str) -> list[int]:
    """The processes that inherited a variable, wherever they now hang in the tree; `tee` ends with its input."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for_the_end(mark: str) -> None:
    deadline = time.monotonic() + PATIENCE_S / 4
    while left := marked(mark):
        if time.monotonic() > deadline:
            named = [Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ") for process in left]
            for process in left:
                os.kill(process, signal.SIGKILL)
            pytest.fail(f"processes survived their launcher: {named}")
        time.sleep(0.1)


def is_free(run: Path) -> bool:
    """Whether nobody holds the lock of a run."""
    if not (run / ".lock").is_file():
        return True
    with open(run / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def start_and_kill(
    folder: Path, mark: str, command: list[str], when: Callable[[], bool], kill: Callable[[int], int]
) -> None:
    """Start a command, kill the process that `kill` chooses once `when` holds, and wait until all have ended."""
    launched = Launched(command, folder, **{MARK: mark, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    try:
        launched.wait_until(when, "the moment of death", pause=0.01)
        os.kill(kill(launched.process.pid), signal.SIGKILL)
        began = time.monotonic()
        wait_for_the_end(mark)
        print(f"all ended {time.monotonic() - began:.1f} s later")
    finally:
        launched.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
def test_ranks_end_with_a_launcher_that_is_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    seed = random.randrange(2**32)
    print(f"moments of death drawn with seed {seed}")
    draw = random.Random(seed)
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    fresh = ["pretrain", "bert-tiny", "--data", data, "--run", run, "--nproc", 2, *helpers.tiny_arguments(**SETTINGS)]
    for number in range(kills):
        words = ["resume", run, "--nproc", 2] if (run / "config.json").is_file() else fresh
        mark, steps = f"{os.getpid()}-{number}", len(records(run)) + draw.randint(1, 20)

        def is_starting(mark: str = mark, delay: float = draw.uniform(0, 5)) -> bool:
            """Whether ranks were just started: they import, connect, open the run, or train already."""
            if len(marked(mark)) > 2:
                time.sleep(delay)
                return True
            return False

        when = is_starting if number % 2 else lambda steps=steps: len(records(run)) >= steps  # of a run that goes on
        start_and_kill(tmp_path, mark, helpers.command(*words), when, lambda launcher: launcher)
        assert is_free(run)
    assert list((run / "checkpoints").glob("step-*")), "no rank saved when its launcher died"


@pytest.mark.parametrize("killed", ["script", "agent"])
def test_a_job_ends_with_its_script_and_ranks_with_their_agent(tmp_path: Path, killed: str) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    options = ["--job", tmp_path / "job", "--procs-per-node", 2, "--no-preflight"]
    job = helpers.command(*as_job("local", *options, data=data, run=run, **SETTINGS))

    def choose(script: int) -> int:
        return script if killed == "script" else min(one for one in children(script) if len(children(one)) > 1)

    start_and_kill(tmp_path, f"{os.getpid()}-{killed}", job, lambda: len(records(run)) > 3, choose)
    assert is_free(run)
    assert list((run / "checkpoints").glob("step-*"))
