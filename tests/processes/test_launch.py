"""Scripts of jobs, run by bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertrain.launch.job import (
    Launcher,
    write_job,
)
from bertrain.launch.scripts import job_script
from tests import helpers
from tests.quick.test_launch import LAUNCHERS, job_of


def scripts_of_all_kinds(folder: Path) -> list[Path]:
    """The script of each launcher, once and repeated, with a container and without."""
    written = []
    for launcher in LAUNCHERS:
        for repeats in (1, 3):
            for container in ("", "image file.sif"):
                runtime = "pyxis" if launcher == "slurm" else "apptainer"
                spec = {"container": container, "runtime": runtime, "mounts": "/a b:/c", "repeats": repeats}
                path = folder / f"{launcher}-{repeats}-{bool(container)}.sh"
                path.write_text(job_script(job_of(folder, launcher, **spec)))
                written.append(path)
    return written


def test_bash_takes_all_scripts(tmp_path: Path) -> None:
    for path in scripts_of_all_kinds(tmp_path):
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_of_an_array_only_the_repeat_that_was_stopped_is_submitted_again(tmp_path: Path) -> None:
    """No real PBS is at hand: a qsub of ours keeps what it is given."""
    job = job_of(tmp_path, "pbs", repeats=3, time="", preflight=False)
    write_job(job, helpers.tiny_settings(), job_script(job))
    programs = {
        "python": "#!/bin/bash\nexit 75\n",
        "qsub": f"#!/bin/bash\necho \"$@\" > '{tmp_path}/words'\ncat > '{tmp_path}/script'\necho 13.server\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = (job.folder / "job.sh").read_text()
    (job.folder / "job.sh").write_text(script.replace(f"python={job.python}", f"python={tmp_path}/python"))
    (tmp_path / "nodes").write_text("one\n")
    stopped = subprocess.run(
        ["bash", str(job.folder / "job.sh")],
        env=os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "PBS_JOBID": "12[2].server", "PBS_ARRAY_INDEX": "2",
            "PBS_NODEFILE": str(tmp_path / "nodes"),
        },
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert stopped.returncode == 75, stopped
    assert (tmp_path / "words").read_text().split() == ["-v", "BERTRAIN_ONLY=2", "-"]
    again = (tmp_path / "script").read_text()
    assert again.replace("#PBS -r y", "#PBS -J 1-3\n#PBS -r y") == (job.folder / "job.sh").read_text()
    assert 'repeats="${BERTRAIN_ONLY:-${PBS_ARRAY_INDEX:-' in again
    assert (job.folder / "submitted").read_text() == "13.server\n"
    assert "submitted again as 13.server" in (job.folder / "repeat-2" / "events").read_text()


@pytest.mark.parametrize(
    ("launcher", "variable"), [("slurm", "SLURM_ARRAY_TASK_ID"), ("pbs", "PBS_ARRAY_INDEX"), ("local", "")]
)
def test_repeats_are_those_of_the_array_or_one_after_another(tmp_path: Path, launcher: Launcher, variable: str) -> None:
    script = job_script(job_of(tmp_path, launcher, repeats=3))
    (line,) = (line for line in script.splitlines() if line.startswith("repeats="))

    def repeats(**environment: str) -> str:
        return subprocess.run(
            ["bash", "-c", f'{line}; echo "$repeats"'], env={"PATH": os.environ["PATH"]} | environment,
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert repeats() == "1 2 3\n"
    if variable:
        assert repeats(**{variable: "2"}) == "2\n"


def test_a_script_warns_itself_before_its_time_is_over(tmp_path: Path) -> None:
    job = job_of(tmp_path, "local", time="121s", preflight=False)  # and the warning comes two minutes before that
    write_job(job, helpers.tiny_settings(), job_script(job))
    step = tmp_path / "step"
    step.write_text("#!/bin/bash\ntrap 'exit 75' USR1\nwhile :; do sleep 0.1; done\n")
    step.chmod(0o755)
    script = (job.folder / "job.sh").read_text().replace(f"python={job.python}", f"python={step}")
    (job.folder / "job.sh").write_text(script)
    stopped = subprocess.run(
        ["bash", str(job.folder / "job.sh")], capture_output=True, text=True, check=False, timeout=60
    )
    assert stopped.returncode == 75, stopped


def test_signals_restarts_and_ends_of_a_script(tmp_path: Path) -> None:
    """The end that all scripts share, for real, around a step that fails twice, saves at a signal, and is done then."""
    job = job_of(tmp_path, "local", time="", preflight=False)
    write_job(job, helpers.tiny_settings(), job_script(job))
    step = tmp_path / "step"
    step.write_text(
        f"""#!{sys.executable}
import os, pathlib, signal, sys, time
count = pathlib.Path({str(tmp_path / "count")!r})
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
if number < 3:
    assert ("BERTRAIN_FAILED" in os.environ) == (number > 1)
    sys.exit(1)
if number == 3:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(60)
"""
    )
    step.chmod(0o755)
    script = (job.folder / "job.sh").read_text().replace(job.python, str(step))
    assert str(step) in script
    (job.folder / "job.sh").write_text(script)
    stopped = subprocess.run(["bash", str(job.folder / "job.sh")], capture_output=True, text=True, check=False)
    assert stopped.returncode == 75, stopped
    assert "(2 of 2 without a new checkpoint)" in stopped.stderr
    assert f"bash {job.folder}/job.sh" in stopped.stdout
    done = subprocess.run(["bash", str(job.folder / "job.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert [line.split()[1] for line in (job.folder / "events").read_text().splitlines()] == [
        "started", "exit", "exit", "ended", "started", "ended",
    ]  # fmt: skip
