"""Jobs and their scripts, which bash runs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertrain.cli.launch import repeat_task
from bertrain.config.resolve import resolve
from bertrain.launch.job import Host, Job, JobSpec, Launcher, Task, code_version, make_job, place, read_job, write_job
from bertrain.launch.local import run_agent, run_ranks
from bertrain.launch.remote import node_command
from bertrain.launch.scripts import job_script, mounts_of
from bertrain.ranks.restart import ROLLED_BACK
from bertrain.training.start import pretrain
from tests import helpers
from tests.miniature_tasks import command_line, make_miniature

LAUNCHERS: list[Launcher] = ["local", "ssh", "slurm", "pbs", "mpi"]


def job_of(folder: Path, launcher: Launcher, *, tasks: int = 1, **spec: Any) -> Job:
    """A job with everything asked for that its launcher knows, in a folder whose name a shell could trip over."""
    folder = folder / "a folder"
    folder.mkdir(exist_ok=True)
    hostfile = folder / "hosts.txt"
    hostfile.write_text("# ours\none slots=2\ntwo\n")
    given: dict[str, Any] = {"procs_per_node": 1, "time": "1h30m", "array": tasks > 1}
    given |= {"hostfile": str(hostfile)} if launcher in ("ssh", "mpi") else {}
    given |= {"nodes": 2} if launcher != "local" else {}
    run, data = str(folder / "run"), folder / "data"
    task = Task(command=("pretrain", "bert-tiny", "--data", str(data), "--run", run), folder=run)
    several = repeat_task([task], tasks, helpers.tiny_settings()) if tasks > 1 else [task]
    placement = place(launcher, JobSpec(**given | spec))
    return make_job(placement, several, data=[data], restarts=2, folder=folder / "job")


def scripts_of_all_kinds(folder: Path) -> list[Path]:
    """The script of each launcher, once and repeated, with a container and without."""
    written = []
    for launcher in LAUNCHERS:
        for tasks in (1, 3):
            for container in ("", "/an image.sif"):
                runtime = "pyxis" if launcher == "slurm" else "apptainer"
                spec = {"container": container, "runtime": runtime, "mounts": "/a b:/c" if container else ""}
                path = folder / f"{launcher}-{tasks}-{bool(container)}.sh"
                path.write_text(job_script(job_of(folder, launcher, tasks=tasks, **spec)))
                written.append(path)
    return written


def test_bash_takes_all_scripts(tmp_path: Path) -> None:
    for path in scripts_of_all_kinds(tmp_path):
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_of_an_array_only_the_task_that_was_stopped_is_submitted_again(tmp_path: Path) -> None:
    """No real PBS is at hand: a qsub of ours keeps what it is given."""
    job = job_of(tmp_path, "pbs", tasks=3, time="", preflight=False)
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
    assert 'tasks="${BERTRAIN_ONLY:-${PBS_ARRAY_INDEX:-' in again
    assert (job.folder / "submitted").read_text() == "13.server\n"
    assert "submitted again as 13.server" in (job.folder / "task-2" / "events").read_text()


@pytest.mark.parametrize(
    ("launcher", "variable"), [("slurm", "SLURM_ARRAY_TASK_ID"), ("pbs", "PBS_ARRAY_INDEX"), ("local", "")]
)
def test_tasks_are_those_of_the_array_or_one_after_another(tmp_path: Path, launcher: Launcher, variable: str) -> None:
    script = job_script(job_of(tmp_path, launcher, tasks=3))
    (line,) = (line for line in script.splitlines() if line.startswith("tasks="))

    def tasks(**environment: str) -> str:
        return subprocess.run(
            ["bash", "-c", f'{line}; echo "$tasks"'], env={"PATH": os.environ["PATH"]} | environment,
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert tasks() == "1 2 3\n"
    if variable:
        assert tasks(**{variable: "2"}) == "2\n"


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
    assert bool(os.environ["BERTRAIN_FAILED"]) == (number > 1)
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


def test_a_checkpoint_of_any_seed_is_progress(tmp_path: Path) -> None:
    """Every start fails; the first three save a step of some seed first, so one restart in a row is enough for them."""
    run = tmp_path / "several runs"
    job = replace(job_of(tmp_path, "local", time="", preflight=False), restarts=1)
    job = replace(job, tasks=(Task(command=("finetune", "glue", "--run", str(run)), folder=str(run)),))
    write_job(job, None, job_script(job))
    step = tmp_path / "step"
    step.write_text(
        f"""#!{sys.executable}
