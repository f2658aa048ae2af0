"""The output folder of a command that makes many things in it, and continues when it is called again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.files import try_lock

LOCK = ".lock"


@contextmanager
def locked(out: Path, description: str, *known: str) -> Iterator[None]:
    """The folder OUT, made if need be, and used by this process alone. Without a result, none is left behind.

    A folder without the file `description` is refused if it has files other than `known`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / LOCK, "w")  # noqa: SIM115 - held until the end
    except OSError as error:
        raise UserError("unwritable-folder", f"cannot write {out}: {error.strerror or error}") from None
    with lock:
        others = {path.name for path in out.iterdir() if path.name[0] != "."} - {description, *known}
        if others and not (out / description).exists():
            (out / LOCK).unlink()
            raise UserError("occupied-folder", f"{out} has other files; choose another --out, or remove them")
        if not try_lock(lock):
            raise UserError("already-running", f"another process is training in {out}; wait for it")
        try:
            yield
        finally:
            if {path.name for path in out.iterdir()} == {LOCK}:
                (out / LOCK).unlink()
                out.rmdir()
