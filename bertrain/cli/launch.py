"""The commands of `bertrain launch`."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.cli import options
from bertrain.launch.job import JobSpec, Launcher, MpiType, Placement, Runtime, Task, make_job, place
from bertrain.planning.devices import find_gpu

if TYPE_CHECKING:
    from bertrain.config.settings import Settings
    from bertrain.planning.devices import Gpu

app = options.new_app("launch", "Run a bertrain command as a job, on this machine or a cluster.")

Job = Annotated[Path, typer.Argument(metavar="JOB", help="a job folder")]
Nodes = Annotated[int, Option(min=1, help="number of nodes")]
ListedNodes = Annotated[int, Option(min=0, help="number of nodes; 0: all hosts of the hostfile, or this one")]
Array = Annotated[bool, Option("--array", help="submit a job array: each repeat or experiment is a separate job")]
Hostfile = Annotated[str, Option(help="a file with one host per line, such as `node1 slots=8`")]


def _launch(
    context: typer.Context,
    launcher: Launcher,
    job: Annotated[Path | None, Option(help="the job folder to create; default: jobs/NAME-1, -2, ...")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="check the command, print the script and write nothing")] = False,
    gpu: Annotated[
        str, Option(help="GPU of the nodes, such as h100: also print the time that `bertrain plan` predicts")
    ] = "",
    repeats: Annotated[int, Option(min=1, help="number of runs RUN-1, RUN-2, ..., each with the next seed")] = 1,
    env: Annotated[
        list[str] | None, Option(metavar="NAME[=VALUE]", help="an environment variable for the ranks; repeatable")
    ] = None,
    **resources: Any,
) -> None:
    """Let the command behind `--` check itself, then submit it as a job; `resources` are fields of JobSpec."""
    words = context.args
    if "--" not in sys.argv or not words:
        form = f"bertrain launch {launcher} [OPTIONS] -- pretrain bert-tiny --data data --run runs/tiny"
        raise UserError("missing-command", f"write the command to launch after --, such as: {form}")
    runtime = resources.pop("runtime", None)
    if runtime and not resources["container"]:
        raise UserError("option-without-effect", "--runtime needs --container; give both, or leave --runtime out")
    default: Runtime = "pyxis" if launcher == "slurm" else "apptainer"
    placement = place(launcher, JobSpec(runtime=runtime or default, env=tuple(env or ()), **resources))
    if gpu and not placement.spec.gpus_per_node:
        raise UserError("conflicting-options", f"--gpu {gpu} needs --gpus-per-node; give it, or leave --gpu out")
    submission = Submission(placement, job, repeats, dry_run, find_gpu(gpu) if gpu else None)
    root = context.find_root()
    command: Any = root.command
    rest = list(words)
    while hasattr(command, "commands"):
        if not rest:
            raise UserError(
                "missing-command", f"`bertrain {' '.join(words)}` needs a command: {', '.join(command.commands)}"
            )
        _, command, rest = command.resolve_command(root, rest)
    if {"nproc", "engine"} & {parameter.name for parameter in command.params}:  # it knows ranks
        sys.argv[1:] = words
        with options.launching(submission):
            root.command.main(words, prog_name="bertrain", standalone_mode=False)
        return
    if placement.world > 1:
        raise UserError(
            "one-process-command", f"`bertrain {command.name}` runs in one process; launch it as a single rank"
        )
    command.make_context(command.name, rest)  # refuses wrong options
    submission.submit([words], [], 0, None, [])


@dataclass(frozen=True)
class Submission:
    """A job in the making, which the command completes."""

    placement: Placement
    folder: Path | None
    repeats: int
    dry_run: bool
    gpu: Gpu | None = None

    @property
    def world(self) -> int:
        return self.placement.world

    def submit(
        self, commands: Sequence[Sequence[str]], folders: Sequence[Path], restarts: int, settings: Settings | None,
        data: Sequence[Path], before: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Write the job folder and submit the job, or print its script; `before` may set variables for its ranks."""
        from bertrain.launch.scripts import job_script
        from bertrain.launch.submit import submit_job

        own = [str(folder) for folder in folders] or [""] * len(commands)
        if len(own) > len(commands):  # one command that makes several runs, such as `finetune --seeds`
            own = [os.path.commonpath(own)]
        tasks = [Task(command=tuple(words), folder=folder) for words, folder in zip(commands, own, strict=True)]
        if self.repeats > 1:
            tasks = repeat_task(tasks, self.repeats, settings)
        make = partial(make_job, self.placement, tasks, data=data, restarts=restarts, folder=self.folder)
        job = make()
        time = self.predict(commands[0], settings, data)
        if self.dry_run:
            print("\n".join([job_script(job), *(f"# {line}" for line in time)]))
            return
        before()
        job = make()
        what = counted(job.world, "rank") + (f", {len(tasks)} tasks" if len(tasks) > 1 else "")
        print(f"job {job.folder}: {what}; follow it with `bertrain launch logs {job.folder}`", flush=True)
        if self.gpu is not None:
            print(*time, sep="\n", flush=True)
        print(f"submitted as {submit_job(job, settings)}")

    def predict(self, command: Sequence[str], settings: Settings | None, data: Sequence[Path]) -> list[str]:
        """The time of a job that pre-trains on GPUs, in a line, or why it is not known; nothing for other jobs."""
        is_planned = command[0] == "pretrain" or list(command[:2]) == ["mlperf", "run"]
        if settings is None or not is_planned:
            if self.gpu is not None:
                raise UserError("option-without-effect", "--gpu is only for `pretrain` and `mlperf run`; leave it out")
            return []
        if not self.placement.spec.gpus_per_node:
            return ["time: not predicted, as the nodes' CPU is measured only when the run starts, which prints it"]
        if self.gpu is None:
            return ["time: not predicted, as the nodes' GPU is not known here; name it, such as --gpu h100"]
        if not data[0].exists():
            return [f"time: not predicted, as {data[0]} is not on this machine"]
        from bertrain.data.formats.source import open_data
        from bertrain.planning.prediction import predict_run
        from bertrain.training.resolve_auto import fit_to_data

        source = open_data(data[0], vocab=settings.data.vocab, verify="size", quiet=True)
        fitted, _ = fit_to_data(settings, source)
        per_node = self.placement.spec.ranks_per_node
        found = predict_run(fitted, source.lengths, self.gpu, self.world, per_node)
        return [found.text() if found else f"time: not predicted; plans do not cover these settings on {self.gpu.name}"]


