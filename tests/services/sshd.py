"""Two real sshd's on two loopback addresses, with keys of their own, standing for two hosts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOSTS = ("127.0.0.1", "127.0.0.2")
PATIENCE_S = 30

SERVER = """\
Port {port}
ListenAddress {host}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
"""
CLIENT = """\
Host *
    Port {port}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known-hosts
    StrictHostKeyChecking yes
"""


def why_not() -> str:
    """What is missing; nothing if they can run."""
    if _sshd() is None or shutil.which("ssh") is None:
        return "no sshd or ssh here; Debian's packages are called openssh-server and openssh-client"
    if os.geteuid() != 0:
        return "sshd of a user who is not root knows no other user's keys"
    return ""


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(frozen=True)
class Hosts:
    """How to reach them."""

    folder: Path
    daemons: tuple[subprocess.Popen[bytes], ...]

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder}/client"

    def write_hostfile(self, path: Path, *names: str) -> Path:
        path.write_text("".join(f"{name} slots=1\n" for name in names or HOSTS))
        return path


@contextmanager
def running_hosts(folder: Path) -> Iterator[Hosts]:
    """Start both, wait until they listen, and end them."""
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, empty
    for name in ("key", "host-key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    public = (folder / "host-key.pub").read_text()
    (folder / "known-hosts").write_text("".join(f"[{host}]:{port} {public}" for host in HOSTS))
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder))
    daemons = []
    try:
        for host in HOSTS:
            configuration = folder / f"server-{host}"
            configuration.write_text(SERVER.format(port=port, host=host, folder=folder))
            words = [str(_sshd()), "-D", "-e", "-f", str(configuration)]
            with open(folder / f"server-{host}.log", "wb") as log:
                daemons.append(subprocess.Popen(words, stdout=log, stderr=log))
        for host in HOSTS:
            _wait_for(host, port, folder / f"server-{host}.log")
        yield Hosts(folder, tuple(daemons))
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()


def _wait_for(host: str, port: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