import pathlib
saved = {{"seed-1": 9, "seed-2": 3, "cola/seed-1": 2}}
for place in [pathlib.Path({str(run)!r}, name, f"checkpoints/step-{{number:08}}") for name, number in saved.items()]:
    if not place.exists():
        place.mkdir(parents=True)
        break
raise SystemExit(1)
"""
    )
    step.chmod(0o755)
    script = (job.folder / "job.sh").read_text().replace(job.python, str(step))
    (job.folder / "job.sh").write_text(script)
    failed = subprocess.run(["bash", str(job.folder / "job.sh")], capture_output=True, text=True, check=False)
    assert failed.returncode == 1, failed
    assert failed.stderr.count("(1 of 1 without a new checkpoint)") == 3


def test_a_job_of_several_seeds_writes_the_folder_above_them(tmp_path: Path) -> None:
    made = make_miniature(tmp_path)
    words = ("classify", "--init", made.base, "--data", made.table, "--run", tmp_path / "run", "--seeds", "1,2")
    words += ("--data.max_seq_length", "32")
    done = command_line("launch", "slurm", "--procs-per-node", 1, "--dry-run", "--", "finetune", *words)
    assert f"folders=('' {tmp_path / 'run'})" in done.out


def test_a_signal_before_the_stage_is_not_lost(tmp_path: Path) -> None:
    """TERM while the script makes the folder of a start, when there is no process yet to forward it to."""
    job = job_of(tmp_path, "local", time="", preflight=False)
    write_job(job, helpers.tiny_settings(), job_script(job))
    step = tmp_path / "step"
    step.write_text("#!/bin/bash\ntrap 'exit 75' TERM\nwhile :; do sleep 0.1; done\n")
    step.chmod(0o755)
    script = (job.folder / "job.sh").read_text().replace(f"python={job.python}", f"python={step}")
    made = 'mkdir "$BERTRAIN_START"'
    assert made in script
    (job.folder / "job.sh").write_text(script.replace(made, f"kill -s TERM $$ && {made}"))
    stopped = subprocess.run(
        ["bash", str(job.folder / "job.sh")], capture_output=True, text=True, check=False, timeout=60
    )
    assert stopped.returncode == 75, stopped


def test_a_failure_is_not_that_of_the_next_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process starts several groups of ranks: the experiments of `mlperf run`, the steps of `train`."""
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        f"""import os, pathlib
if "RANK" in os.environ:
    seen = pathlib.Path({str(seen)!r})
    number = len(list(seen.iterdir()))
    (seen / str(number)).write_text(os.environ.get("BERTRAIN_FAILED", ""))
    os._exit(1 if number == 0 else 0)
"""
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run_ranks(1, ["doctor"], restarts=1) == 0
    assert run_ranks(1, ["doctor"], restarts=1) == 0
    first, again, other = ((seen / str(number)).read_text() for number in range(3))
    assert first == other == ""
    assert again


def test_a_job_has_the_binding_and_the_device_of_its_recipe(tmp_path: Path) -> None:
    """A launcher adds no setting to the command, and the pre-flight reads those of the recipe."""
    recipe = tmp_path / "own.toml"
    recipe.write_text('base = "bert-tiny"\n[train]\nbinding = "none"\ndevice = "cpu"\n')
    job = job_of(tmp_path, "local")
    write_job(job, resolve(str(recipe)), job_script(job))
    train = resolve(str(job.folder / "recipe.toml")).train
    assert (train.binding, train.device) == ("none", "cpu")
    assert read_job(job.folder).tasks[0].command == job.tasks[0].command
    assert "train." not in (job.folder / "job.sh").read_text()


