"""Checkpoints: a folder of safetensors and JSON, written whole or not at all, verified before it is trusted.

    checkpoints/step-00000500/
        model.safetensors       weights by parameter name
        optimizer.safetensors   moments by parameter name
        state.json              counters, and the settings it was made with; there is no random state to keep
        manifest.json           size and SHA-256 of the three, written last
    checkpoints/best.json       which of them is the best, with checkpoint.keep_best

A checkpoint does not depend on the number of ranks. It is written beside its place, synced, and renamed; older ones are
deleted only after that. It contains no pickle. Training waits for a copy to host memory, not for the disk.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest, save_tensors, sync, write_atomically
from bertrain.base.schema import Count, Finite, JsonError, check_value, load_json

if TYPE_CHECKING:  # listing checkpoints does not import torch
    from torch import Tensor

SCHEMA_VERSION = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
MANIFEST = "manifest.json"
BEST = "best.json"


class RemovedError(UserError):
    """Another process removed a checkpoint after it was chosen and before it was read."""


@dataclass(frozen=True)
class Progress:
    """The counters of a run."""

    step: Count = 0
    samples: Count = 0  # examples trained on or skipped: also the position of the next one in the endless order
    tokens: Count = 0
    updates: Count = 0
    """Optimizer updates, with those of a run whose moments were kept; not those that were not finite, or skipped."""
    seconds: float = 0.0  # time in the loop, over all starts, evaluations and saves included
    evaluation_seconds: float = 0.0  # of these
    saving_seconds: float = 0.0  # of these: only what training waited for
    best_step: Count = 0  # the step of the best evaluation so far, 0 if there was none
    best_accuracy: float = 0.0  # its masked-word accuracy, or the main metric of a task


WRITTEN = {"bytes": Count, "sha256": str}  # a file in the manifest


@dataclass(frozen=True)
class Snapshot:
    """A run's state, copied off the device, so that training does not change it."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    progress: Progress


class Saver:
    """Writes snapshots in the background, one at a time; `failure` is set if one could not be written."""

    def __init__(
        self, folder: Path, keep: int, *, keep_best: bool = False, settings: dict[str, Any] | None = None
    ) -> None:
        self.folder, self.keep, self.keep_best, self.settings = folder, keep, keep_best, settings
        self._writer: threading.Thread | None = None
        self.failure: Exception | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Start to write `snapshot`, once the one before it is written."""
        self.wait()
        self._writer = threading.Thread(target=self._write, args=(snapshot,), name="bertrain-saver")
        self._writer.start()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_checkpoint(self.folder, snapshot, self.settings)
            if self.keep_best and snapshot.progress.best_step == snapshot.progress.step:
                write_best(self.folder, snapshot.progress)
            purge(self.folder, self.keep)
        except Exception as error:  # the loop checks it after each step and ends the run
            self.failure = error


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def is_name(name: str) -> bool:
    """Whether this is a `checkpoint_name`."""
    return re.fullmatch(r"step-\d{8,}", name, re.ASCII) is not None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def write_checkpoint(folder: Path, snapshot: Snapshot, settings: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint of a run with these settings into `folder`; on an error nothing of it remains."""
    final = folder / checkpoint_name(snapshot.progress.step)
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_tensors(snapshot.model, partial / MODEL)
        save_tensors(snapshot.optimizer, partial / OPTIMIZER)
        state = {"schema_version": SCHEMA_VERSION} | asdict(snapshot.progress) | {"settings": settings or {}}
        (partial / STATE).write_text(json.dumps(state, indent=1) + "\n")
        manifest = {name: dict(zip(("bytes", "sha256"), file_digest(partial / name), strict=True)) for name in FILES}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        sync(partial)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step, passed over at resume
        partial.rename(final)
        sync(folder, files=False)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def purge(folder: Path, keep: int) -> None:
    """Delete the oldest checkpoints beyond `keep`, but never the best; each is renamed first, in case of a crash."""
    best = read_best(folder)
    for path in whole_checkpoints(folder)[:-keep]:
        if best is None or path.name != checkpoint_name(best):
            doomed = path.with_name(f".{path.name}.partial")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def write_best(folder: Path, progress: Progress) -> None:
    """Mark a checkpoint, which must be on the disk already, as the best."""
    best = {"step": progress.best_step, "figure": progress.best_accuracy}
    write_atomically(folder / BEST, json.dumps(best) + "\n")


