"""Writes the script of a job, one kind for each launcher: plain bash, complete, and the same each time.

All scripts share their last part, common.sh, which runs a stage on every node (the pre-flight, then the training),
forwards signals, restarts ranks that failed, and notes each event in the job folder. They differ in the resources they
request from a scheduler, in how they start a stage on every node, and in how they requeue the job.
"""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.launch.job import HOSTS, ONLY_HERE, Job, parse_time, write_time
from bertrain.launch.local import SAVE_TIMEOUT_S

SAVE_MARGIN_S = 30


class LauncherPart(NamedTuple):
    """The lines in which the script of one launcher differs from the others."""

    directives: list[str]
    start: list[str]
    requeue: str


def job_script(job: Job) -> str:
    make_part = {"local": _local, "ssh": _ssh, "slurm": _slurm, "pbs": _pbs, "mpi": _mpi}[job.launcher]
    part = make_part(job)
    lines = ["#!/bin/bash", *part.directives, *_settings(job), *part.start, *_tasks(job), part.requeue]
    return "\n".join([*lines, _shell_part("common.sh")])


def _shell_part(name: str) -> str:
    """A part of a script that does not depend on the job: a file beside this one."""
    return (resources.files("bertrain.launch") / name).read_text()


def _settings(job: Job) -> list[str]:
    first, others = shlex.join(job.tasks[0].command), len(job.tasks) - 1
    return [
        "",
        f"# Written by `bertrain launch {job.launcher}`, {job.created}; can be submitted again unchanged.",
        f"#   each rank runs: bertrain {first}"
        + (f", then {counted(others, 'more task')} of job.json" if others else ""),
        f"#   on {counted(job.spec.nodes, 'node')}, {counted(job.world, 'rank')} in all; code: {job.describe_code()}",
        "",
        f"job={shlex.quote(str(job.folder))}  # the job folder: logs, events, tasks",
        f"python={shlex.quote(job.python)}",
        f"restarts={job.restarts}  # in a row, without a new checkpoint",
        f"preflight={'yes' if job.spec.preflight else ''}",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
        "",
    ]


def _start_stage(words: list[str], comment: str) -> list[str]:
    """The shell function that replaces its process with the command which runs a stage ($1) on every node."""
    return [f"# {comment}", "start_stage() {", "    exec " + " \\\n        ".join(words), "}"]


def _launch_module(job: Job, role: str) -> list[str]:
    return [*container_command(job), f'"$python" -u -m bertrain launch worker {role} "$job" "$@"']


def container_command(job: Job) -> list[str]:
    """The words before Python that run it in an Apptainer container; pyxis takes options of srun instead."""
    if not job.spec.container or job.spec.runtime != "apptainer":
        return []
    foreign = [f"-u {name}" for name in ONLY_HERE if name not in job.environment]  # which Apptainer would hand on
    mounts = [f"--bind {shlex.quote(mount)}" for mount in mounts_of(job)]
    gpu = ["--nv"] if job.spec.gpus_per_node else []
    return [" ".join(["env", *foreign, "apptainer exec", *gpu, *mounts, shlex.quote(job.spec.container)])]


def mounts_of(job: Job) -> list[str]:
    """What the container sees: `--mounts`, and the folders of all that the job reads and writes, if those lack them.

    A path is mounted as it was given and as it is without links, since both names are used.
    """
    given = [mount for mount in job.spec.mounts.split(",") if mount]
    seen = {Path(mount.split(":")[1 if ":" in mount else 0]) for mount in given}
    words = [Path(job.directory, word.rpartition("=")[2]) for task in job.tasks for word in task.command]
    named = [path for path in words if path.exists()]
    written = [job.folder, *(Path(task.folder).parent for task in job.tasks if task.folder)]
    for path in (Path(job.directory), *written, *map(Path, job.data), *named):
        for place in (path, path.resolve()):
            folder = next(parent for parent in (place, *place.parents) if parent.is_dir())
            if folder == Path("/"):
                raise UserError(
                    "root-mount", f"no folder above {path} exists but /, which cannot be mounted; create {path}"
                )
            if not seen & {folder, *folder.parents}:
                seen.add(folder)
                given.append(f"{folder}:{folder}")
    return given


def _tasks(job: Job) -> list[str]:
    every = f'$(seq -s " " {len(job.tasks)})'  # also inside an allocation that is no job array
    of_array = {
        "slurm": f"${{SLURM_ARRAY_TASK_ID:-{every}}}",
        "pbs": f"${{BERTRAIN_ONLY:-${{PBS_ARRAY_INDEX:-{every}}}}}",
    }
    folders = " ".join(shlex.quote(task.folder) for task in job.tasks)
    output = "$job/task-$task" if len(job.tasks) > 1 else "$job"
    return [
        "",
        "# The tasks of job.json that this script runs, one after another, and the folder that each writes.",
        f'tasks="{of_array.get(job.launcher, every) if job.is_array else every}"',
        f"folders=('' {folders})",
        f'set_output() {{ output="{output}"; }}',
        "",
    ]


def _local(job: Job) -> LauncherPart:
    start = [
        "export BERTRAIN_NODE=0 BERTRAIN_NODES=1",  # even inside an allocation of several nodes
        "",
        *_start_stage(_launch_module(job, "node"), "A single node: this machine."),
        *_timer(job),
    ]
    return LauncherPart([], start, "")


def _start_over_ssh(job: Job) -> list[str]:
    comment = "One ssh connection per host carries output and signals; a node stops when its connection closes."
    return _start_stage(_launch_module(job, "ssh"), comment)


