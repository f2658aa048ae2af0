"""The run folder: the whole truth of a run.

config.json        what was asked for, resolved, and which data it was
environment.json   where it ran: one entry for each start
vocab.txt          the vocabulary, so that the weights can be used without the data
metrics.jsonl      every step once
tensorboard/
checkpoints/step-…/
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bertrain
from bertrain.config import Settings, differing, from_dict
from bertrain.data.shards import MANIFEST, VOCABULARY, Shards
from bertrain.errors import UserError

SCHEMA_VERSION = 1


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content whole: a reader sees the old or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


@dataclass(frozen=True)
class Run:
    """An existing run folder."""

    folder: Path
    settings: Settings
    data: Path
    data_fingerprint: str
    vocabulary_hash: str
    init: str

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @staticmethod
    def open(folder: str | Path) -> Run:
        """Open the run at `folder`, or say why it is none."""
        folder = Path(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise UserError(f"{folder} holds no run: there is no {path.name} in it")
        try:
            content = json.loads(path.read_text())
            version = content["schema_version"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged, so the run cannot be opened") from None
        if version != SCHEMA_VERSION:
            raise UserError(f"{path} was written in layout {version}; this bertrain reads layout {SCHEMA_VERSION}")
        return Run(
            folder=folder,
            settings=from_dict(content["settings"]),
            data=Path(content["data"]["folder"]),
            data_fingerprint=content["data"]["fingerprint"],
            vocabulary_hash=content["data"]["vocabulary"],
            init=content["init"],
        )

    @staticmethod
    def create(folder: str | Path, settings: Settings, shards: Shards, init: str) -> Run:
        """Make a new run folder, whole or not at all."""
        folder = Path(folder)
        check_free(folder)
        run = Run(
            folder=folder,
            settings=settings,
            data=shards.folder.resolve(),
            data_fingerprint=fingerprint(shards),
            vocabulary_hash=shards.vocabulary.hash,
            init=init,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shards.vocabulary.save(folder / VOCABULARY)
        except OSError as error:
            raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from None
        content = {
            "schema_version": SCHEMA_VERSION,
            "bertrain": bertrain.__version__,
            "settings": settings.to_dict(),
            "data": {
                "folder": str(run.data),
                "fingerprint": run.data_fingerprint,
                "vocabulary": run.vocabulary_hash,
                "lower_case": shards.vocabulary.lower_case,
            },
            "init": init,
        }
        write_atomically(folder / "config.json", json.dumps(content, indent=1) + "\n")
        return run

    def refuse_other(self, settings: Settings, init: str) -> None:
        """Refuse to continue this run as one of other settings, or of other weights to begin with."""
        fields = differing(settings, self.settings)
        if init != self.init:
            fields.append(f"--init ({init or 'none'} here, {self.init or 'none'} there)")
        if fields:
            raise UserError(
                f"{self.folder} holds another run, which differs in {', '.join(fields)}; choose another --run"
            )

    def refuse_other_data(self, shards: Shards) -> None:
        """Refuse to continue this run on other data."""
        if fingerprint(shards) != self.data_fingerprint:
            raise UserError(
                f"{shards.folder} is not the data this run began with (manifest {fingerprint(shards)[:12]} now, "
                f"{self.data_fingerprint[:12]} then); put it back or start a new run"
            )

    def refuse_other_vocabulary(self, shards: Shards) -> None:
        """Refuse data whose words have other numbers."""
        if shards.vocabulary.hash != self.vocabulary_hash:
            raise UserError(
                f"{shards.folder} was prepared with another vocabulary than the run's; prepare it with "
                f"--vocab {self.folder / VOCABULARY}"
            )

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the run for this process; gives False if another holds it. The system frees it when a process ends."""
        with open(self.folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
            except BlockingIOError:
                yield False

    def note_environment(self, facts: dict[str, Any]) -> None:
        """Add one entry to environment.json."""
        path = self.folder / "environment.json"
        entries = json.loads(path.read_text()) if path.is_file() else []
        write_atomically(path, json.dumps([*entries, facts], indent=1) + "\n")


def check_free(folder: Path) -> None:
    """Refuse a place for a new run that holds something else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and holds something that is not a run; choose another --run")


def fingerprint(shards: Shards) -> str:
    """SHA-256 of the manifest, which names the hash of every shard: the data's identity."""
    return hashlib.sha256((shards.folder / MANIFEST).read_bytes()).hexdigest()


def describe_environment(world: int, device: str, threads: int) -> dict[str, Any]:
    """Machine and versions, for environment.json."""
    import numpy
    import torch

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": world,
        "threads": threads,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "bertrain": bertrain.__version__,
    }
