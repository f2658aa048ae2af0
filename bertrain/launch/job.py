"""The job folder: everything a job consists of, written once, before anything is started.

job.sh        the script that the scheduler runs; can be read, edited and submitted by hand
job.json      the tasks (bertrain commands), nodes and ranks, environment, the version of the code
recipe.toml   the settings that the tasks resolve to, for the pre-flight and for people
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Literal

import bertrain
from bertrain.base.errors import UserError
from bertrain.base.files import is_valid_text, new_folder
from bertrain.base.formatting import counted
from bertrain.base.schema import JsonError, check_value, load_json
from bertrain.base.units import parse_duration
from bertrain.config.resolve import to_toml
from bertrain.config.settings import Settings
from bertrain.ranks.restart import ROLLED_BACK

Launcher = Literal["local", "ssh", "slurm", "pbs", "mpi"]
Runtime = Literal["pyxis", "apptainer"]
MpiType = Literal["none", "pmi2", "pmix"]
JOB, RECIPE, SCRIPT, HOSTS = "job.json", "recipe.toml", "job.sh", "hosts"
SCHEMA_VERSION = 2
DIRECTIVES = ("nodelist", "partition", "account", "gres", "constraint", "queue", "project", "select", "place")
"""Fields of JobSpec that a scheduler parses rather than bash."""
CARRIED = (
    "CCL_*", "DNNL_*", "FI_*", "GLOO_*", "HF_HOME", "HF_*_OFFLINE", "KMP_*", "LD_PRELOAD", "MALLOC_CONF", "NCCL_*",
    "OMP_*", "PYTHONPATH", "PYTORCH_*", "TORCH_*", "TRANSFORMERS_OFFLINE", "UCX_*", ROLLED_BACK,
)  # fmt: skip
"""Environment variables that a job takes along to every node."""
ONLY_HERE = ("LD_PRELOAD", "PYTHONPATH")  # paths of this machine, which a container does not have
CHUNK = re.compile(r"(?:[1-9]\d{0,5}|(?:[1-9]\d{0,5}:)?\w+=[^:+=]+(?::\w+=[^:+=]+)*)", re.ASCII)  # of PBS's --select
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SECRETS = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A line of a hostfile: a host and its number of ranks."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The resources of a job; fields are named after the options of `bertrain launch`."""

    nodes: int = 0
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
    env: tuple[str, ...] = ()
    array: bool = False
    preflight: bool = True

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.procs_per_node

    def check(self) -> None:
        """Refuse options that contradict each other or that no script can hold."""
        if bool(self.gpus_per_node) == bool(self.procs_per_node):
            given = "both are" if self.gpus_per_node else "neither is"
            raise UserError(
                "ranks-per-node", f"{given} given of --gpus-per-node and --procs-per-node; give exactly one"
            )
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
        if self.mounts and not self.container:
            raise UserError("option-without-effect", "--mounts needs --container; give both, or leave --mounts out")
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Refuse a --select or --nodelist that contradicts the numbers of nodes and GPUs."""
        for chunk in self.select.split("+") if self.select else []:
            if not CHUNK.fullmatch(chunk):
                form = "not a chunk of PBS, such as 2:ngpus=4:ncpus=20"
                raise UserError("invalid-value", f"--select has {chunk!r}, {form}")
            found = re.search(r"(?:^|:)ngpus=(\w+)", chunk)
            if found and found[1] != str(self.gpus_per_node):
                given = f"but --gpus-per-node is {self.gpus_per_node}; give both the same"
                raise UserError("conflicting-options", f"--select has ngpus={found[1]}, {given}")
        chunks = self.selected_nodes()
        if self.nodes and chunks not in (0, self.nodes):
            selected = f"--select {self.select} has {counted(chunks, 'chunk')}"
            raise UserError("conflicting-options", f"{selected}, but --nodes is {self.nodes}; leave out --nodes")
        listed, nodes = count_hosts(self.nodelist), self.nodes or 1
        if listed > nodes:  # to fewer, Slurm adds others
            named = f"--nodelist {self.nodelist} names {counted(listed, 'node')}"
            raise UserError("conflicting-options", f"{named}, but --nodes is {nodes}; give --nodes {listed}")

    def selected_nodes(self) -> int:
        """The number of chunks in `select`, such as 3 in 2:ngpus=4+1:ncpus=8; 0 without one."""
        counts = [chunk.partition(":")[0] for chunk in self.select.split("+")] if self.select else []
        return sum(int(count) if count.isascii() and count.isdigit() else 1 for count in counts)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a job runs: a checked JobSpec, with its hosts."""

    launcher: Launcher
    spec: JobSpec
    hosts: tuple[Host, ...] = ()

    @property
    def world(self) -> int:
        if self.hosts:
            return sum(host.slots for host in self.hosts)
        return self.spec.nodes * self.spec.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Task:
    """One command of a job, which all of its ranks run."""

    command: tuple[str, ...]
    """The arguments of `bertrain`, as they were typed."""
    folder: str = ""
    """What it writes: a run folder, a folder of several, or another; new checkpoints in it count as progress."""