def read_best(folder: Path) -> int | None:
    """The step of the checkpoint that is marked as the best, if one is."""
    try:
        return int(load_json(folder / BEST, {"step": Count})["step"])
    except (OSError, JsonError):
        return None


def with_best(folder: Path, progress: Progress) -> Progress:
    """`progress` with the best evaluation that best.json names, or with none."""
    try:
        best = load_json(folder / BEST, {"step": Count, "figure": Finite})
    except (OSError, JsonError):
        best = {"step": 0, "figure": 0.0}
    return replace(progress, best_step=best["step"], best_accuracy=best["figure"])


def reconcile_best(folder: Path, progress: Progress) -> str:
    """Make best.json agree with a run resumed at `progress`. Returns a warning if the best checkpoint is lost.

    The counters know which step was the best, but for an evaluation after the last save. best.json may be older (a kill
    between the two) or name a checkpoint that is damaged or gone.
    """
    stated = read_best(folder)
    if progress.step and stated == progress.step and find_damage(folder / checkpoint_name(stated)) is None:
        return ""  # the newest, which was evaluated after it was saved
    damage = find_damage(folder / checkpoint_name(progress.best_step)) if progress.best_step else "none was known"
    if damage is None:
        write_best(folder, progress)
        return ""
    (folder / BEST).unlink(missing_ok=True)
    lost = f"the best checkpoint, of step {stated}, is lost ({damage}); the next evaluation is the best so far"
    return lost if stated else ""


