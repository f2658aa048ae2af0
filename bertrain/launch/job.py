"""The job folder: everything a job consists of, written once, before anything is started.

job.sh        the script that the scheduler runs; can be read, edited and submitted by hand
recipe.toml   all settings, resolved
job.json      the rest: the exact command, nodes and ranks, the version of the code
hosts         the hosts, if there is a hostfile
submitted     the scheduler's job number, a line for each submission
events        the events of the script, with their times
logs/         a folder for each start, a file for each rank
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import bertrain
from bertrain.base.errors import UserError
from bertrain.base.files import new_folder
from bertrain.base.units import parse_duration
from bertrain.config.resolve import to_toml
from bertrain.config.settings import Settings
from bertrain.weights.hub import absolute

Launcher = Literal["local", "ssh", "slurm", "pbs", "mpi"]
Runtime = Literal["pyxis", "apptainer"]
MpiType = Literal["none", "pmi2", "pmix"]
JOB, RECIPE, SCRIPT, HOSTS = "job.json", "recipe.toml", "job.sh", "hosts"
SCHEMA_VERSION = 1
DIRECTIVES = ("nodelist", "partition", "account", "gres", "constraint", "queue", "project", "select", "place")
"""Fields of JobSpec that a scheduler parses rather than bash."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A line of a hostfile: a host and its number of ranks."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The resources of a job; fields are named after the options of `bertrain launch`."""

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
            raise UserError("ranks-per-node", f"{given} given of --gpus-per-node and --procs-per-node; give one")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, str):
                refuse_control_characters(f"--{name.replace('_', '-')}", value)
        for name in DIRECTIVES:
            refuse_quotation_marks(f"--{name}", getattr(self, name))
        for name in ("ssh", "mpirun"):
            try:
                if not shlex.split(getattr(self, name)):
                    raise ValueError("it is empty")
            except ValueError as error:
                wrong = f"--{name} {getattr(self, name)} is not a shell command: {error}"
                raise UserError("invalid-command", f"{wrong}; leave it out, or give one") from None
        seconds = {name: parse_time(getattr(self, name), f"--{name}") for name in ("time", "warning")}
        if self.time and seconds["time"] <= seconds["warning"]:
            raise UserError("time-too-short", f"--time {self.time} must be longer than --warning {self.warning}")
        if self.gres and not self.gpus_per_node and "gpu" in self.gres:
            raise UserError("gpus-without-ranks", f"--gres {self.gres} requests GPUs; give --gpus-per-node for them")
        if self.runtime == "pyxis" and self.container and launcher != "slurm":
            raise UserError("wrong-container-runtime", "pyxis is a plugin of Slurm; elsewhere use --runtime apptainer")
        if launcher == "ssh" and not self.hostfile:
            raise UserError("missing-hostfile", "give --hostfile, with one host per line, such as `node1 slots=8`")
        if launcher == "local" and self.nodes > 1:
            why = f"--nodes is {self.nodes}, but `launch local` has one"
            raise UserError("too-many-nodes", f"{why}; use ssh, slurm, pbs, mpi")
        return self


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as its folder describes it."""

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
        """The run folder of a repeat; 0: the job has a single run."""
        return f"{self.run}-{repeat}" if repeat else self.run

    def command(self, repeat: int = 0) -> list[str]:
        """The arguments of `bertrain` on each rank; every repeat has its own run folder and seed."""
        words = ["pretrain", str(self.folder / RECIPE), "--data", self.data, "--run", self.run_of(repeat)]
        if self.init:
            words += ["--init", self.init]
        if repeat and self.seed >= 0:  # below 0: every run draws its own
            words += ["--train.seed", str(self.seed + repeat - 1)]
        return words

    def describe_code(self) -> str:
        commit = f", commit {self.code['commit']}" if self.code["commit"] else ""
        return f"bertrain {self.code['version']}{commit}, files {self.code['files'][:12]}"


def refuse_control_characters(option: str, value: str) -> None:
    """Refuse what would end a line of the script, also of a comment, and be executed."""
    if re.search(r"[\0-\x1f\x7f]", value):
        raise UserError("control-character", f"{option} {value!r} contains a control character; rename it")


def refuse_quotation_marks(option: str, value: str) -> None:
    if '"' in value:
        raise UserError("quotation-mark", f"{option} {value} contains a quotation mark, which no scheduler accepts")


def parse_time(text: str, option: str) -> int:
    """Seconds of a time such as 1h30m, or 01:30:00 as schedulers write it."""
    if found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text, re.ASCII):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return int(parse_duration(text, option))


