"""The verbs of `bertrain launch`, each a thin skin over one Python function of `bertrain.launch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bertrain.cli.data import AsJson
from bertrain.cli.options import OVERRIDES
from bertrain.config import resolve as config
from bertrain.launch.job import JobSpec, Launcher, MpiType, Runtime, make_job

launch_app = typer.Typer(
    help="Jobs on this machine or a cluster: written into a folder, then started.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Recipe = Annotated[str, typer.Argument(help="a recipe's name, or a .toml file")]
Data = Annotated[Path, typer.Option("--data", help="the data folder, as every node sees it")]
Run = Annotated[Path, typer.Option("--run", help="the run folder to make or continue, as every node sees it")]
SettingsFile = Annotated[Path | None, typer.Option("--settings", help="a .toml file laid over the recipe")]
Init = Annotated[Path | None, typer.Option("--init", help="a run or weights to begin with, as for `pretrain`")]
JobFolder = Annotated[Path | None, typer.Option("--job", help="the job folder to make; default: jobs/RUN-1, -2, ...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show the script and the command, write nothing")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="machines")]
ListedNodes = Annotated[int, typer.Option("--nodes", min=0, help="machines; 0: all of the list, or this one")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="ranks on each, a GPU for each")]
Procs = Annotated[int, typer.Option("--procs-per-node", min=0, help="ranks on each, without GPUs")]
Time = Annotated[str, typer.Option("--time", help="time limit, such as 2h or 02:00:00")]
SaveBefore = Annotated[str, typer.Option("--warning", help="how long before its end a job is told to save")]
Python = Annotated[str, typer.Option("--python", help="the Python of the nodes; default: this one")]
Container = Annotated[str, typer.Option("--container", help="an image to run in")]
ContainerRuntime = Annotated[Runtime, typer.Option("--runtime", help="what runs the container")]
Mounts = Annotated[str, typer.Option("--mounts", help="folders the container sees, such as /data:/data,/runs:/runs")]
Nic = Annotated[str, typer.Option("--nic", help="network interface for gloo and NCCL; default: they choose")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="port of the first node to meet at; 0: a free one")]
RendezvousHost = Annotated[
    str, typer.Option("--rendezvous-host", help="name of the first node, as the others know it; default: its own")
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="so many runs RUN-1, RUN-2, ... with seeds counting up")]
Restarts = Annotated[
    int, typer.Option("--restarts", min=0, help="start all ranks again so often without a new checkpoint")
]
Preflight = Annotated[bool, typer.Option("--preflight/--no-preflight", help="look at every node before training")]
Hostfile = Annotated[str, typer.Option("--hostfile", help="a host per line, such as `node1 slots=8`")]
Job = Annotated[Path, typer.Argument(metavar="JOB", help="a job folder")]


@launch_app.command("local", context_settings=OVERRIDES)
def launch_local(
    context: typer.Context, recipe: Recipe, data: Data, run: Run,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    gpus_per_node: Gpus = 0, procs_per_node: Procs = 0, time: Time = "", warning: SaveBefore = "2m",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Run a job on this machine, its folder and logs as on a cluster.

    Example: bertrain launch local bert-tiny --data data --run runs/tiny --procs-per-node 2
    """
    _launch("local", locals() | {"runtime": "apptainer"})


