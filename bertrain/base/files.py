"""Files and folders that are whole or not there: written beside their place, renamed into it."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from bertrain.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content whole: a reader sees the old or the new, never a part."""
    with replacing(path) as file:
        file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file to write, which takes the place of `path` when the body has ended well."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file of tensors that others may read as they may any new file here."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None  # its writer wraps the system's error in text
    path.chmod(mode)  # it writes a passing file, which is for the owner alone


def sync(folder: Path) -> None:
    """Have the files of a folder on the disk, before a rename says that they are whole."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def refuse_occupied(out: Path) -> None:
    """Refuse a place for a new folder that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose another --out or remove it")


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `place` when the body has ended well; otherwise nothing is left of it."""
    partial = place.parent / f".{place.name}.partial-{os.getpid()}"
    with _tidying_before_the_end():
        try:
            partial.mkdir(parents=True)
            yield partial
            if place.exists():
                place.rmdir()
            partial.rename(place)
        except OSError as error:
            raise UserError(f"could not write {place}: {error.strerror or error}; nothing was left there") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class _TerminatedError(BaseException):
    """SIGTERM has come."""


@contextmanager
def _tidying_before_the_end() -> Iterator[None]:
    """Let the body clean up when SIGTERM comes, instead of ending on the spot; the process then ends by it.

    Where somebody else has taken charge of the signal, as the training loop does, it stays theirs.
    """
    in_charge = threading.current_thread() is threading.main_thread()
    if not in_charge or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(*_: object) -> None:
        raise _TerminatedError

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except _TerminatedError:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def file_digest(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    with open(path, "rb") as stream:
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()