def repeat_task(tasks: Sequence[Task], repeats: int, settings: Settings | None) -> list[Task]:
    """The same run several times, each with its own folder and seed."""
    (task, *others), words = tasks, [part for word in tasks[0].command for part in _parts(word)]
    named = [word for word in words if word in options.RUN_OPTIONS]
    if others or settings is None or not task.folder or not named:
        raise UserError("cannot-repeat", "--repeats needs a command with --run RUN; leave --repeats out")
    place, seed = words.index(named[0]) + 1, settings.train.seed
    option = "--seed" if "--seed" in words else "--train.seed"

    def again(number: int) -> Task:
        words[place] = f"{task.folder}-{number}"
        seeds = [option, str(seed + number - 1)] if seed >= 0 else []  # below 0: every run draws its own
        return Task(command=(*words, *seeds), folder=words[place])

    return [again(number) for number in range(1, repeats + 1)]


def _parts(word: str) -> list[str]:
    """--name=value as two words."""
    name, equals, value = word.partition("=")
    return [name, value] if word.startswith("--") and equals else [word]


def _resources(
    gpus_per_node: Annotated[int, Option(min=0, help="ranks per node, each with a GPU")] = 0,
    procs_per_node: Annotated[int, Option(min=0, help="ranks per node, without GPUs")] = 0,
    time: Annotated[str, Option(help="time limit, such as 2h or 02:00:00")] = "",
    warning: Annotated[str, Option(help="time before the limit at which the job saves and stops")] = "2m",
    python: Annotated[str, Option(help="Python on the nodes; default: this one, or the image's")] = "",
    container: Annotated[str, Option(help="container image to run in")] = "",
    mounts: Annotated[str, Option(help="more folders to mount in the container, such as /data:/data,/raid:/raid")] = "",
    preflight: Annotated[
        bool, Option("--preflight/--no-preflight", help="check every node before the first task")
    ] = True,
) -> None:
    """The options of every launcher, fields of JobSpec."""


