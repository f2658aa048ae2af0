"""Jobs on this machine: followed, asked, cancelled; two of them in one run folder; and a disk that is full."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import helpers
from tests.launched import PATIENCE_S, Launched, as_job, records

pytestmark = pytest.mark.services
ROOT = Path(__file__).parents[2]


def launch(folder: Path, name: str, *options: object, run: Path | None = None, **settings: Any) -> Launched:
    options = ("--job", folder / name, "--procs-per-node", 1, *options)
    words = as_job("local", *options, data=folder / "data", run=run or folder / "run", **settings)
    return Launched(helpers.command(*words), folder, name, PYTHONPATH=str(ROOT))


def ask(*words: object) -> subprocess.CompletedProcess[str]:
    return helpers.bertrain("launch", *words, check=False)


def test_a_job_is_followed_asked_and_cancelled_and_no_other_gets_in_its_way(tmp_path: Path) -> None:
    helpers.make_data(tmp_path)
    settings = {"train__max_steps": 100000, "log__every_steps": 2}
    first = launch(tmp_path, "first", "--no-preflight", **settings)
    second = None
    try:
        first.wait_until(lambda: len(records(tmp_path / "run")) > 4, "some steps")
        follower = Launched(
            helpers.command("launch", "logs", tmp_path / "first", "--follow"), tmp_path, "logs", PYTHONPATH=str(ROOT)
        )
        status = json.loads(ask("status", tmp_path / "first", "--json").stdout)
        assert status["state"] == "RUNNING"
        assert status["tasks"][0]["step"] > 4

        second = launch(tmp_path, "second", "--no-preflight", **settings)
        assert second.wait() == 2
        assert "[run-in-use]" in second.out + second.err
        assert ask("status", tmp_path / "second").stdout.splitlines()[0].endswith("ENDED with exit code 2")

        assert "sent SIGTERM" in ask("cancel", tmp_path / "first").stdout
        assert first.wait() == 75
        assert follower.wait() == 0
        assert "[0] bertrain: stopped by SIGTERM" in follower.out
        assert len(re.findall(r"^\[0\] step +2/", follower.out, re.MULTILINE)) == 1, "from the beginning, each once"
        again = ask("cancel", tmp_path / "first")
        assert again.returncode == 2
        assert "[job-not-running]" in again.stderr
    finally:
        first.kill()
        if second is not None:
            second.kill()


def test_ctrl_c_saves_the_step_in_hand(tmp_path: Path) -> None:
    """A terminal sends SIGINT to everything in its foreground; the ranks must hear of it once."""
    helpers.make_data(tmp_path)
    options = ("--job", tmp_path / "job", "--procs-per-node", 2, "--no-preflight")
    settings = {"train__max_steps": 100000, "log__every_steps": 2, "checkpoint__every_steps": 0}
    words = as_job("local", *options, data=tmp_path / "data", run=tmp_path / "run", **settings)
    launched = subprocess.Popen(
        helpers.command(*words),
        env=helpers.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where these tests run with `&`
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(records(tmp_path / "run")) <= 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(launched.pid, signal.SIGINT)
        said, _ = launched.communicate(timeout=PATIENCE_S)
    finally:
        launched.kill()
    assert launched.returncode == 130, said
    assert len(re.findall(r"bertrain: stopped by SIGINT after step \d+, which is saved", said)) == 1, said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_said_before_the_job_trains(tmp_path: Path, small_disk: Path) -> None:
    helpers.make_data(tmp_path)
    launched = launch(tmp_path, "job", run=small_disk / "run")
    try:
        assert launched.wait() == 2, launched.out
    finally:
        launched.kill()
    assert "[preflight-failed]" in launched.out
    assert "GiB free at" in launched.out

    (small_disk / "filler").write_bytes(bytes(60 * 1024))
    options = ("--job", small_disk / "job", "--procs-per-node", 1)
    _, *words = as_job("local", *options, data=tmp_path / "data", run=tmp_path / "run")
    full = ask(*words)
    assert full.returncode == 2
    assert "[unwritable-folder]" in full.stderr
    assert not (small_disk / "job").exists()