def write_time(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def read_hostfile(path: Path, ranks_per_node: int, nodes: int) -> tuple[Host, ...]:
    """The first `nodes` hosts (0: all) of a hostfile: a name per line, optionally `slots=N`; # starts a comment."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError("missing-hostfile", f"cannot read {path} (--hostfile): {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError("damaged-hostfile", f"{path} (--hostfile) is not text") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        found = re.fullmatch(r"(?:slots=([1-9]\d*))?", " ".join(words[1:]), re.ASCII)
        if found is None or not re.fullmatch(r"[\w.:@\[\]-]+", words[0]) or words[0].startswith("-"):
            raise UserError("damaged-hostfile", f"{path}, line {number}: {line.strip()!r}; write it as `node1 slots=8`")
        hosts.append(Host(name=words[0], slots=int(found[1] or ranks_per_node)))
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise UserError("repeated-host", f"{path} lists {name} more than once; give one line, with slots=N")
    if not hosts or len(hosts) < nodes:
        raise UserError("too-few-hosts", f"{path} (--hostfile) lists {len(hosts)} host(s); --nodes is {nodes}")
    return tuple(hosts[: nodes or None])


@cache
def code_version() -> dict[str, str]:
    """The version of this code: the package's number, the git commit if there is one, and a hash of its files."""
    package = Path(bertrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "toml") for path in package.rglob(f"*.{suffix}")):
        digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    commit = ""
    if (package.parent / ".git").exists():
        git = partial(subprocess.check_output, cwd=package.parent, stderr=subprocess.DEVNULL, text=True)
        with suppress(OSError, subprocess.CalledProcessError):
            changes = " and changes" if git(["git", "status", "--porcelain", "-uno"]).strip() else ""
            commit = git(["git", "rev-parse", "--short", "HEAD"]).strip() + changes
    return {"version": bertrain.__version__, "commit": commit, "files": digest.hexdigest()}


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
    """Describe a job, checked, with every path absolute; writes nothing."""
    if launcher not in get_args(Launcher):
        raise UserError("unknown-launcher", f"no launcher {launcher!r}; use one of {', '.join(get_args(Launcher))}")
    spec = spec.check(launcher)
    hosts = read_hostfile(Path(spec.hostfile), spec.ranks_per_node, spec.nodes) if spec.hostfile else ()
    spec = dataclasses.replace(spec, nodes=len(hosts) or spec.nodes or 1)
    numbered = (Path("jobs") / f"{Path(run).name}-{number}" for number in itertools.count(1))
    place = Path(folder) if folder is not None else next(path for path in numbered if not path.exists())
    if launcher in ("slurm", "pbs"):
        refuse_quotation_marks("--job", str(place.resolve()))
    _refuse_existing(place)
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    if spec.nic:
        kept |= {"GLOO_SOCKET_IFNAME": spec.nic, "NCCL_SOCKET_IFNAME": spec.nic}
    # Resolved, since a link or the working directory may bring in a name that was not typed.
    paths = {"data": str(Path(data).resolve()), "run": str(Path(run).resolve())}
    paths["init"] = absolute(init)
    paths["python"] = os.path.abspath(spec.python) if "/" in spec.python else spec.python or sys.executable
    for option, value in (paths | {"job": str(place.resolve())} | kept).items():
        refuse_control_characters(f"--{option}" if option.islower() else option, value)
    return Job(
        **paths,
        folder=place.resolve(),
        launcher=launcher,
        name=Path(run).name,
        seed=settings.train.seed,
        spec=spec,
        hosts=hosts,
        environment=kept,
        code=code_version(),
        created=f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} on {platform.node()}",
    )


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise UserError("folder-exists", f"{folder} exists; choose another --job, or leave it out")


def write_job(job: Job, settings: Settings, script: str) -> None:
    """Write the job folder, whole or not at all."""
    _refuse_existing(job.folder)
    command = ["bertrain", *job.command(1 if job.spec.repeats > 1 else 0)]
    content = {"schema_version": SCHEMA_VERSION, "command": command} | dataclasses.asdict(job)
    del content["folder"]
    with new_folder(job.folder) as partial:
        (partial / JOB).write_text(json.dumps(content, indent=1) + "\n")
        (partial / RECIPE).write_text(f"# Resolved for the run {job.run}\n\n" + to_toml(settings))
        (partial / SCRIPT).write_text(script)
        (partial / SCRIPT).chmod(0o755)
        if job.hosts:
            (partial / HOSTS).write_text("".join(f"{host.name} slots={host.slots}\n" for host in job.hosts))
        (partial / "logs").mkdir()


def read_job(folder: str | Path) -> Job:
    folder, path = Path(folder).resolve(), Path(folder).resolve() / JOB
    if not path.is_file():
        raise UserError("missing-job", f"{folder} is not a job folder: it has no {JOB}")
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content.pop("schema_version") != SCHEMA_VERSION:
            raise UserError("other-version", f"another version of bertrain wrote {path}; launch the job again")
        del content["command"]
        content |= {"spec": JobSpec(**content["spec"]), "hosts": tuple(Host(**host) for host in content["hosts"])}
        return Job(folder=folder, **content)
    except (ValueError, KeyError, TypeError):
        raise UserError("damaged-job", f"{path} is damaged; launch the job again") from None