def set_aside(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, the newest first, so that they are not used; nothing is deleted.

    If the process is killed in between, the newest checkpoint that remains is whole.
    """
    if (read_best(folder) or 0) > step:
        (folder / BEST).unlink()
    moved = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        if path.name > checkpoint_name(step):
            names = (path.with_name(f"aside-{number}-{path.name}") for number in itertools.count(1))
            moved.append(path.rename(next(aside for aside in names if not aside.exists())))
    return moved


def tidy(folder: Path, newest: Path | None) -> None:
    """Remove what crashes left behind; called by the one process that holds the run's lock.

    Checkpoints newer than `newest` are damaged. They are renamed, so that they are not used but can be inspected.
    """
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("step-*"):
        if newest is None or path.name > newest.name:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints with all their files, oldest first. Their content is checked by `find_damage`."""
    return sorted(path for path in folder.glob("step-*") if (path / MANIFEST).is_file())


def find_damage(checkpoint: Path, *, hashes: bool = True) -> str | None:
    """Describe what is wrong with a checkpoint; None if every file is as written, or only as long without `hashes`."""
    try:
        manifest = load_json(checkpoint / MANIFEST, dict.fromkeys(FILES, WRITTEN))
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except JsonError as error:
        return f"{MANIFEST}: {error}"
    for name in FILES:
        try:
            is_same = manifest[name]["bytes"] == (checkpoint / name).stat().st_size
            is_same = is_same and (not hashes or manifest[name]["sha256"] == file_digest(checkpoint / name)[1])
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if not is_same:
            return f"{name} is not what was written"
    return None


def weights_digest(checkpoint: Path) -> str:
    """The SHA-256 of a checkpoint's weights as its manifest states it; `find_damage` compares it with the file."""
    with _refusing_removed(checkpoint):
        return str(load_json(checkpoint / MANIFEST, {MODEL: WRITTEN})[MODEL]["sha256"])


def newest_whole(folder: Path, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, if there is one, and a warning for each newer one passed over.

    The folder is listed again each time: a run that is still training removes checkpoints and writes others.
    """
    warnings, seen = list[str](), set[Path]()
    while path := max(set(folder.glob("step-*")) - seen, default=None):
        damage = find_damage(path, hashes=hashes)
        if damage is None:
            return path, warnings
        seen.add(path)
        if path.is_dir():
            warnings.append(f"passing over the checkpoint {path}: {damage}")
    return None, warnings


def choose(folder: Path, which: str, *, hashes: bool = True) -> tuple[Path, list[str]]:
    """A whole checkpoint of a run by `newest`, `best` or its step, with warnings for those passed over.

    Without `hashes`, only the sizes of its files are checked: another process has hashed them.
    """
    if which == "newest":
        newest, warnings = newest_whole(folder, hashes=hashes)
        if newest is None:
            reason = "; ".join(warnings) or "it has saved none yet"
            raise UserError("no-checkpoint", f"the run {folder.parent} has no valid checkpoint: {reason}")
        return newest, warnings
    if which != "best" and not (which.isascii() and which.isdigit()):
        raise UserError("unknown-checkpoint", f"--checkpoint is {which!r}; give newest, best or the number of a step")
    step = read_best(folder) if which == "best" else int(which)
    if step is None:
        cure = "train with checkpoint.keep_best true"
        raise UserError("no-best-checkpoint", f"no checkpoint in {folder} is marked as the best; {cure}")
    return find_step(folder, step, hashes=hashes), []


def find_step(folder: Path, step: int, *, hashes: bool = True) -> Path:
    """The whole checkpoint of a step; UserError if it is missing or damaged."""
    path = folder / checkpoint_name(step)
    if not path.is_dir():
        there = ", ".join(str(step_of(one)) for one in whole_checkpoints(folder)) or "none"
        raise UserError("unknown-checkpoint", f"{folder} has no checkpoint of step {step}; there are: {there}")
    if damage := find_damage(path, hashes=hashes):
        raise UserError("damaged-checkpoint", f"the checkpoint {path} is damaged: {damage}; choose another")
    return path


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    return _load_tensors(checkpoint / MODEL)


def read_moments(checkpoint: Path) -> dict[str, Tensor]:
    return _load_tensors(checkpoint / OPTIMIZER)


@contextmanager
def _refusing_removed(checkpoint: Path) -> Iterator[None]:
    """Say so if a checkpoint is gone that was there when it was chosen."""
    try:
        yield
    except (FileNotFoundError, RuntimeError):  # torch's, if safetensors opened a file that is gone before torch does
        if checkpoint.is_dir():
            raise
        gone = f"the checkpoint {checkpoint} was removed while it was read, as by a run that is still training"
        raise RemovedError("removed-checkpoint", f"{gone}; start the same command again") from None


def _load_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with _refusing_removed(file.parent):
            return load_file(file)
    except SafetensorError as error:
        raise UserError("damaged-checkpoint", f"{file} is damaged: {error}; remove its checkpoint") from None


def read_progress(checkpoint: Path) -> Progress:
    return read_state(checkpoint)[0]


def read_state(checkpoint: Path) -> tuple[Progress, dict[str, Any]]:
    """The counters, and the settings of the run that wrote it."""
    try:
        with _refusing_removed(checkpoint):
            state = load_json(checkpoint / STATE, {"schema_version": int, "settings?": {}})
        if state["schema_version"] != SCHEMA_VERSION:
            raise UserError(
                "other-layout", f"{checkpoint} was written by another version of bertrain; use that version"
            )
        return check_value(state, Progress), state.get("settings", {})
    except JsonError as error:
        raise UserError("damaged-checkpoint", f"{checkpoint / STATE}: {error}; remove its checkpoint") from None


def read_checkpoint(checkpoint: Path) -> Snapshot:
    return Snapshot(read_weights(checkpoint), read_moments(checkpoint), read_progress(checkpoint))
