"""The verbs of `bertrain launch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertrain.cli.options import OVERRIDES, AsJson, Overrides, RecipeName, SettingsFile, takes_settings
from bertrain.config import resolve as config
from bertrain.launch.job import JobSpec, Launcher, MpiType, Runtime, make_job

launch_app = typer.Typer(
    help="Jobs on this machine or a cluster: written into a folder, then started.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Data = Annotated[Path, typer.Option("--data", help="the data folder, as every node sees it")]
Run = Annotated[Path, typer.Option("--run", help="the run folder to create or continue, as every node sees it")]
Init = Annotated[Path | None, typer.Option("--init", help="initial weights, as for `pretrain`")]
JobFolder = Annotated[Path | None, typer.Option("--job", help="the job folder to create; default: jobs/RUN-1, -2, ...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the script and write nothing")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="machines")]
ListedNodes = Annotated[int, typer.Option("--nodes", min=0, help="machines; 0: all hosts of the hostfile, or this one")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="ranks per node, each with a GPU")]
Procs = Annotated[int, typer.Option("--procs-per-node", min=0, help="ranks per node, without GPUs")]
Time = Annotated[str, typer.Option("--time", help="time limit, such as 2h or 02:00:00")]
SaveBefore = Annotated[str, typer.Option("--warning", help="time before the limit at which the job saves and stops")]
Python = Annotated[str, typer.Option("--python", help="the Python of the nodes; default: this one")]
Container = Annotated[str, typer.Option("--container", help="an image to run in")]
ContainerRuntime = Annotated[Runtime, typer.Option("--runtime", help="what runs the container")]
Mounts = Annotated[str, typer.Option("--mounts", help="folders the container sees, such as /data:/data,/runs:/runs")]
Nic = Annotated[str, typer.Option("--nic", help="network interface for gloo and NCCL; default: they choose")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="rendezvous port of the first node; 0: a free one")]
RendezvousHost = Annotated[
    str, typer.Option("--rendezvous-host", help="the first node's name on the other nodes; default: its own name")
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="number of runs RUN-1, RUN-2, ...; their seeds count up")
]
Restarts = Annotated[
    int, typer.Option("--restarts", min=0, help="restarts of all ranks in a row without a new checkpoint")
]
Preflight = Annotated[bool, typer.Option("--preflight/--no-preflight", help="check every node before training")]
Hostfile = Annotated[str, typer.Option("--hostfile", help="a file with a host per line, such as `node1 slots=8`")]
Job = Annotated[Path, typer.Argument(metavar="JOB", help="a job folder")]


@launch_app.command("local", context_settings=OVERRIDES)
@takes_settings()
def launch_local(
    recipe: RecipeName, data: Data, run: Run, overrides: Overrides,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    gpus_per_node: Gpus = 0, procs_per_node: Procs = 0,
    time: Time = "", warning: SaveBefore = "2m",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Run a job on this machine, its folder and logs as on a cluster.

    Example: bertrain launch local bert-tiny --data data --run runs/tiny --procs-per-node 2
    """
    spec = JobSpec(
        gpus_per_node=gpus_per_node, procs_per_node=procs_per_node, time=time, warning=warning, python=python,
        container=container, mounts=mounts, repeats=repeats, restarts=restarts, preflight=preflight,
        runtime="apptainer",
    )  # fmt: skip
    _launch("local", recipe, data, run, overrides, settings_file, init, job, dry_run, spec)