@dataclass(frozen=True, kw_only=True)
class Job(Placement):
    """A job as its folder describes it."""

    folder: Path
    name: str
    tasks: tuple[Task, ...]
    data: tuple[str, ...] = ()
    """What all nodes must see alike."""
    restarts: int = 0
    directory: str = ""
    """The working directory of the tasks."""
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    created: str = ""

    @property
    def is_array(self) -> bool:
        """Whether each task is a job of its own to the scheduler."""
        return self.spec.array and len(self.tasks) > 1

    def output(self, number: int) -> Path:
        """Where the logs and events of a task (1 ...) lie."""
        return self.folder / f"task-{number}" if len(self.tasks) > 1 else self.folder

    def describe_code(self) -> str:
        commit = f", commit {self.code['commit']}" if self.code["commit"] else ""
        return f"bertrain {self.code['version']}{commit}, files {self.code['files'][:12]}"


def refuse_control_characters(option: str, value: str) -> None:
    """Refuse what would end a line of the script, also of a comment, and be executed, or what no script can hold."""
    if re.search(r"[\0-\x1f\x7f]", value):
        raise UserError("control-character", f"{option} {value!r} contains a control character; rename it")
    if not is_valid_text(value):
        raise UserError("name-not-utf8", f"{option} {value!r} is not UTF-8; rename it")


def refuse_quotation_marks(option: str, value: str) -> None:
    if '"' in value:
        raise UserError(
            "quotation-mark", f"{option} {value} contains a quotation mark, which schedulers do not accept; rename it"
        )


def parse_time(text: str, option: str) -> int:
    """Seconds of a time such as 1h30m, or 01:30:00 as schedulers write it."""
    if found := re.fullmatch(r"(?:(\d{1,15})-)?(\d{1,15}):(\d\d):(\d\d)", text, re.ASCII):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return int(parse_duration(text, option))


def count_hosts(nodelist: str) -> int:
    """The number of hosts in Slurm's notation, such as 4 in login1,gpu[1-2,7]; 0 for none, or for a file of them."""
    if not nodelist or "/" in nodelist:
        return 0
    count = 0
    for name in re.split(r",(?![^\[]*\])", nodelist):
        hosts = 1
        for ranges in re.findall(r"\[([^\]]*)\]", name):
            ends = (part.split("-") for part in ranges.split(","))
            if not re.fullmatch(r"\d{1,15}(-\d{1,15})?(,\d{1,15}(-\d{1,15})?)*", ranges, re.ASCII):
                raise UserError("invalid-value", f"--nodelist has {name!r}, not hosts such as gpu[1-4,7]")
            hosts *= sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
        count += hosts
    return count


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
        found = re.fullmatch(r"(?:slots=([1-9]\d{0,5}))?", " ".join(words[1:]), re.ASCII)
        if found is None or not re.fullmatch(r"[\w.:@\[\]-]+", words[0]) or words[0].startswith("-"):
            shown = line.strip()[:80]
            raise UserError("damaged-hostfile", f"{path}, line {number}: {shown!r}; write it as `node1 slots=8`")
        hosts.append(Host(name=words[0], slots=int(found[1] or ranks_per_node)))
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise UserError("repeated-host", f"{path} lists {name} more than once; give one line, with slots=N")
    if not hosts or len(hosts) < nodes:
        listed = f"{path} (--hostfile) lists {counted(len(hosts), 'host')}"
        raise UserError("too-few-hosts", f"{listed}, and the job needs {max(nodes, 1)}; add hosts, or lower --nodes")
    return tuple(hosts[: nodes or None])


@cache
def code_version() -> dict[str, str]:
    """The version of this code: the package's number, the git commit if there is one, and a hash of its files."""
    package = Path(bertrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "sh", "toml") for path in package.rglob(f"*.{suffix}")):
        digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    commit = ""
    if (package.parent / ".git").exists():
        git = partial(subprocess.check_output, cwd=package.parent, stderr=subprocess.DEVNULL, text=True)
        with suppress(OSError, subprocess.CalledProcessError):
            changes = " and changes" if git(["git", "status", "--porcelain", "-uno"]).strip() else ""
            commit = git(["git", "rev-parse", "--short", "HEAD"]).strip() + changes
    return {"version": bertrain.__version__, "commit": commit, "files": digest.hexdigest()}


def place(launcher: Launcher, spec: JobSpec) -> Placement:
    """Check the resources of a job, and count its nodes."""
    spec.check()
    needs_hosts = spec.hostfile or launcher == "ssh"
    hosts = read_hostfile(Path(spec.hostfile), spec.ranks_per_node, spec.nodes) if needs_hosts else ()
    spec = replace(spec, nodes=len(hosts) or spec.nodes or spec.selected_nodes() or 1)
    return Placement(launcher=launcher, spec=replace(spec, container=find_image(spec)), hosts=hosts)