def _ssh(job: Job) -> LauncherPart:
    start = [f'export BERTRAIN_HOSTS="$job/{HOSTS}"', "", *_start_over_ssh(job), *_timer(job)]
    return LauncherPart([], start, "")


def _mpi(job: Job) -> LauncherPart:
    spec = job.spec
    placement = f'--hostfile "$job/{HOSTS}" --map-by slot' if job.hosts else f"--map-by ppr:{spec.ranks_per_node}:node"
    variables = ["BERTRAIN_START", "BERTRAIN_TASK", "BERTRAIN_FAILED", *job.environment]
    words = [
        f"{spec.mpirun} -np {job.world} {placement} --bind-to none",
        " ".join(f"-x {name}" for name in variables),
        *_launch_module(job, "rank"),
    ]
    start = [
        "forward_as=USR1  # mpirun forwards USR1 to the ranks, but not TERM",
        "export BERTRAIN_FAILED=''",
        "",
        *_start_stage(words, "mpirun only starts the ranks; they communicate with torch.distributed."),
        *_timer(job),
    ]
    return LauncherPart([], start, "")


def _slurm(job: Job) -> LauncherPart:
    spec = job.spec
    gres = spec.gres or (f"gpu:{spec.gpus_per_node}" if spec.gpus_per_node else "")
    options = {
        "job-name": _job_name(job),
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(spec.cpus_per_node or ""),
        "gres": gres,
        "time": write_time(parse_time(spec.time, "--time")) if spec.time else "",
        "partition": spec.partition,
        "account": spec.account,
        "constraint": spec.constraint,
        "nodelist": spec.nodelist,
        "array": f"1-{len(job.tasks)}" if job.is_array else "",
        "signal": f"B:USR1@{parse_time(spec.warning, '--warning')}",
        "output": f"{str(job.folder).replace('%', '%%')}/logs/{'job-%A_%a' if job.is_array else 'job-%j'}.log",
        "open-mode": "append",
    }
    directives = [f"#SBATCH --{name}={_quote_directive(value)}" for name, value in options.items() if value]
    directives += ["#SBATCH --requeue"]
    directives += [] if spec.cpus_per_node else ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    words = [
        f"srun --nodes={spec.nodes} --ntasks={spec.nodes} --ntasks-per-node=1",
        '--cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none',
        *([f"--gres={shlex.quote(gres)}"] if gres else []),
        f"--mpi={spec.mpi} --kill-on-bad-exit=0 --wait={SAVE_TIMEOUT_S + SAVE_MARGIN_S}",
    ]
    if spec.container and spec.runtime == "pyxis":
        mounts = shlex.quote(",".join(mounts_of(job)))
        words.append(f"--container-image={shlex.quote(spec.container)} --container-mounts={mounts}")
    comment = "One task on each node, which starts the ranks of that node."
    return LauncherPart(
        directives, _start_stage([*words, *_launch_module(job, "node")], comment), _shell_part("slurm.sh")
    )


def _quote_directive(value: str) -> str:
    """A value as schedulers read it; `JobSpec.check` has refused quotation marks in it."""
    return value if re.fullmatch(r"[\w./:=@%+,&|()*\[\]-]+", value) else f'"{value}"'


def _job_name(job: Job) -> str:
    """A name that every scheduler accepts."""
    return re.sub(r"[^\w.+-]", "_", job.name, flags=re.ASCII)


def _pbs(job: Job) -> LauncherPart:
    spec = job.spec
    chunk = [f"{spec.nodes}"]
    chunk += [f"ncpus={spec.cpus_per_node}"] if spec.cpus_per_node else []
    chunk += [f"ngpus={spec.gpus_per_node}"] if spec.gpus_per_node else []
    options = {
        "-N ": _job_name(job)[:15],
        "-l select=": spec.select or ":".join(chunk),
        "-l place=": spec.place or "scatter:excl",
        "-l walltime=": write_time(parse_time(spec.time, "--time")) if spec.time else "",
        "-q ": spec.queue,
        "-P ": spec.project,
        "-A ": spec.account,
        "-J ": f"1-{len(job.tasks)}" if job.is_array else "",
        "-r ": "y",
        "-j ": "oe",
        "-o ": _quote_directive(f"{job.folder}/logs/"),
    }
    directives = [f"#PBS {option}{value}" for option, value in options.items() if value]
    start = [
        "# The hosts of the allocation, each once, in order; this script runs on the first.",
        'BERTRAIN_HOSTS="$job/hosts-${PBS_JOBID:?this script is run by PBS, or in place by bertrain launch pbs}"',
        'awk \'!seen[$1]++\' "$PBS_NODEFILE" > "$BERTRAIN_HOSTS"',
        "export BERTRAIN_HOSTS",
        "",
        *_start_over_ssh(job),
        *_timer(job),
    ]
    return LauncherPart(directives, start, _shell_part("pbs.sh"))


def _timer(job: Job) -> list[str]:
    """Sends the warning before `--time` is over, where no scheduler does."""
    if not job.spec.time:
        return []
    seconds = parse_time(job.spec.time, "--time") - parse_time(job.spec.warning, "--warning")
    return [
        "",
        f"# Sends USR1 to this script {job.spec.warning} before its time ({job.spec.time}) is over: no scheduler does.",
        f'( trap \'kill "$!"; exit\' TERM; sleep {seconds} & wait "$!" && kill -s USR1 $$ ) &',
        "timer=$!",
    ]