@launch_app.command("ssh", context_settings=OVERRIDES)
def launch_ssh(
    context: typer.Context, recipe: Recipe, data: Data, run: Run, hostfile: Hostfile,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: ListedNodes = 0, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0,
    time: Time = "", warning: SaveBefore = "2m",
    ssh: Annotated[str, typer.Option("--ssh", help="how ssh is called, such as `ssh -F my-config`")] = "ssh",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Run a job on the hosts of a list, over ssh.

    Example: bertrain launch ssh bert-base-phase1 --data data --run runs/base --hostfile hosts --gpus-per-node 8
    """
    _launch("ssh", locals() | {"runtime": "apptainer"})


@launch_app.command("slurm", context_settings=OVERRIDES)
def launch_slurm(
    context: typer.Context, recipe: Recipe, data: Data, run: Run,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: Nodes = 1, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0, time: Time = "", warning: SaveBefore = "2m",
    partition: Annotated[str, typer.Option("--partition", help="Slurm's partition")] = "",
    account: Annotated[str, typer.Option("--account", help="whose account")] = "",
    gres: Annotated[str, typer.Option("--gres", help="of each node, for sbatch and every srun; default: gpu:G")] = "",
    constraint: Annotated[str, typer.Option("--constraint", help="features that nodes must have")] = "",
    nodelist: Annotated[str, typer.Option("--nodelist", help="these very nodes")] = "",
    cpus_per_node: Annotated[int, typer.Option("--cpus-per-node", min=0, help="0: whole nodes, exclusively")] = 0,
    mpi: Annotated[MpiType, typer.Option("--mpi", help="srun's --mpi; nothing here needs one")] = "none",
    python: Python = "", container: Container = "", runtime: ContainerRuntime = "pyxis", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Submit a job to Slurm, or run it in place inside an allocation (salloc).

    Example: bertrain launch slurm bert-base-phase1 --data data --run runs/base --nodes 2 --gpus-per-node 8 --time 4h
    """
    _launch("slurm", locals())


@launch_app.command("pbs", context_settings=OVERRIDES)
def launch_pbs(
    context: typer.Context, recipe: Recipe, data: Data, run: Run,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: Nodes = 1, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0, time: Time = "", warning: SaveBefore = "2m",
    queue: Annotated[str, typer.Option("--queue", help="PBS's queue")] = "",
    project: Annotated[str, typer.Option("--project", help="whose account")] = "",
    select: Annotated[str, typer.Option("--select", help="chunks, as PBS writes them; default: N:ngpus=G")] = "",
    place: Annotated[str, typer.Option("--place", help="how chunks are placed")] = "scatter:excl",
    cpus_per_node: Annotated[int, typer.Option("--cpus-per-node", min=0, help="ncpus of a chunk; 0: PBS's own")] = 0,
    ssh: Annotated[str, typer.Option("--ssh", help="how ssh from node to node is called")] = "ssh",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Submit a job to PBS, or run it in place inside an allocation (qsub -I).

    Example: bertrain launch pbs bert-base-phase1 --data data --run runs/base --nodes 2 --gpus-per-node 4 --time 4h
    """
    _launch("pbs", locals() | {"runtime": "apptainer"})


@launch_app.command("mpi", context_settings=OVERRIDES)
def launch_mpi(
    context: typer.Context, recipe: Recipe, data: Data, run: Run,
    hostfile: Hostfile = "",
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: ListedNodes = 0, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0,
    time: Time = "", warning: SaveBefore = "2m",
    mpirun: Annotated[str, typer.Option("--mpirun", help="how mpirun is called")] = "mpirun",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Run a job whose ranks mpirun starts; they talk over torch.distributed all the same.

    Example: bertrain launch mpi bert-base-phase1 --data data --run runs/base --nodes 2 --procs-per-node 4
    """
    _launch("mpi", locals() | {"runtime": "apptainer"})


def _launch(launcher: Launcher, given: dict[str, Any]) -> None:
    """Resolve, write, submit; `given` are the arguments of a verb by their names, which are those of JobSpec too."""
    from bertrain.launch.scripts import job_script
    from bertrain.launch.submit import submit_job

    spec = JobSpec(**{name: value for name, value in given.items() if name in JobSpec.__dataclass_fields__})
    overrides = config.parse_overrides(given["context"].args)
    defaults = [("train.binding", "auto"), ("train.device", "cuda" if spec.gpus_per_node else "cpu")]
    names = {name for name, _ in overrides}
    overrides = [pair for pair in defaults if pair[0] not in names] + overrides
    settings = config.resolve(given["recipe"], overrides, given["settings_file"])
    job = make_job(
        launcher, settings, given["data"], given["run"],
        spec=spec, folder=given["job"], init=str(given["init"] or ""),
    )  # fmt: skip
    if given["dry_run"]:
        print(job_script(job))
        return
    print(f"job {job.folder}: {job.world} rank(s); follow it with `bertrain launch logs {job.folder}`", flush=True)
    number = submit_job(job, settings)
    print(f"submitted as {number}")


@launch_app.command("preflight")
def launch_preflight(job: Job, as_json: AsJson = False) -> None:
    """Look at every node of a job before it trains: the job's script does it; by hand it looks at this machine.

    Example: bertrain launch preflight jobs/tiny-1
    """
    from bertrain.launch.preflight import preflight_job

    found = preflight_job(job)
    if found is None:
        return
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        print(found.text())
    found.refuse()


@launch_app.command("logs")
def launch_logs(
    job: Job,
    rank: Annotated[int | None, typer.Option(min=0, help="only this rank")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="go on until the job ends")] = False,
) -> None:
    """What the ranks of a job say, each line with its rank before it.

    Example: bertrain launch logs jobs/tiny-1 --follow
    """
    from bertrain.launch.submit import job_logs

    for line in job_logs(job, rank=rank, follow=follow):
        print(line, flush=True)


@launch_app.command("status")
def launch_status(job: Job, as_json: AsJson = False) -> None:
    """What a job is doing, and how far its run has come.

    Example: bertrain launch status jobs/tiny-1
    """
    from bertrain.launch.submit import job_status

    status = job_status(job)
    if as_json:
        print(json.dumps(status))
        return
    print(f"{status['job']} ({status['launcher']}): {status['state']}")
    for one in status["runs"]:
        print(f"  {one['run']}: step {one['step']}; {one['last_event'] or 'not started'}")


@launch_app.command("cancel")
def launch_cancel(job: Job) -> None:
    """End a job; its ranks finish the step in hand and save it.

    Example: bertrain launch cancel jobs/tiny-1
    """
    from bertrain.launch.submit import cancel_job

    print(cancel_job(job))
