"""The verbs of `bertrain launch`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from bertrain.cli import options
from bertrain.config import resolve as config
from bertrain.launch.job import JobSpec, Launcher, MpiType, Runtime, make_job

app = options.new_app("launch", "Jobs on this machine or a cluster: written into a folder, then started.")

Job = Annotated[Path, typer.Argument(metavar="JOB", help="a job folder")]
Nodes = Annotated[int, Option(min=1, help="machines")]
ListedNodes = Annotated[int, Option(min=0, help="machines; 0: all hosts of the hostfile, or this one")]
Hostfile = Annotated[str, Option(help="a file with a host per line, such as `node1 slots=8`")]


def _launch(
    launcher: Launcher,
    recipe: options.RecipeName,
    data: Annotated[Path, Option(help="the data folder, as every node sees it")],
    run: Annotated[Path, Option(help="the run folder to create or continue, as every node sees it")],
    overrides: options.Overrides,
    settings_file: options.SettingsFile = None,
    init: Annotated[Path | None, Option(help="initial weights, as for `pretrain`")] = None,
    job: Annotated[Path | None, Option(help="the job folder to create; default: jobs/RUN-1, -2, ...")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="print the script and write nothing")] = False,
    **resources: Any,
) -> None:
    """Resolve the settings, write the job folder and submit the job; `resources` are fields of JobSpec."""
    from bertrain.launch.scripts import job_script
    from bertrain.launch.submit import submit_job

    spec = JobSpec(**{"runtime": "apptainer"} | resources)
    defaults = [("train.binding", "auto"), ("train.device", "cuda" if spec.gpus_per_node else "cpu")]
    settings = config.resolve(recipe, [*defaults, *overrides], settings_file)
    made = make_job(launcher, settings, data, run, spec=spec, folder=job, init=str(init or ""))
    if dry_run:
        print(job_script(made))
        return
    print(f"job {made.folder}: {made.world} rank(s); follow it with `bertrain launch logs {made.folder}`", flush=True)
    print(f"submitted as {submit_job(made, settings)}")


def _resources(
    gpus_per_node: Annotated[int, Option(min=0, help="ranks per node, each with a GPU")] = 0,
    procs_per_node: Annotated[int, Option(min=0, help="ranks per node, without GPUs")] = 0,
    time: Annotated[str, Option(help="time limit, such as 2h or 02:00:00")] = "",
    warning: Annotated[str, Option(help="time before the limit at which the job saves and stops")] = "2m",
    python: Annotated[str, Option(help="the Python of the nodes; default: this one")] = "",
    container: Annotated[str, Option(help="an image to run in")] = "",
    mounts: Annotated[str, Option(help="folders the container sees, such as /data:/data,/runs:/runs")] = "",
    repeats: Annotated[int, Option(min=1, help="number of runs RUN-1, RUN-2, ...; their seeds count up")] = 1,
    restarts: Annotated[int, Option(min=0, help="restarts of all ranks in a row without a new checkpoint")] = 0,
    preflight: Annotated[bool, Option("--preflight/--no-preflight", help="check every node before training")] = True,
) -> None:
    """The options of every launcher, fields of JobSpec."""


def _network(
    nic: Annotated[str, Option(help="network interface for gloo and NCCL; default: they choose")] = "",
    port: Annotated[int, Option(min=0, max=65535, help="rendezvous port of the first node; 0: a free one")] = 0,
    rendezvous_host: Annotated[str, Option(help="the first node's name on the others; default: its own name")] = "",
) -> None:
    """The options of launchers of several nodes."""


def _launcher(launcher: Launcher) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a verb of a function that only declares its launcher's own options: it takes the common ones too."""

    def decorate(own_options: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own_options)
        def verb(**arguments: Any) -> None:
            _launch(launcher, **arguments)

        parameters: list[inspect.Parameter] = []
        declarations: list[Callable[..., None]] = [_launch, _resources, own_options, _network]
        for declaration in declarations[: 3 if launcher == "local" else 4]:
            declared = inspect.signature(declaration, eval_str=True).parameters.values()
            own = [one for one in declared if one.name not in ("launcher", "resources")]
            parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        verb.__dict__["__signature__"] = inspect.Signature(parameters)
        return app.command(launcher, context_settings=options.OVERRIDES)(options.takes_settings()(verb))

    return decorate