def _network(
    nic: Annotated[str, Option(help="network interface for gloo and NCCL; default: chosen by them")] = "",
    port: Annotated[int, Option(min=0, max=65535, help="rendezvous port of the first node; 0: a free one")] = 0,
    rendezvous_host: Annotated[
        str, Option(help="name of the first node as the others see it; default: its own name")
    ] = "",
) -> None:
    """The options of launchers of several nodes."""


def _launcher(launcher: Launcher) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function that only declares its launcher's own options: it takes the common ones too."""

    def decorate(own_options: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own_options)
        def command(**arguments: Any) -> None:
            _launch(launcher=launcher, **arguments)

        parameters: list[inspect.Parameter] = []
        declarations: list[Callable[..., None]] = [_launch, _resources, own_options, _network]
        for declaration in declarations[: 3 if launcher == "local" else 4]:
            declared = inspect.signature(declaration, eval_str=True).parameters.values()
            parameters += [one for one in declared if one.name not in ("launcher", "resources")]
        usage = "[OPTIONS] -- COMMAND [OPTIONS OF THE COMMAND]"
        return app.command(launcher, context_settings={"allow_extra_args": True}, options_metavar=usage)(
            options.with_parameters(command, parameters)
        )

    return decorate


@_launcher("local")
def launch_local() -> None:
    """Run a job on this machine, with a job folder and logs as on a cluster.

    Example: bertrain launch local --procs-per-node 2 -- pretrain bert-tiny --data data --run runs/tiny
    """


@_launcher("ssh")
def launch_ssh(
    hostfile: Hostfile,
    nodes: ListedNodes = 0,
    ssh: Annotated[str, Option(help="the ssh command, such as `ssh -F my-config`")] = "ssh",
) -> None:
    """Run a job over ssh, on the hosts of a list.

    Example: bertrain launch ssh --hostfile hosts --gpus-per-node 8 -- pretrain bert-base --data data --run runs/base
    """


@_launcher("slurm")
def launch_slurm(
    nodes: Nodes = 1,
    partition: Annotated[str, Option(help="Slurm's partition")] = "",
    account: Annotated[str, Option(help="Slurm's account")] = "",
    gres: Annotated[str, Option(help="Slurm's --gres per node, for sbatch and every srun; default: gpu:G")] = "",
    constraint: Annotated[str, Option(help="features that nodes must have")] = "",
    nodelist: Annotated[str, Option(help="nodes to use; if they are fewer than --nodes, Slurm adds others")] = "",
    cpus_per_node: Annotated[int, Option(min=0, help="CPUs per node; 0: whole nodes, exclusively")] = 0,
    array: Array = False,
    mpi: Annotated[MpiType, Option(help="srun's --mpi; bertrain needs none")] = "none",
    runtime: Annotated[Runtime | None, Option(help="what runs the container; default: pyxis")] = None,
) -> None:
    """Submit a job to Slurm, or run it in place inside an allocation (salloc).

    Example: bertrain launch slurm --nodes 2 --gpus-per-node 8 -- pretrain bert-base --data data --run runs/base
    """