def test_slurm_is_asked_for_what_was_wished(tmp_path: Path) -> None:
    script = job_script(
        job_of(
            tmp_path, "slurm", procs_per_node=0, gpus_per_node=8, partition="large", account="us", constraint="h100",
            nodelist="a[1-2]", mpi="pmi2", tasks=10, warning="5m", container="registry#image", mounts="/disk:/data",
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
    folder = tmp_path / "a folder"
    mounted = srun.split("--container-mounts='")[1].split("'")[0].split(",")
    assert mounted[0] == "/disk:/data"
    assert f"{folder}:{folder}" in mounted
    assert "python=python3\n" in script, "the image's own"


def test_pbs_is_asked_for_what_was_wished(tmp_path: Path) -> None:
    script = job_script(
        job_of(
            tmp_path, "pbs", procs_per_node=0, gpus_per_node=4, cpus_per_node=32, queue="prod", project="us",
            account="them", tasks=4,
        )
    )  # fmt: skip
    directives = [line.removeprefix("#PBS ") for line in script.splitlines() if line.startswith("#PBS")]
    assert directives[:8] == [
        "-N run-1", "-l select=2:ncpus=32:ngpus=4", "-l place=scatter:excl", "-l walltime=01:30:00", "-q prod",
        "-P us", "-A them", "-J 1-4",
    ]  # fmt: skip


@pytest.mark.parametrize("launcher", ["pbs", "ssh"])
def test_what_runs_over_ssh_runs_in_the_image(tmp_path: Path, launcher: Launcher) -> None:
    job = job_of(tmp_path, launcher, container="/image.sif", runtime="apptainer")
    start = job_script(job).split("start_stage() {")[1].split("\n}\n")[0]
    assert start.split()[:7] == ["exec", "env", "-u", "LD_PRELOAD", "-u", "PYTHONPATH", "apptainer"]
    assert '/image.sif \\\n        "$python" -u -m bertrain launch worker ssh' in start
    host = Host(name="one", slots=1)
    remote, local = (node_command(job, "task", host, 0, [host], is_local=here) for here in (False, True))
    assert "apptainer exec" in remote
    assert "apptainer" not in local, "which is in the image already"


def test_a_container_sees_all_that_the_command_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("disk/data", "weights", "here", "runs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights" / "model.safetensors").touch()
    (tmp_path / "data").symlink_to(tmp_path / "disk" / "data")
    monkeypatch.chdir(tmp_path / "here")
    words = ("pretrain", "bert-tiny", "--data", f"{tmp_path}/data", f"--init={tmp_path}/weights/model.safetensors")
    spec = JobSpec(procs_per_node=1, container="/image.sif", runtime="apptainer")
    tasks = [Task(command=words, folder=f"{tmp_path}/runs/not/yet/there")]
    job = make_job(place("slurm", spec), tasks, data=[tmp_path / "data"], folder="job")
    mounted = {mount.partition(":")[0] for mount in mounts_of(job)}
    assert mounted == {str(tmp_path / name) for name in ("here", "runs", "data", "disk/data", "weights")}
    assert mounts_of(replace(job, spec=replace(spec, mounts=f"{tmp_path}:{tmp_path}"))) == [f"{tmp_path}:{tmp_path}"]
    with helpers.refused("root-mount", "/nowhere"):
        mounts_of(replace(job, tasks=(Task(command=words, folder="/nowhere/at/all"),)))


def test_a_job_folder_holds_the_whole_job(tmp_path: Path) -> None:
    job, settings = job_of(tmp_path, "slurm", tasks=2), helpers.tiny_settings()
    write_job(job, settings, job_script(job))
    assert read_job(job.folder) == job
    content = json.loads((job.folder / "job.json").read_text())
    assert content["tasks"][1]["command"][:2] == ["pretrain", "bert-tiny"]
    assert job.tasks[1].command[-2:] == ("--train.seed", str(settings.train.seed + 1))
    assert job.tasks[1].folder == job.tasks[1].command[-3] == f"{tmp_path}/a folder/run-2"
    assert resolve(str(job.folder / "recipe.toml")) == settings, "the recipe is complete by itself"
    assert content["code"] == code_version()
    with helpers.refused("folder-exists", job.folder):
        write_job(job, settings, "")
    content["tasks"][1]["folder"] *= 300
    for damaged in (content, {}):
        (job.folder / "job.json").write_text(json.dumps(damaged))
        with helpers.refused("damaged-job", job.folder / "job.json"):
            read_job(job.folder)
    with helpers.refused("missing-job", tmp_path):
        read_job(tmp_path)


def test_directives_hold_any_name_together(tmp_path: Path) -> None:
    """A per cent sign stands for something to Slurm, a hash begins a comment, and names are of few letters."""
    task = Task(command=("pretrain",), folder="a run#1")
    slurm, pbs = (place(which, JobSpec(procs_per_node=1)) for which in LAUNCHERS if which in ("slurm", "pbs"))
    scripts = [job_script(make_job(where, [task], folder=tmp_path / "50% #2")) for where in (slurm, pbs)]
    assert "#SBATCH --job-name=a_run_1\n" in scripts[0]
    assert f'#SBATCH --output="{tmp_path}/50%% #2/logs/job-%j.log"\n' in scripts[0]
    assert "#PBS -N a_run_1\n" in scripts[1]
    assert f'#PBS -o "{tmp_path}/50% #2/logs/"\n' in scripts[1]
    with helpers.refused("quotation-mark", "--job"):
        make_job(slurm, [task], folder=tmp_path / 'a"b')


def test_a_job_does_not_depend_on_where_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_of(tmp_path, "local", python="venv/bin/python").python == str(tmp_path / "venv/bin/python")
    assert job_of(tmp_path, "local", python="python3").python == "python3"
    assert "export BERTRAIN_NODE=0 BERTRAIN_NODES=1" in job_script(job_of(tmp_path, "local"))


def test_repeats_have_folders_and_seeds_of_their_own() -> None:
    task = Task(command=("pretrain", "bert-tiny", "--run", "run", "--seed", "3"), folder="run")
    drawn = repeat_task([task], 2, helpers.tiny_settings(train__seed=-1))
    assert drawn[1].command == ("pretrain", "bert-tiny", "--run", "run-2", "--seed", "3")
    assert repeat_task([task], 2, helpers.tiny_settings(train__seed=3))[1].command[-2:] == ("--seed", "4")
    with helpers.refused("cannot-repeat"):
        repeat_task([Task(command=("profile", "run"))], 2, helpers.tiny_settings())


def test_an_agent_leaves_the_logging_of_its_process_alone() -> None:
    before = dict(os.environ)
    try:
        assert run_agent(1, ["-c", "pass"]) == (0, {})
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert logging.root.manager.disable == logging.NOTSET


def test_a_dry_run_predicts_the_time_on_the_gpu_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.make_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    job = ("launch", "slurm", "--nodes", 2, "--gpus-per-node", 8, "--dry-run")
    command = ("--", "pretrain", "bert-base", "--data", "data", "--run", "run")
    named = command_line(*job, "--gpu", "h100", *command).out.splitlines()[-1]
    assert named.startswith("# time by `bertrain plan` for 16 h100 in 2 machines")
    assert named.endswith(" for 100,000 steps")
    unnamed = command_line(*job, *command).out.splitlines()[-1]
    assert unnamed.startswith("# time: not predicted")
    assert "--gpu" in unnamed
    on_cpu = command_line("launch", "slurm", "--nodes", 2, "--procs-per-node", 2, "--dry-run", *command).out
    assert on_cpu.splitlines()[-1].startswith("# time: not predicted, as the nodes' CPU")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ("--gpus-per-node 2 --gpu h900 -- pretrain bert-tiny --data data --run run", "unknown-gpu", "h200"),
        ("--procs-per-node 2 --gpu h100 -- pretrain bert-tiny --data data --run run", "conflicting-options", "--gpu"),
        ("--gpus-per-node 1 --gpu h100 -- doctor", "option-without-effect", "--gpu"),
        ("--gpus-per-node 1 --runtime apptainer -- doctor", "option-without-effect", "--runtime needs --container"),
        ("--gpus-per-node 2 -- pretrian bert-tiny --data data", "usage", "'pretrain'"),
        ("--gpus-per-node 2 -- pretrain bert-tiny", "usage", "--data"),
        ("--gpus-per-node 2 -- pretrain bert-tiny --dta data", "unknown-option", "--data"),
    ],
)
def test_the_error_is_that_of_the_command(arguments: str, code: str, named: str, tmp_path: Path) -> None:
    done = command_line("launch", "slurm", "--dry-run", *arguments.split(), check=False)
    assert done.code == 2
    assert f"[{code}]" in done.err
    assert named in done.err
    assert done.out == ""


