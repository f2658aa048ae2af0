"""Jobs and their scripts, which bash runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.resolve import resolve
from bertrain.launch.job import (
    JobSpec,
    Launcher,
    code_version,
    make_job,
    read_job,
    write_job,
)
from bertrain.launch.scripts import job_script
from tests import helpers

LAUNCHERS: list[Launcher] = ["local", "ssh", "slurm", "pbs", "mpi"]


def job_of(folder: Path, launcher: Launcher, **spec: Any) -> Any:
    """A job with everything asked for that its launcher knows, in a folder whose name a shell could trip over."""
    folder = folder / "a folder"
    folder.mkdir(exist_ok=True)
    hostfile = folder / "hosts.txt"
    hostfile.write_text("# ours\none slots=2\ntwo\n")
    given: dict[str, Any] = {"procs_per_node": 1, "time": "1h30m", "restarts": 2}
    given |= {"hostfile": str(hostfile)} if launcher in ("ssh", "mpi") else {}
    given |= {"nodes": 2} if launcher != "local" else {}
    settings = helpers.tiny_settings()
    return make_job(
        launcher, settings, folder / "data", folder / "run", spec=JobSpec(**given | spec), folder=folder / "job"
    )


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


def test_slurm_is_asked_for_what_was_wished(tmp_path: Path) -> None:
    script = job_script(
        job_of(
            tmp_path, "slurm", procs_per_node=0, gpus_per_node=8, partition="large", account="us", constraint="h100",
            nodelist="a[1-2]", mpi="pmi2", repeats=10, warning="5m", container="registry#image", mounts="/data:/data",
        )
    )  # fmt: skip
    directives = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert directives >= {
        "nodes=2", "ntasks-per-node=1", "gres=gpu:8", "time=01:30:00", "partition=large", "account=us",
        "constraint=h100", "nodelist=a[1-2]", "array=1-10", "signal=B:USR1@300", "requeue", "exclusive", "mem=0",
        "open-mode=append",
    }  # fmt: skip
    (srun,) = (block for block in script.split("\n}\n") if "exec srun" in block)
    for words in ("--gres=gpu:8", "--mpi=pmi2", "--nodes=2", "--container-image='registry#image'"):
        assert words in srun, "every srun has it"


def test_pbs_is_asked_for_what_was_wished(tmp_path: Path) -> None:
    script = job_script(
        job_of(
            tmp_path, "pbs", procs_per_node=0, gpus_per_node=4, cpus_per_node=32, queue="prod", project="us", repeats=4
        )
    )
    directives = [line.removeprefix("#PBS ") for line in script.splitlines() if line.startswith("#PBS")]
    assert directives[:7] == [
        "-N run", "-l select=2:ncpus=32:ngpus=4", "-l place=scatter:excl", "-l walltime=01:30:00", "-q prod", "-A us",
        "-J 1-4",
    ]  # fmt: skip


def test_a_job_folder_holds_the_whole_job(tmp_path: Path) -> None:
    job, settings = job_of(tmp_path, "slurm", repeats=2), helpers.tiny_settings()
    write_job(job, settings, job_script(job))
    assert read_job(job.folder) == job
    content = json.loads((job.folder / "job.json").read_text())
    assert content["command"][:3] == ["bertrain", "pretrain", str(job.folder / "recipe.toml")]
    assert job.command(2)[-2:] == ["--train.seed", str(settings.train.seed + 1)]
    assert resolve(str(job.folder / "recipe.toml")) == settings, "the recipe is complete by itself"
    assert content["code"] == code_version()
    with helpers.refused("folder-exists", job.folder):
        write_job(job, settings, "")
    (job.folder / "job.json").write_text("{}")
    with helpers.refused("damaged-job", job.folder / "job.json"):
        read_job(job.folder)
    with helpers.refused("missing-job", tmp_path):
        read_job(tmp_path)


def test_directives_hold_any_name_together(tmp_path: Path) -> None:
    """A per cent sign stands for something to Slurm, a hash begins a comment, and names are of few letters."""
    settings, spec = helpers.tiny_settings(), JobSpec(procs_per_node=1)
    scripts = [
        job_script(make_job(which, settings, "data", "a run#1", spec=spec, folder=tmp_path / "50% #2"))
        for which in LAUNCHERS
        if which in ("slurm", "pbs")
    ]
    assert "#SBATCH --job-name=a_run_1\n" in scripts[0]
    assert f'#SBATCH --output="{tmp_path}/50%% #2/logs/job-%j.log"\n' in scripts[0]
    assert "#PBS -N a_run_1\n" in scripts[1]
    assert f'#PBS -o "{tmp_path}/50% #2/logs/"\n' in scripts[1]
    with helpers.refused("quotation-mark", "--job"):
        make_job("slurm", settings, "data", "run", spec=spec, folder=tmp_path / 'a"b')


def test_a_job_does_not_depend_on_where_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_of(tmp_path, "local", python="venv/bin/python").python == str(tmp_path / "venv/bin/python")
    assert job_of(tmp_path, "local", python="python3").python == "python3"
    assert "export BERTRAIN_NODE=0 BERTRAIN_NODES=1" in job_script(job_of(tmp_path, "local"))


def test_repeats_that_draw_their_seeds_are_given_none(tmp_path: Path) -> None:
    settings = helpers.tiny_settings(train__seed=-1)
    job = make_job("local", settings, "data", "run", spec=JobSpec(procs_per_node=1, repeats=2), folder=tmp_path / "job")
    assert "--train.seed" not in job.command(2)