def find_image(spec: JobSpec) -> str:
    """The container image: a file by its absolute path, since pyxis takes a bare name for one of a registry."""
    path = Path(spec.container)
    is_image = path.is_file() or (spec.runtime == "apptainer" and path.is_dir())  # a folder is an Apptainer sandbox
    if not spec.container or path.is_absolute() or not (is_image or path.suffix in (".sif", ".sqsh")):
        return spec.container
    if not is_image:
        raise UserError("missing-image", f"there is no image {path} (--container); give its absolute path on the nodes")
    return str(path.resolve())


def make_job(
    placement: Placement,
    tasks: Sequence[Task],
    *,
    data: Sequence[str | Path] = (),
    restarts: int = 0,
    folder: str | Path | None = None,
) -> Job:
    """Describe a job, checked, with every path absolute; writes nothing."""
    # Resolved, since a link or the working directory may bring in a name that was not typed.
    tasks = [replace(task, folder=str(Path(task.folder).resolve()) if task.folder else "") for task in tasks]
    command = "-".join(itertools.takewhile(lambda word: word.isalpha(), tasks[0].command[:2]))
    name = Path(tasks[0].folder).name or command
    numbered = (Path("jobs") / f"{name}-{number}" for number in itertools.count(1))
    chosen = Path(folder) if folder is not None else next(path for path in numbered if not path.exists())
    _refuse_existing(chosen)
    spec, here = placement.spec, chosen.resolve()
    if placement.launcher in ("slurm", "pbs"):
        refuse_quotation_marks("--job", str(here))
    python = spec.python or ("python3" if spec.container else sys.executable)
    paths = {"--python": os.path.abspath(python) if "/" in python else python, "--job": str(here)}
    paths |= {"the working directory": os.getcwd(), "--container": spec.container}
    paths |= {f"the data {path}": str(Path(path).resolve()) for path in data}
    paths |= {word: word for task in tasks for word in (*task.command, task.folder)}
    environment = carried_environment(spec)
    for what, value in (paths | environment).items():
        refuse_control_characters(what, value)
    return Job(
        launcher=placement.launcher,
        spec=spec,
        hosts=placement.hosts,
        folder=here,
        name=name,
        tasks=tuple(tasks),
        data=tuple(str(Path(path).resolve()) for path in data),
        restarts=restarts,
        directory=os.getcwd(),
        python=paths["--python"],
        environment=environment,
        code=code_version(),
        created=f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} on {platform.node()}",
    )


def carried_environment(spec: JobSpec) -> dict[str, str]:
    """The variables that every node gets: CARRIED as far as they are set, then `--env`; never a secret."""
    carried = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in CARRIED)
        and VARIABLE.fullmatch(name)  # other names, which a shell would execute, reach no shell either
        and not SECRETS.search(name)
        and not (spec.container and name in ONLY_HERE)
    }
    if spec.container:
        carried["PYTHONSAFEPATH"] = "1"  # the image's bertrain runs, not a checkout in the working directory
    if spec.nic:
        carried |= {"GLOO_SOCKET_IFNAME": spec.nic, "NCCL_SOCKET_IFNAME": spec.nic}
    for word in spec.env:
        name, given, value = word.partition("=")
        if not VARIABLE.fullmatch(name):
            raise UserError("invalid-value", f"--env {word}: give NAME, or NAME=VALUE")
        if SECRETS.search(name):
            raise UserError(
                "secret", f"--env {name} looks like a secret, and others can read job folders; set it on the nodes"
            )
        if not given and name not in os.environ:
            raise UserError("missing-variable", f"--env {name}: the variable is not set; give --env {name}=VALUE")
        carried[name] = value if given else os.environ[name]
    return carried


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise UserError("folder-exists", f"{folder} exists; choose another --job, or leave it out")


def write_job(job: Job, settings: Settings | None, script: str) -> None:
    """Write the job folder, whole or not at all."""
    _refuse_existing(job.folder)
    content = {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(job)
    del content["folder"]
    with new_folder(job.folder) as partial:
        (partial / JOB).write_text(json.dumps(content, indent=1) + "\n")
        if settings is not None:
            (partial / RECIPE).write_text(to_toml(settings))
        (partial / SCRIPT).write_text(script)
        (partial / SCRIPT).chmod(0o755)
        if job.hosts:
            (partial / HOSTS).write_text("".join(f"{host.name} slots={host.slots}\n" for host in job.hosts))
        (partial / "logs").mkdir()


def read_job(folder: str | Path) -> Job:
    folder, path = Path(folder).resolve(), Path(folder).resolve() / JOB
    if not path.is_file():
        raise UserError(
            "missing-job",
            f"{folder} is not a job folder: it has no {JOB}; name the folder that `bertrain launch` printed",
        )
    try:
        content = load_json(path, {"schema_version": int})
        if content["schema_version"] != SCHEMA_VERSION:
            raise UserError("other-version", f"another version of bertrain wrote {path}; launch the job again")
        check_value(content, {"code": {"version": str, "commit": str, "files": str}, "tasks": [{"folder?": Path}]})
        job: Job = check_value(content | {"folder": str(folder)}, Job)
        return job
    except (OSError, JsonError) as error:
        raise UserError("damaged-job", f"{path} is damaged ({error}); launch the job again") from None