@launch_app.command("ssh", context_settings=OVERRIDES)
@takes_settings()
def launch_ssh(
    recipe: RecipeName, data: Data, run: Run, hostfile: Hostfile, overrides: Overrides,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: ListedNodes = 0, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0,
    time: Time = "", warning: SaveBefore = "2m",
    ssh: Annotated[str, typer.Option("--ssh", help="the ssh command, such as `ssh -F my-config`")] = "ssh",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Run a job on the hosts of a list, over ssh.

    Example: bertrain launch ssh bert-base-phase1 --data data --run runs/base --hostfile hosts --gpus-per-node 8
    """
    spec = JobSpec(
        gpus_per_node=gpus_per_node, procs_per_node=procs_per_node, time=time, warning=warning, python=python,
        container=container, mounts=mounts, repeats=repeats, restarts=restarts, preflight=preflight, nodes=nodes,
        hostfile=hostfile, ssh=ssh, nic=nic, port=port, rendezvous_host=rendezvous_host, runtime="apptainer",
    )  # fmt: skip
    _launch("ssh", recipe, data, run, overrides, settings_file, init, job, dry_run, spec)


@launch_app.command("slurm", context_settings=OVERRIDES)
@takes_settings()
def launch_slurm(
    recipe: RecipeName, data: Data, run: Run, overrides: Overrides,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: Nodes = 1, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0,
    time: Time = "", warning: SaveBefore = "2m",
    partition: Annotated[str, typer.Option("--partition", help="Slurm's partition")] = "",
    account: Annotated[str, typer.Option("--account", help="Slurm's account")] = "",
    gres: Annotated[str, typer.Option("--gres", help="per node, for sbatch and every srun; default: gpu:G")] = "",
    constraint: Annotated[str, typer.Option("--constraint", help="features that nodes must have")] = "",
    nodelist: Annotated[str, typer.Option("--nodelist", help="only these nodes")] = "",
    cpus_per_node: Annotated[int, typer.Option("--cpus-per-node", min=0, help="0: whole nodes, exclusively")] = 0,
    mpi: Annotated[MpiType, typer.Option("--mpi", help="srun's --mpi; bertrain needs none")] = "none",
    python: Python = "", container: Container = "", runtime: ContainerRuntime = "pyxis", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Submit a job to Slurm, or run it in place inside an allocation (salloc).

    Example: bertrain launch slurm bert-base-phase1 --data data --run runs/base --nodes 2 --gpus-per-node 8 --time 4h
    """
    spec = JobSpec(
        gpus_per_node=gpus_per_node, procs_per_node=procs_per_node, time=time, warning=warning, python=python,
        container=container, mounts=mounts, repeats=repeats, restarts=restarts, preflight=preflight, nodes=nodes,
        partition=partition, account=account, gres=gres, constraint=constraint, nodelist=nodelist,
        cpus_per_node=cpus_per_node, mpi=mpi, runtime=runtime, nic=nic, port=port, rendezvous_host=rendezvous_host,
    )  # fmt: skip
    _launch("slurm", recipe, data, run, overrides, settings_file, init, job, dry_run, spec)


@launch_app.command("pbs", context_settings=OVERRIDES)
@takes_settings()
def launch_pbs(
    recipe: RecipeName, data: Data, run: Run, overrides: Overrides,
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: Nodes = 1, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0,
    time: Time = "", warning: SaveBefore = "2m",
    queue: Annotated[str, typer.Option("--queue", help="PBS's queue")] = "",
    project: Annotated[str, typer.Option("--project", help="PBS's project")] = "",
    select: Annotated[str, typer.Option("--select", help="chunks in PBS's notation; default: N:ngpus=G")] = "",
    place: Annotated[str, typer.Option("--place", help="placement of the chunks")] = "scatter:excl",
    cpus_per_node: Annotated[int, typer.Option("--cpus-per-node", min=0, help="ncpus of a chunk; 0: PBS's own")] = 0,
    ssh: Annotated[str, typer.Option("--ssh", help="the ssh command from node to node")] = "ssh",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Submit a job to PBS, or run it in place inside an allocation (qsub -I).

    Example: bertrain launch pbs bert-base-phase1 --data data --run runs/base --nodes 2 --gpus-per-node 4 --time 4h
    """
    spec = JobSpec(
        gpus_per_node=gpus_per_node, procs_per_node=procs_per_node, time=time, warning=warning, python=python,
        container=container, mounts=mounts, repeats=repeats, restarts=restarts, preflight=preflight, nodes=nodes,
        queue=queue, project=project, select=select, place=place, cpus_per_node=cpus_per_node, ssh=ssh, nic=nic,
        port=port, rendezvous_host=rendezvous_host, runtime="apptainer",
    )  # fmt: skip
    _launch("pbs", recipe, data, run, overrides, settings_file, init, job, dry_run, spec)


@launch_app.command("mpi", context_settings=OVERRIDES)
@takes_settings()
def launch_mpi(
    recipe: RecipeName, data: Data, run: Run, overrides: Overrides, hostfile: Hostfile = "",
    settings_file: SettingsFile = None, init: Init = None, job: JobFolder = None, dry_run: DryRun = False,
    nodes: ListedNodes = 0, gpus_per_node: Gpus = 0, procs_per_node: Procs = 0,
    time: Time = "", warning: SaveBefore = "2m",
    mpirun: Annotated[str, typer.Option("--mpirun", help="the mpirun command")] = "mpirun",
    python: Python = "", container: Container = "", mounts: Mounts = "",
    nic: Nic = "", port: Port = 0, rendezvous_host: RendezvousHost = "",
    repeats: Repeats = 1, restarts: Restarts = 0, preflight: Preflight = True,
) -> None:  # fmt: skip
    """Run a job whose ranks mpirun starts; they communicate over torch.distributed.

    Example: bertrain launch mpi bert-base-phase1 --data data --run runs/base --nodes 2 --procs-per-node 4
    """
    spec = JobSpec(
        gpus_per_node=gpus_per_node, procs_per_node=procs_per_node, time=time, warning=warning, python=python,
        container=container, mounts=mounts, repeats=repeats, restarts=restarts, preflight=preflight, nodes=nodes,
        hostfile=hostfile, mpirun=mpirun, nic=nic, port=port, rendezvous_host=rendezvous_host, runtime="apptainer",
    )  # fmt: skip
    _launch("mpi", recipe, data, run, overrides, settings_file, init, job, dry_run, spec)


def _launch(
    launcher: Launcher, recipe: str, data: Path, run: Path, overrides: Overrides,
    settings_file: Path | None, init: Path | None, job_folder: Path | None, dry_run: bool, spec: JobSpec,
) -> None:  # fmt: skip
    """Resolve the settings, write the job folder and submit the job."""
    from bertrain.launch.scripts import job_script
    from bertrain.launch.submit import submit_job

    defaults = [("train.binding", "auto"), ("train.device", "cuda" if spec.gpus_per_node else "cpu")]
    settings = config.resolve(recipe, [*defaults, *overrides], settings_file)
    job = make_job(launcher, settings, data, run, spec=spec, folder=job_folder, init=str(init or ""))
    if dry_run:
        print(job_script(job))
        return
    print(f"job {job.folder}: {job.world} rank(s); follow it with `bertrain launch logs {job.folder}`", flush=True)
    print(f"submitted as {submit_job(job, settings)}")


@launch_app.command("worker", hidden=True)
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


@launch_app.command("preflight")
def launch_preflight(job: Job, as_json: AsJson = False) -> None:
    """Check every node of a job before it trains, as the job's script does; by hand it checks this machine.

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
    follow: Annotated[bool, typer.Option("--follow", help="wait for new lines until the job ends")] = False,
) -> None:
    """Print the output of a job's ranks; each line starts with its rank.

    Example: bertrain launch logs jobs/tiny-1 --follow
    """
    from bertrain.launch.submit import job_logs

    for line in job_logs(job, rank=rank, follow=follow):
        print(line, flush=True)


@launch_app.command("status")
def launch_status(job: Job, as_json: AsJson = False) -> None:
    """Print the state of a job and the progress of its runs.

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
    """Cancel a job; its ranks finish the current step and save it.

    Example: bertrain launch cancel jobs/tiny-1
    """
    from bertrain.launch.submit import cancel_job

    print(cancel_job(job))
