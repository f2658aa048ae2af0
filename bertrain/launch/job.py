"""The job folder: everything a job is made of, written once, before anything is started.

job.sh        what the scheduler runs: read it, edit it, submit it by hand
recipe.toml   the settings, all of them, resolved
job.json      the rest: the exact command, nodes and ranks, the version of the code
hosts         the hosts, if a list was given
submitted     the scheduler's number for it, a line for each time
events        what the script did and when
logs/         a folder for each start, a file for each rank
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import bertrain
from bertrain.base.errors import UserError
from bertrain.base.files import new_folder
from bertrain.base.units import parse_duration
from bertrain.config.resolve import to_toml
from bertrain.config.settings import Settings

Launcher = Literal["local", "ssh", "slurm", "pbs", "mpi"]
Runtime = Literal["pyxis", "apptainer"]
MpiType = Literal["none", "pmi2", "pmix"]
JOB, RECIPE, SCRIPT, HOSTS = "job.json", "recipe.toml", "job.sh", "hosts"
SCHEMA_VERSION = 1
DIRECTIVES = ("nodelist", "partition", "account", "gres", "constraint", "queue", "project", "select", "place")
"""JobSpec that are written where a scheduler reads them, rather than bash."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A line of a hostfile: where, and how many ranks."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a job is to run on; names as the options of `bertrain launch` are called."""

    nodes: int = 1
    gpus_per_node: int = 0
    procs_per_node: int = 0
    time: str = ""
    warning: str = "2m"
    nodelist: str = ""
    partition: str = ""
    account: str = ""
    gres: str = ""
    constraint: str = ""
    mpi: MpiType = "none"
    cpus_per_node: int = 0
    queue: str = ""
    project: str = ""
    select: str = ""
    place: str = ""
    hostfile: str = ""
    ssh: str = "ssh"
    mpirun: str = "mpirun"
    python: str = ""
    container: str = ""
    runtime: Runtime = "pyxis"
    mounts: str = ""
    nic: str = ""
    port: int = 0
    rendezvous_host: str = ""
    repeats: int = 1
    restarts: int = 0
    preflight: bool = True

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.procs_per_node

    def check(self, launcher: Launcher) -> JobSpec:
        """Refuse options that contradict each other or that no script can hold; returns itself."""
        if bool(self.gpus_per_node) == bool(self.procs_per_node):
            given = "both are" if self.gpus_per_node else "neither is"
            raise UserError(
                f"ranks on a node are counted by --gpus-per-node or by --procs-per-node, and {given} given; give one"
            )
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, str):
                refuse_line_breaks(f"--{name.replace('_', '-')}", value)
        for name in DIRECTIVES:
            if '"' in getattr(self, name):
                raise UserError(
                    f"--{name} {getattr(self, name)} holds a quotation mark, which no scheduler takes there"
                )
        for name in ("ssh", "mpirun"):
            _refuse_no_command(f"--{name}", getattr(self, name))
        seconds = {name: parse_time(getattr(self, name), f"--{name}") for name in ("time", "warning")}
        if self.time and seconds["time"] <= seconds["warning"]:
            raise UserError(f"--time {self.time} is over before the warning (--warning {self.warning}) would come")
        if self.gres and not self.gpus_per_node and "gpu" in self.gres:
            raise UserError(
                f"--gres {self.gres} asks for GPUs, and --procs-per-node is for ranks without; give --gpus-per-node"
            )
        if self.runtime == "pyxis" and self.container and launcher != "slurm":
            raise UserError(
                f"pyxis is a part of Slurm, so with `launch {launcher}` a container needs --runtime apptainer"
            )
        if launcher == "ssh" and not self.hostfile:
            raise UserError("--hostfile is missing: one host per line, such as `node1 slots=8`")
        if launcher == "local" and self.nodes > 1:
            raise UserError(
                f"`launch local` is for this machine, and --nodes is {self.nodes}; use ssh, slurm, pbs or mpi"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it stands in its folder."""

    folder: Path
    launcher: Launcher
    name: str
    data: str
    run: str
    init: str
    seed: int
    spec: JobSpec
    hosts: tuple[Host, ...] = ()
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    created: str = ""

    @property
    def world(self) -> int:
        if self.hosts:
            return sum(host.slots for host in self.hosts)
        return self.spec.nodes * self.spec.ranks_per_node

    def run_of(self, repeat: int) -> str:
        """The run folder of one repeat; 0 where there are none."""
        return f"{self.run}-{repeat}" if repeat else self.run

    def command(self, repeat: int = 0) -> list[str]:
        """The words after `bertrain` that each rank runs; repeats have run folders and seeds of their own."""
        words = ["pretrain", str(self.folder / RECIPE), "--data", self.data, "--run", self.run_of(repeat)]
        if self.init:
            words += ["--init", self.init]
        if repeat and self.seed >= 0:  # below 0 each draws one for itself
            words += ["--train.seed", str(self.seed + repeat - 1)]
        return words

    def describe_code(self) -> str:
        """The version of the code, for people."""
        commit = self.code["commit"]
        return (
            f"bertrain {self.code['version']}{f', commit {commit}' if commit else ''}, files {self.code['files'][:12]}"
        )


def refuse_line_breaks(option: str, value: str) -> None:
    """Refuse what would end a line of a script before its time."""
    if re.search(r"[\n\r\0]", value):
        raise UserError(f"{option} holds a line break, which a script cannot carry")


def _refuse_no_command(option: str, value: str) -> None:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise UserError(f"{option} {value} is no command: {error}") from None
    if not words:
        raise UserError(f"{option} is empty; leave it out, or say how it is called")