@_launcher("local")
def launch_local() -> None:
    """Run a job on this machine, its folder and logs as on a cluster.

    Example: bertrain launch local bert-tiny --data data --run runs/tiny --procs-per-node 2
    """


@_launcher("ssh")
def launch_ssh(
    hostfile: Hostfile,
    nodes: ListedNodes = 0,
    ssh: Annotated[str, Option(help="the ssh command, such as `ssh -F my-config`")] = "ssh",
) -> None:
    """Run a job on the hosts of a list, over ssh.

    Example: bertrain launch ssh bert-base-phase1 --data data --run runs/base --hostfile hosts --gpus-per-node 8
    """


@_launcher("slurm")
def launch_slurm(
    nodes: Nodes = 1,
    partition: Annotated[str, Option(help="Slurm's partition")] = "",
    account: Annotated[str, Option(help="Slurm's account")] = "",
    gres: Annotated[str, Option(help="per node, for sbatch and every srun; default: gpu:G")] = "",
    constraint: Annotated[str, Option(help="features that nodes must have")] = "",
    nodelist: Annotated[str, Option(help="only these nodes")] = "",
    cpus_per_node: Annotated[int, Option(min=0, help="0: whole nodes, exclusively")] = 0,
    mpi: Annotated[MpiType, Option(help="srun's --mpi; bertrain needs none")] = "none",
    runtime: Annotated[Runtime, Option(help="what runs the container")] = "pyxis",
) -> None:
    """Submit a job to Slurm, or run it in place inside an allocation (salloc).

    Example: bertrain launch slurm bert-base-phase1 --data data --run runs/base --nodes 2 --gpus-per-node 8 --time 4h
    """


@_launcher("pbs")
def launch_pbs(
    nodes: Nodes = 1,
    queue: Annotated[str, Option(help="PBS's queue")] = "",
    project: Annotated[str, Option(help="PBS's project")] = "",
    select: Annotated[str, Option(help="chunks in PBS's notation; default: N:ngpus=G")] = "",
    place: Annotated[str, Option(help="placement of the chunks")] = "scatter:excl",
    cpus_per_node: Annotated[int, Option(min=0, help="ncpus of a chunk; 0: PBS's own")] = 0,
    ssh: Annotated[str, Option(help="the ssh command from node to node")] = "ssh",
) -> None:
    """Submit a job to PBS, or run it in place inside an allocation (qsub -I).

    Example: bertrain launch pbs bert-base-phase1 --data data --run runs/base --nodes 2 --gpus-per-node 4 --time 4h
    """


@_launcher("mpi")
def launch_mpi(
    hostfile: Hostfile = "",
    nodes: ListedNodes = 0,
    mpirun: Annotated[str, Option(help="the mpirun command")] = "mpirun",
) -> None:
    """Run a job whose ranks mpirun starts; they communicate over torch.distributed.

    Example: bertrain launch mpi bert-base-phase1 --data data --run runs/base --nodes 2 --procs-per-node 4
    """


@app.command("worker", hidden=True)
def launch_worker(
    role: Annotated[Literal["node", "rank", "ssh"], typer.Argument()],
    job: Job,
    stage: Annotated[Literal["preflight", "training"], typer.Argument()],
) -> None:
    """Run one part of a job; the job's script calls this, people do not.

    Example: bertrain launch worker node jobs/tiny-1 training
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
    """Check every node of a job before it trains, as the job's script does; by hand it checks this machine.

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
    for one in status["runs"]:
        print(f"  {one['run']}: step {one['step']}; {one['last_event'] or 'not started'}")


@app.command("cancel")
def launch_cancel(job: Job) -> None:
    """Cancel a job; its ranks finish the current step and save it.

    Example: bertrain launch cancel jobs/tiny-1
    """
    from bertrain.launch.submit import cancel_job

    print(cancel_job(job))
