"""Folders and words with odd names: no script, page or board executes them, and every one arrives as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bertrain.launch.job import Host, Job, JobSpec, Launcher, Task, make_job, place, write_job
from bertrain.launch.remote import node_command
from bertrain.launch.scripts import job_script
from bertrain.reports.report import report
from tests import helpers
from tests.miniature_tasks import command_line

NAMES = {
    "spaces": "a  b ",
    "quotes": 'it\'s "so"',
    "command": "$(touch PWNED)",
    "backticks": "`touch PWNED`",
    "semicolon": "x; touch PWNED #",
    "variable": "$HOME ${job} $$",
    "dash": "-rf --version",
    "patterns": "*?[a]{b,c}~ !1 %j",
    "backslash": "a\\nb\\",
    "letters": "übung 日本 🙂",
    "separators": "a\u2028b\x85touch PWNED",
}
BREAKING = {"newline": "x\ntouch PWNED; exit 0 #", "return": "x\rtouch PWNED", "tab": "x\ty", "escape": "x\x1b[2J"}
STUB = """#!/bin/bash
# Runs the command among its words, as srun, mpirun and ssh do, in the environment that it would get.
while [ "$#" -gt 0 ] && [ "$1" != "$STUB_PYTHON" ]; do shift; done
exec "$@"
"""
RECORDER = """#!/bin/bash
printf '%s\\0' "$PWD" "$OMP_ODD" "$@" >> "$RECORDED"
"""


def executable(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o755)
    return path


def odd_job(tmp_path: Path, launcher: Launcher, name: str, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job whose folder, run, data, working directory, Python, words and environment all have the name."""
    place_of_all = tmp_path / name
    (place_of_all / "data").mkdir(parents=True)
    monkeypatch.chdir(place_of_all)
    monkeypatch.setenv("OMP_ODD", name)
    monkeypatch.setenv("OMP_$(touch PWNED)", "x")
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    python = executable(place_of_all / "python", RECORDER)
    spec = JobSpec(procs_per_node=1, python=str(python), preflight=False, hostfile=str(tmp_path / "hosts"))
    spec = spec if launcher in ("ssh", "mpi") else JobSpec(procs_per_node=1, python=str(python), preflight=False)
    task = Task(command=("pretrain", name, "--run", str(place_of_all / "run")), folder=str(place_of_all / "run"))
    return make_job(place(launcher, spec), [task], data=[place_of_all / "data"], folder=place_of_all / "job")


def run_script(job: Job, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a job's script with programs that do nothing but start what they are given; returns what was started."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for program in ("srun", "mpirun", "qsub", "sbatch", "scontrol"):
        executable(stubs / program, STUB)
    (tmp_path / "nodes").write_text("localhost\n")
    environment = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "STUB_PYTHON": job.python,
        "RECORDED": str(tmp_path / "recorded"),
        "PBS_JOBID": "1.server",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
    }
    script = job.folder / "job.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    recorded = tmp_path / "recorded"
    return done, recorded.read_text().split("\0")[:-1] if recorded.is_file() else []


def assert_nothing_was_touched(tmp_path: Path) -> None:
    assert not [path for path in tmp_path.rglob("*") if path.name == "PWNED"]


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("launcher", ["local", "ssh", "slurm", "pbs", "mpi"])
def test_a_script_hands_every_name_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher, name: str
) -> None:
    if '"' in name and launcher in ("slurm", "pbs"):  # their directives have no way to write it
        with helpers.refused("quotation-mark"):
            odd_job(tmp_path, launcher, name, monkeypatch)
        return
    job = odd_job(tmp_path, launcher, name, monkeypatch)
    write_job(job, None, job_script(job))
    done, recorded = run_script(job, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    role = {"local": "node", "slurm": "node", "mpi": "rank"}.get(launcher, "ssh")
    words = ["-u", "-m", "bertrain", "launch", "worker", role, str(job.folder), "task"]
    assert recorded == [str(tmp_path / name), name, *words]
    assert "ended with exit code 0" in (job.folder / "events").read_text()
    assert_nothing_was_touched(tmp_path)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_shell_on_another_host_gets_every_name_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job = odd_job(tmp_path, "ssh", name, monkeypatch)
    monkeypatch.setenv("RECORDED", str(tmp_path / "recorded"))
    monkeypatch.delenv("OMP_ODD")
    host = Host(name="localhost", slots=1)
    subprocess.run(["bash", "-c", node_command(job, "task", host, 0, [host])], check=True, cwd=tmp_path)
    recorded = (tmp_path / "recorded").read_text().split("\0")[:-1]
    words = ["-u", "-m", "bertrain", "launch", "worker", "node", str(job.folder), "task"]
    assert recorded == [str(tmp_path), name, *words]
    assert_nothing_was_touched(tmp_path)


@pytest.mark.parametrize("name", BREAKING.values(), ids=BREAKING)
def test_a_name_that_ends_a_line_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with helpers.refused("control-character"):
        odd_job(tmp_path, "local", name, monkeypatch)
    assert not (tmp_path / name / "job").exists()
    data = helpers.make_data(tmp_path)
    words = ["launch", "local", "--procs-per-node", 1, "--", "pretrain", "bert-tiny", "--data", data, "--run", "run"]
    done = subprocess.run(
        helpers.command(*words),
        cwd=tmp_path / name,
        env=helpers.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "[control-character]" in done.stderr
    assert_nothing_was_touched(tmp_path)


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = "a\udcffb"  # the byte 0xff, as Python reads it
    with helpers.refused("name-not-utf8"):
        odd_job(tmp_path, "local", odd, monkeypatch)
    data, before = helpers.make_data(tmp_path), sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    command = ["pretrain", "bert-tiny", "--data", data, *helpers.tiny_arguments(train__max_steps=1)]
    for here, run in ((tmp_path, tmp_path / odd / "run"), (tmp_path / odd, "run")):
        monkeypatch.chdir(here)
        done = command_line(*command, "--run", run, check=False)
        assert (done.code, done.out) == (2, "")
        assert "[name-not-utf8]" in done.err
    (tmp_path / "texts").mkdir()
    table = helpers.DATA / "datasets" / "parquet" / "cola" / "validation-00000-of-00001.parquet"
    shutil.copy(table, tmp_path / "texts" / f"{odd}.parquet")  # found only in the folder
    monkeypatch.chdir(tmp_path)
    done = command_line("data", "extract", tmp_path / "texts", "--out", tmp_path / "out", check=False)
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith("[name-not-utf8]")
    assert not {path for path in tmp_path.rglob("*") if path.name in ("run", "out")} - set(before)


def test_a_working_directory_that_was_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = command_line("evaluate", tmp_path / "run", check=False)
    assert (done.code, done.out) == (2, "")
    assert "[no-working-directory]" in done.err


def test_a_report_and_a_board_of_a_run_with_an_odd_name(tmp_path: Path) -> None:
    odd = "x\n<script>alert(1)<script> & \"' $(touch PWNED)"
    data, run = helpers.make_data(tmp_path), tmp_path / odd
    settings = helpers.tiny_arguments(train__max_steps=2, log__trackers="tensorboard")
    words = ["pretrain", "bert-tiny", "--data", data, "--run", run, *settings]
    command_line(*words)
    assert list((run / "tensorboard").glob("events.*"))
    page = report([run], out=tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert_nothing_was_touched(tmp_path)