def parse_time(text: str, option: str) -> int:
    """Seconds in a time such as 1h30m, or 01:30:00 as schedulers write it."""
    if found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text, re.ASCII):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return int(parse_duration(text, option))


def write_time(seconds: int) -> str:
    """A time as schedulers read it."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def read_hostfile(path: Path, ranks_per_node: int, nodes: int) -> tuple[Host, ...]:
    """The first `nodes` hosts of a hostfile, or all (0); a line is a name, maybe `slots=N`, maybe a comment after #."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"no hostfile at {path} (--hostfile): {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} (--hostfile) is not text; give a host per line, such as `node1 slots=8`") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        found = re.fullmatch(r"(?:slots=([1-9]\d*))?", " ".join(words[1:]), re.ASCII)
        if found is None or not re.fullmatch(r"[\w.:@\[\]-]+", words[0]) or words[0].startswith("-"):
            raise UserError(
                f"{path}, line {number}, is {line.strip()!r}; give a host and its ranks, such as `node1 slots=8`"
            )
        hosts.append(Host(name=words[0], slots=int(found[1] or ranks_per_node)))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path} names {name} {names.count(name)} times; give each host one line, with slots=N")
    if len(hosts) < nodes:
        raise UserError(f"{path} names {len(hosts)} host(s), and --nodes asks for {nodes}")
    if not hosts:
        raise UserError(f"{path} (--hostfile) names no host; give one per line, such as `node1 slots=8`")
    return tuple(hosts[: nodes or None])


@cache
def code_version() -> dict[str, str]:
    """What code this is: the package's version, the commit it was checked out from if any, and a hash of its files."""
    package = Path(bertrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "toml") for path in package.rglob(f"*.{suffix}")):
        digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return {"version": bertrain.__version__, "commit": _commit(package), "files": digest.hexdigest()}


def _commit(package: Path) -> str:
    if not (package.parent / ".git").exists():
        return ""
    words = ["git", "-C", str(package.parent)]
    try:
        commit = subprocess.run([*words, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*words, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + (" and changes" if changed.stdout.strip() else "")


def free_job_folder(run: str, parent: Path = Path("jobs")) -> Path:
    """The first folder under `parent` that is not there yet, named after the run."""
    number = 1
    while (parent / f"{Path(run).name}-{number}").exists():
        number += 1
    return parent / f"{Path(run).name}-{number}"


def make_job(
    launcher: Launcher,
    settings: Settings,
    data: str | Path,
    run: str | Path,
    *,
    spec: JobSpec,
    folder: str | Path | None = None,
    init: str = "",
) -> Job:
    """A job, checked, with every path absolute; nothing is written."""
    if launcher not in get_args(Launcher):
        raise UserError(f"no launcher named {launcher!r}; there are {', '.join(get_args(Launcher))}")
    spec = spec.check(launcher)
    hosts = read_hostfile(Path(spec.hostfile), spec.ranks_per_node, spec.nodes) if spec.hostfile else ()
    spec = dataclasses.replace(spec, nodes=len(hosts) or spec.nodes or 1)
    place = Path(folder) if folder is not None else free_job_folder(str(run))
    for option, path in {"--data": data, "--run": run, "--job": place, "--init": init}.items():
        refuse_line_breaks(option, str(path))
    if launcher in ("slurm", "pbs") and '"' in str(place.resolve()):
        raise UserError(f"{place} (--job) holds a quotation mark, which no scheduler takes there; choose another")
    if place.exists():
        raise UserError(f"{place} is there already; choose another --job, or leave it out")
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    if spec.nic:
        kept |= {"GLOO_SOCKET_IFNAME": spec.nic, "NCCL_SOCKET_IFNAME": spec.nic}
    return Job(
        folder=place.resolve(),
        launcher=launcher,
        name=Path(run).name,
        data=str(Path(data).resolve()),
        run=str(Path(run).resolve()),
        init=str(Path(init).resolve()) if init else "",
        seed=settings.train.seed,
        spec=spec,
        hosts=hosts,
        python=os.path.abspath(spec.python) if "/" in spec.python else spec.python or sys.executable,
        environment=kept,
        code=code_version(),
        created=f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} on {platform.node()}",
    )


def write_job(job: Job, settings: Settings, script: str) -> None:
    """Write the job folder, whole or not at all."""
    if job.folder.exists():
        raise UserError(f"{job.folder} is there already; choose another --job, or leave it out")
    content = {
        "schema_version": SCHEMA_VERSION,
        "command": ["bertrain", *job.command(1 if job.spec.repeats > 1 else 0)],
    }
    content |= {key: value for key, value in dataclasses.asdict(job).items() if key != "folder"}
    with new_folder(job.folder) as partial:
        (partial / JOB).write_text(json.dumps(content, indent=1) + "\n")
        (partial / RECIPE).write_text(f"# Resolved for the run {job.run}\n\n" + to_toml(settings))
        (partial / SCRIPT).write_text(script)
        (partial / SCRIPT).chmod(0o755)
        if job.hosts:
            (partial / HOSTS).write_text("".join(f"{host.name} slots={host.slots}\n" for host in job.hosts))
        (partial / "logs").mkdir()


def read_job(folder: str | Path) -> Job:
    """The job in a folder, or a sentence why there is none."""
    folder = Path(folder).resolve()
    path = folder / JOB
    if not path.is_file():
        raise UserError(f"{folder} holds no job: there is no {JOB} in it")
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content.pop("schema_version") != SCHEMA_VERSION:
            raise UserError(f"{path} was written by another version of bertrain; launch the job again")
        del content["command"]
        spec = JobSpec(**content.pop("spec"))
        hosts = tuple(Host(**host) for host in content.pop("hosts"))
        return Job(folder=folder, spec=spec, hosts=hosts, **content)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; launch the job again") from None
