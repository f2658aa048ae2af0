"""A real Slurm for tests: munge, a controller and two nodes, all on this machine and in one folder.

It needs root and Debian's packages, and neither systemd nor cgroups: processes are told apart by /proc, and the two
nodes are two daemons with one host name, one address and a port each.
"""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PATIENCE_S = 60

CONFIGURATION = """\
ClusterName=bertrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=60
GresTypes=token
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 Gres=token:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 Gres=token:2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """What is missing for a Slurm here; nothing if it can run."""
    absent = [name for name in PROGRAMS if _find(name) is None]
    if absent:
        return f"no {', '.join(absent)} here; Debian's packages are called slurm-wlm and munge"
    if os.geteuid() != 0:
        return "Slurm's daemons want to be started by root"
    return ""


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Slurm:
    """A cluster at work."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints."""
        return subprocess.run(
            words, env=os.environ | self.environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    def logs(self) -> str:
        return "\n".join(f"{path}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Start it all, wait until both nodes are idle, and end it all at the end, in that order."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:  # pytest's own folders are closed to the user munge
        Path(name).chmod(0o755)
        with _running_in(Path(name)) as slurm:
            yield slurm


@contextmanager
def _running_in(folder: Path) -> Iterator[Slurm]:
    (folder / "state").mkdir()
    controller, first, second = _free_ports(3)
    configuration = CONFIGURATION.format(
        host=platform.node(), folder=folder, controller=controller, first=first, second=second
    )
    (folder / "slurm.conf").write_text(configuration)
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=token Count=2\n")
    slurm = Slurm(folder)
    with ExitStack() as stack:

        def start(*words: str, user: str | None = None) -> None:
            log = stack.enter_context(open(folder / f"{Path(words[0]).name}-{len(daemons)}.out.log", "wb"))
            identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
            process = subprocess.Popen(
                [str(_find(words[0])), *words[1:]],
                env=os.environ | slurm.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **identity,  # type: ignore[call-overload]
            )
            daemons.append(process)
            stack.callback(_end, process)

        daemons: list[subprocess.Popen[bytes]] = []
        _start_munge(folder, start)
        start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in ("n1", "n2"):
            start("slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf"))
        _wait_until_idle(slurm, daemons)
        yield slurm


def _start_munge(folder: Path, start: object) -> None:
    user = pwd.getpwnam("munge")
    place = folder / "munge"
    place.mkdir(mode=0o755)
    key = place / "key"
    subprocess.run([str(_find("mungekey")), "--create", f"--keyfile={key}"], check=True)
    for path in (place, key):
        os.chown(path, user.pw_uid, user.pw_gid)
    files = [f"--{name}={place / name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    start(  # type: ignore[operator]
        "munged", "--foreground", "--force", f"--key-file={key}", *files, user="munge"
    )
    deadline = time.monotonic() + PATIENCE_S
    while not (place / "socket").exists():
        assert time.monotonic() < deadline, (folder / "munged-0.out.log").read_text()
        time.sleep(0.05)


def _wait_until_idle(slurm: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    state = ""
    while state.split() != ["idle", "idle"]:
        assert time.monotonic() < deadline, f"the nodes are {state!r}:\n{slurm.logs()}"
        assert all(daemon.poll() is None for daemon in daemons), f"a daemon has ended:\n{slurm.logs()}"
        time.sleep(0.2)
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t"],
            env=os.environ | slurm.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        state = done.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