def test_a_dry_run_moves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROLLED_BACK, raising=False)
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(train__max_steps=4, checkpoint__every_steps=2), data, run)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    words = ("resume", run, "--from-step", 2)
    done = command_line("launch", "slurm", "--procs-per-node", 1, "--dry-run", "--", *words)
    assert "--from-step" in done.out
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    assert ROLLED_BACK not in os.environ


def test_commands_that_cannot_be_launched_end_in_a_sentence(tmp_path: Path) -> None:
    job = ("launch", "local", "--procs-per-node", 1, "--dry-run", "--")
    said = command_line(*job, "mlperf", check=False)
    assert (said.code, "[missing-command]" in said.err) == (2, True)
    one = ("mlperf", "run", "mlperf-intel-8x4x64", "--data", tmp_path, "--out", tmp_path / "out", "--only", 0)
    for words in ((*job, *one), (*one, "--dry-run")):
        said = command_line(*words, check=False)
        assert (said.code, "[conflicting-options]" in said.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_repeats_of_a_command_with_equals_signs() -> None:
    command = ("pretrain", "bert-tiny", "--run=r", "--seed=5", "--data", "d")
    repeated = repeat_task([Task(command=command, folder="r")], 2, helpers.tiny_settings(train__seed=5))
    assert [task.folder for task in repeated] == ["r-1", "r-2"]
    assert [task.command[-2:] for task in repeated] == [("--seed", "5"), ("--seed", "6")]
    assert all("--run=r" not in task.command and "--seed=5" not in task.command for task in repeated)