@_launcher("pbs")
def launch_pbs(
    nodes: Annotated[int, Option(min=0, help="number of nodes; 0: as many as --select has chunks, or 1")] = 0,
    queue: Annotated[str, Option(help="PBS's queue")] = "",
    project: Annotated[str, Option(help="PBS's project (-P)")] = "",
    account: Annotated[str, Option(help="PBS's account (-A)")] = "",
    select: Annotated[str, Option(help="chunks in PBS's notation; default: N:ngpus=G")] = "",
    place: Annotated[str, Option(help="placement of the chunks")] = "scatter:excl",
    cpus_per_node: Annotated[int, Option(min=0, help="ncpus of a chunk; 0: PBS's default")] = 0,
    array: Array = False,
    ssh: Annotated[str, Option(help="the ssh command from node to node")] = "ssh",
) -> None:
    """Submit a job to PBS, or run it in place inside an allocation (qsub -I).

    Example: bertrain launch pbs --nodes 2 --gpus-per-node 4 -- finetune glue/mnli --init w --data glue --run runs/mnli
    """


@_launcher("mpi")
def launch_mpi(
    hostfile: Hostfile = "",
    nodes: ListedNodes = 0,
    mpirun: Annotated[str, Option(help="the mpirun command")] = "mpirun",
) -> None:
    """Run a job whose ranks mpirun starts; they communicate over torch.distributed.

    Example: bertrain launch mpi --nodes 2 --procs-per-node 4 -- pretrain bert-base --data data --run runs/base
    """


@app.command("worker", hidden=True)
def launch_worker(
    role: Annotated[Literal["node", "rank", "ssh"], typer.Argument()],
    job: Job,
    stage: Annotated[Literal["preflight", "task"], typer.Argument()],
) -> None:
    """Run one part of a job; the job's script calls this, people do not.

    Example: bertrain launch worker node jobs/tiny-1 task
    """
    from bertrain.launch.job import read_job
    from bertrain.launch.node import exec_rank, run_node
    from bertrain.launch.remote import run_hosts

    opened = read_job(job)
    if role == "rank":
        exec_rank(opened, stage)
    raise typer.Exit(run_hosts(opened, stage) if role == "ssh" else run_node(opened, stage))


@app.command("preflight")
def launch_preflight(job: Job, as_json: options.AsJson = False) -> None:
    """Check every node of a job before it trains, as the job's script does; called by hand, it checks this machine.

    Example: bertrain launch preflight jobs/tiny-1
    """
    from bertrain.launch.preflight import preflight_job

    with options.stdout_for_json(as_json):
        found = preflight_job(job)
    if found is None:
        return
    if not options.printed_json(found, as_json):
        print(found.text())
    found.refuse()


@app.command("logs")
def launch_logs(
    job: Job,
    rank: Annotated[int | None, Option(min=0, help="only this rank")] = None,
    follow: Annotated[bool, Option("--follow", help="wait for new lines until the job ends")] = False,
) -> None:
    """Print the output of a job's ranks; each line starts with its rank.

    Example: bertrain launch logs jobs/tiny-1 --follow
    """
    from bertrain.launch.submit import job_logs

    for line in job_logs(job, rank=rank, follow=follow):
        print(line, flush=True)


@app.command("status")
def launch_status(job: Job, as_json: options.AsJson = False) -> None:
    """Print the state of a job and the progress of its runs.

    Example: bertrain launch status jobs/tiny-1
    """
    from bertrain.launch.submit import job_status

    status = job_status(job)
    if options.printed_json(status, as_json):
        return
    print(f"{status['job']} ({status['launcher']}): {status['state']}")
    for one in status["tasks"]:
        step = f"step {one['step']}; " if one["step"] else ""
        print(f"  {one['command']}: {step}{one['last_event'] or 'not started'}")


@app.command("cancel")
def launch_cancel(job: Job) -> None:
    """Cancel a job; its ranks finish the current step and save it.

    Example: bertrain launch cancel jobs/tiny-1
    """
    from bertrain.launch.submit import cancel_job

    print(cancel_job(job))
