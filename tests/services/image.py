"""Builds container/Dockerfile with buildah, from a base made of Debian's packages, and runs commands in the image.

Isolation is chroot, which needs root but neither namespaces nor an OCI runtime; storage is overlay where the kernel
allows it here, else vfs. No image registry is used. pip in the build installs as pip does here: with the same
configuration and the same local folders.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bertrain.base.machine import free_memory

ROOT = Path(__file__).parents[2]
RELEASE = "bookworm"  # its Python is 3.11
BASE_PACKAGES = "python3-venv,python3-dev,ca-certificates"
ISOLATION = ("--isolation", "chroot")


def run(*words: object, **environment: str) -> str:
    """Standard output of a command; its whole output is the message if it fails."""
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def scratch_folder(otherwise: Path) -> Path:
    """A new folder for some gigabytes: in memory if there is plenty, where dpkg need not wait for the disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and min(shutil.disk_usage(memory).free, free_memory() or 0) > 10 * 2**30:
        return Path(tempfile.mkdtemp(prefix="bertrain-image-", dir=memory))
    return otherwise


def pip_volumes(folder: Path) -> list[str]:
    """Options of buildah that give pip in the build the configuration and the local folders that pip has here."""
    configuration = configparser.RawConfigParser()
    folders = set()
    # Variables come first in pip's list, as ":env:", and win over its files.
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, quoted = line.partition("=")
        section, _, name = key.replace(":env:", "global").partition(".")
        value = ast.literal_eval(quoted)
        folders |= {Path(path) for path in re.findall(r"(?:^|\s)(/\S+)", value)}
        folders |= {Path(path).parent for path in re.findall(r"file://(/\S+)", value)}  # files lie beside the index
        if not configuration.has_section(section):
            configuration.add_section(section)
        if not configuration.has_option(section, name):
            configuration.set(section, name, value)
    file = folder / "pip.conf"
    with file.open("w") as stream:
        configuration.write(stream)
    volumes = {file: "/etc/pip.conf"} | {path: str(path) for path in sorted(folders) if path.exists()}
    return [word for source, target in volumes.items() for word in ("--volume", f"{source}:{target}:ro")]


class Images:
    """The images and containers of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "storage"
        self.options = ["--root", str(self.root), "--runroot", str(folder / "run")]
        overlay = [*self.options, "--storage-driver", "overlay"]
        trial = subprocess.run(["buildah", *overlay, "info"], capture_output=True, check=False)
        self.options += ["--storage-driver", "overlay" if trial.returncode == 0 else "vfs"]

    def buildah(self, *words: object) -> str:
        return run("buildah", *self.options, *words)

    def build(self) -> None:
        """The image `bertrain`, through the Dockerfile and its smoke test."""
        archive = self.folder / "base.tar"
        debian = ("--variant=minbase", f"--include={BASE_PACKAGES}", RELEASE, archive)
        run("mmdebstrap", "--quiet", *debian, TMPDIR=str(self.folder))
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, archive)
        archive.unlink()
        self.buildah("commit", "--quiet", "--rm", container, "localhost/base")
        volumes = pip_volumes(self.folder)
        self.buildah(
            *("build", *ISOLATION, "--pull-never", "--build-arg", "BASE=localhost/base", *volumes),
            *("--file", ROOT / "container" / "Dockerfile", "--tag", "localhost/bertrain", ROOT),
        )

    def configuration(self) -> dict[str, Any]:
        described = self.buildah("inspect", "--type", "image", "localhost/bertrain")
        return json.loads(described)["OCIv1"]["config"]

    def start(self, *words: object, volumes: dict[Path, str], user: str = "") -> str:
        """Output of the image's entry point with these arguments; folders have the same paths inside."""
        mounts = [word for path, mode in volumes.items() for word in ("--volume", f"{path}:{path}:{mode}")]
        container = self.buildah("from", "--pull-never", "localhost/bertrain").strip()
        as_user = ["--user", user] if user else []
        command = [*self.configuration()["Entrypoint"], *words]
        try:
            return self.buildah("run", *ISOLATION, *mounts, *as_user, container, "--", *command)
        finally:
            self.buildah("rm", container)

    def remove(self) -> None:
        """Everything, gigabytes of it; overlay leaves its folder mounted on itself."""
        subprocess.run(["umount", str(self.root / "overlay")], capture_output=True, check=False)
        shutil.rmtree(self.folder)
