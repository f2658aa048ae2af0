"""The output folder of a command that runs several stages or runs in it, and continues when it is called again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.files import try_lock, write_atomically, writing
from bertrain.base.schema import JsonError, check_value, load_json

LOCK = ".lock"
CONTINUE = "free some space, then run the same command to continue"


@contextmanager
def locked(out: Path, description: str, *known: str) -> Iterator[None]:
    """Create the folder OUT if necessary, and lock it for this process; removes it if the body leaves no files.

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
            raise UserError("already-running", f"another process is working in {out}; wait for it")
        try:
            yield
        finally:
            if {path.name for path in out.iterdir()} == {LOCK}:
                (out / LOCK).unlink()
                out.rmdir()


def read_begun(
    path: Path, request: Any, schema: Mapping[str, Any], arguments: Mapping[str, str], advice: str = ""
) -> dict[str, Any]:
    """Read what `write_begun` wrote; {} without the file. Refuses a folder that another request began.

    A request is a dataclass with `overrides`, of which those of `log` may change. `arguments`: the names on the command
    line of fields whose option has another name. `advice` is appended to the error.
    """
    if not path.is_file():
        return {}
    try:
        kept: dict[str, Any] = load_json(path, {"request": {}, **schema})
        begun = check_value(asdict(request) | kept["request"], type(request))
    except JsonError as error:
        raise UserError("damaged-file", f"{path} is damaged ({error}); choose another --out") from None
    before, now = _lasting(begun), _lasting(request)
    for name in before | now:
        if (was := before.get(name, "")) != (wanted := now.get(name, "")):
            option = arguments.get(name, f"--{name if '.' in name else name.replace('_', '-')}")
            differs = f"was started with {_describe(option, was)}, not with {_describe(option, wanted)}"
            cure = f"use the same, or choose another --out{advice}"
            raise UserError("other-request", f"{path.parent} {differs}; {cure}")
    return kept


def _lasting(request: Any) -> dict[str, Any]:
    """The fields and settings of a request, without those of `log`."""
    values = asdict(request)
    settings = dict(values.pop("overrides"))
    return values | {name: value for name, value in settings.items() if not name.startswith("log.")}


def _describe(option: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if not value:
        return f"no {option}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
    return option if value is True else f"{option} {text}"


def write_begun(path: Path, request: Any, **content: Any) -> None:
    """Write a request and its state so far."""
    with writing(path, CONTINUE):
        write_atomically(path, json.dumps({"request": asdict(request)} | content, indent=1) + "\n")
