"""Jobs over real ssh connections to two hosts, and what can befall them; the same under an emulated PBS."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import helpers
from tests.launched import Launched, as_job, records
from tests.processes.test_launch import scripts_of_all_kinds
from tests.services import sshd
from tests.services.sshd import Hosts, running_hosts

pytestmark = [pytest.mark.services, pytest.mark.skipif(bool(sshd.why_not()), reason=sshd.why_not() or "it can run")]
ROOT = Path(__file__).parents[2]
ENDLESS = 100000


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with running_hosts(tmp_path_factory.mktemp("hosts")) as running:
        yield running


def launch(hosts: Hosts, folder: Path, *options: object, names: tuple[str, ...] = (), **settings: Any) -> Launched:
    """A job of one rank on each host."""
    hostfile = hosts.write_hostfile(folder / "hosts", *names)
    options = ("--job", folder / "job", "--hostfile", hostfile, "--ssh", hosts.ssh, "--procs-per-node", 1, *options)
    given = {"data": helpers.make_data(folder), "run": folder / "run", "log__every_steps": 2} | settings
    return Launched(helpers.command(*as_job("ssh", *options, **given)), folder, PYTHONPATH=str(ROOT))


def ranks_of(run: Path) -> dict[int, int]:
    """The processes of a run's ranks, wherever on this machine they are."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run).encode() in words:
                found |= {int(word[5:]): int(entry.name) for word in variables if word.startswith(b"RANK=")}
    return found


def test_two_hosts_stopped_by_a_signal_and_started_again(hosts: Hosts, tmp_path: Path) -> None:
    launched = launch(hosts, tmp_path, train__max_steps=120)
    try:
        launched.wait_until(lambda: len(records(tmp_path / "run")) > 4, "some steps")
        launched.process.send_signal(signal.SIGUSR1)
        assert launched.wait() == 75, launched.out
    finally:
        launched.kill()
    said = launched.out
    assert "[127.0.0.1] pre-flight: fit to train" in said
    assert "all-reduce over 2 ranks" in said
    assert "[127.0.0.1] bertrain: stopped by SIGUSR1" in said
    again = Launched(["bash", str(tmp_path / "job" / "job.sh")], tmp_path, "again")
    try:
        assert again.wait() == 0, again.out
    finally:
        again.kill()
    assert "continuing after step" in again.out
    assert len(helpers.losses(tmp_path / "run")) == 120


def test_a_host_that_is_not_there_is_named(hosts: Hosts, tmp_path: Path) -> None:
    launched = launch(hosts, tmp_path, names=("127.0.0.1", "no-such-host.invalid"))
    try:
        assert launched.wait() == 2, launched.out
    finally:
        launched.kill()
    assert "Could not resolve hostname no-such-host.invalid" in launched.out
    assert "bertrain: host no-such-host.invalid could not be reached over ssh" in launched.err
    assert not (tmp_path / "run").exists()


def test_a_host_that_is_lost_ends_the_job_or_starts_it_again(hosts: Hosts, tmp_path: Path) -> None:
    """The processes of one host are killed, all of them at once, as when it loses its power."""
    launched = launch(
        hosts, tmp_path, "--no-preflight", restarts=1, train__max_steps=ENDLESS, checkpoint__every_steps=5
    )
    try:
        launched.wait_until(lambda: len(records(tmp_path / "run")) > 8, "a checkpoint")
        rank = ranks_of(tmp_path / "run")[1]
        agent = int(Path(f"/proc/{rank}/stat").read_text().rsplit(")", 1)[1].split()[1])
        for process in (agent, rank):
            os.kill(process, signal.SIGKILL)
        launched.wait_until(lambda: "training continued at step" in launched.out, "going on", pause=0.2)
        assert "starting all ranks again" in launched.err

        # The launcher itself is killed: nothing is left behind on any host.
        ranks = ranks_of(tmp_path / "run")
        assert set(ranks) == {0, 1}
        os.kill(launched.process.pid, signal.SIGKILL)
        for process in processes_of(tmp_path / "job"):
            os.kill(process, signal.SIGKILL)
        wait_until_gone(tmp_path / "run")
    finally:
        launched.kill()


def processes_of(job: Path) -> list[int]:
    """The processes on this side of the connections."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(job).encode() in words and b"worker" in words and b"ssh" in words:
                found.append(int(entry.name))
    return found


def wait_until_gone(run: Path) -> None:
    import time

    deadline = time.monotonic() + 120
    while ranks_of(run):
        assert time.monotonic() < deadline, "ranks were left behind"
        time.sleep(0.1)


def test_a_host_with_another_version_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(ROOT / "bertrain", other / "bertrain", ignore=shutil.ignore_patterns("__pycache__"))
    with open(other / "bertrain" / "base" / "seeds.py", "a") as file:
        file.write("\n# changed on one host only\n")
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
case ${{SSH_CONNECTION:-}} in *" 127.0.0.2 "*) export PYTHONPATH={other} ;; esac
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    launched = launch(hosts, tmp_path, "--python", python)
    try:
        assert launched.wait() == 2, launched.out
    finally:
        launched.kill()
    assert "refused: node 1" in launched.out
    assert "has bertrain 0.1.0 (files " in launched.out
    assert launched.out.count("[preflight-failed]") == 1
    assert not (tmp_path / "run").exists()


def test_under_an_emulated_pbs(hosts: Hosts, tmp_path: Path) -> None:
    """No real PBS is at hand: its script is run with PBS's variables around it, in place as under qsub -I."""
    nodefile = tmp_path / "nodefile"
    nodefile.write_text("127.0.0.1\n127.0.0.1\n127.0.0.2\n127.0.0.2\n")  # a line for each slot, as PBS writes it
    options = ("--job", tmp_path / "job", "--ssh", hosts.ssh, "--nodes", 2, "--procs-per-node", 1, "--time", "1h")
    variables = {"PBS_JOBID": "12.server", "PBS_NODEFILE": str(nodefile), "PYTHONPATH": str(ROOT)}
    data = helpers.make_data(tmp_path)
    command = helpers.command(*as_job("pbs", *options, data=data, run=tmp_path / "run", train__max_steps=4))
    launched = Launched(command, tmp_path, **variables)
    try:
        assert launched.wait() == 0, f"{launched.out}\n{launched.err}"
    finally:
        launched.kill()
    assert "inside an allocation (PBS_JOBID is set)" in launched.out
    assert (tmp_path / "job" / "hosts-12.server").read_text() == "127.0.0.1\n127.0.0.2\n"
    assert len(records(tmp_path / "run")) == 4
    assert "as process" in (tmp_path / "job" / "events").read_text()
    assert "of job 12.server" in (tmp_path / "job" / "events").read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here; Debian's package is called so")
def test_a_linter_has_nothing_to_say_of_any_script(tmp_path: Path) -> None:
    paths = scripts_of_all_kinds(tmp_path)
    # SC2317: what only a trap calls is not unreachable
    done = subprocess.run(["shellcheck", "-e", "SC2317", *map(str, paths)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
