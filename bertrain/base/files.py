"""Read text and JSON, and write files and folders atomically: beside their final place, then renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from bertrain.base.errors import UserError
from bertrain.base.schema import JsonError, parse_json

if TYPE_CHECKING:
    from torch import Tensor

_SURROGATES = re.compile("[\ud800-\udfff]")
HUB_PREFIX = "hub:"  # of weights that are downloaded from the Hugging Face hub by name


def absolute(source: str | Path) -> str:
    """A path made absolute; a name of the hub as it is, and nothing as nothing."""
    return str(source if not str(source) or str(source).startswith(HUB_PREFIX) else Path(source).resolve())


def existing_parent(path: Path) -> Path:
    """The path itself, or the closest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def cache_folder() -> Path:
    """The folder for what is computed once for each user: XDG_CACHE_HOME or ~/.cache, else a private temporary one.

    It holds libraries that are loaded, so a temporary folder that others could have made or can write raises OSError.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertrain"
        folder.mkdir(parents=True, exist_ok=True)
        if is_writable(folder):
            return folder
    folder = Path(tempfile.gettempdir()) / f"bertrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "others can write there", str(folder))
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content whole: a reader sees the old or the new, never a part."""
    with replacing(path) as file:
        file.write(text)


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Raise a failure to open or read a file as an error of the user."""
    try:
        yield
    except OSError as error:
        raise UserError("unreadable-file", f"cannot read {what}: {error.strerror or error}") from None


@contextmanager
def writing(what: object, cure: str = "") -> Iterator[None]:
    """Raise a failure to open or write a file as an error of the user."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}{f'; {cure}' if cure else ''}"
        raise UserError("unwritable-file", f"cannot write {what}: {reason}") from None


def read_text(path: Path) -> str:
    try:
        with reading(path):
            return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise UserError("not-utf8", f"{path} is not UTF-8 text at byte {error.start:,}; save it as UTF-8") from None


def is_valid_text(text: str | None) -> bool:
    """Whether it has no lone surrogates, which stand for bytes that are not UTF-8, and which no tokenizer takes."""
    return text is None or text.isascii() or not _SURROGATES.search(text)


def read_tail(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a file, or all; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - num_bytes))
            return file.read()
    except OSError:
        return b""


def read_json(path: Path, schema: Any = Any) -> Any:
    """The content of somebody's JSON file, as far as a schema says."""
    try:
        return parse_json(read_text(path), schema)
    except JsonError as error:
        raise UserError("bad-json", f"{path}: {error}; repair the file or download it again") from None


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file to write, which replaces `path` if the body succeeds."""
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
    """Write a safetensors file with the permissions of a new file; equal tensors and metadata make equal files."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None  # safetensors wraps the system's error in text
    path.chmod(mode)  # safetensors writes a temporary file that only the owner can read
    if metadata:
        _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file, which the library writes in any order; its length stays the same."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # it might be longer for names with control characters
            file.seek(8)
            file.write(text.ljust(size))


def sync(folder: Path, *, files: bool = True) -> None:
    """Flush the names in a folder to disk, and its files, before a rename declares them complete."""
    for path in (*(folder.iterdir() if files else ()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_writable(folder: Path) -> bool:
    """Whether new files may be written there; root, too, respects missing write permissions."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def refuse_occupied(out: Path) -> None:
    """Refuse an output folder that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("occupied-folder", f"{out} is not an empty folder; choose another --out or remove it")


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `place` if the body succeeds; otherwise it is deleted."""
    partial = place.parent / f".{place.name}.partial-{os.getpid()}"
    with _cleaning_up_on_sigterm():
        try:
            partial.mkdir(parents=True)
            yield partial
            if place.exists():
                place.rmdir()
            partial.rename(place)
        except OSError as error:
            reason = error.strerror or error
            cure = "free some space, or choose another folder; nothing was left there"
            raise UserError("unwritable-folder", f"could not write {place}: {reason}; {cure}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class _TerminatedError(BaseException):
    """SIGTERM was received."""


@contextmanager
def _cleaning_up_on_sigterm() -> Iterator[None]:
    """Let the body clean up on SIGTERM before the process ends by it; another handler, as of training, stays."""
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


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file for this process; False if another holds it. The system frees the lock when a process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_digest(path: Path, algorithm: str = "sha256") -> tuple[int, str]:
    """Size in bytes and digest of a file."""
    with open(path, "rb") as stream:
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, algorithm).hexdigest()
