"""Damaged files: one flipped bit of a run, and mutations of everything that bertrain reads."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests import fuzz
from tests.miniature_tasks import command_line
from tests.soak.jobs import STEPS, Ended, Scene, digest, files_of, in_child
from tests.soak.outcome import Outcome

RECORDS = {"metrics.jsonl", "environment.json", "logs", "tensorboard"}
"""Files of a run that hold what happened. Only pages and lists show them; no other result depends on them."""
SHOWS_RECORDS = ("report", "logs", "model card")


def flip(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """One bit of one file of a run that stopped before its end: each command finds it or gives the same result."""
    run = scene.folder / "flipped" / "run"
    if run.parent.exists():
        shutil.rmtree(run.parent)
    shutil.copytree(scene.place_of("pretrain on 1") / "run", run)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    look = partial(_use, run, scene.inputs / "data", scene.folder / "flipped")
    if "flipped" not in scene.references:
        scene.references["flipped"] = in_child(look, place / "whole.log")
        return flip(draw, scene, place)
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[int(place.parent.name.rpartition("-")[2]) % len(files)]  # the rounds go over all files
    content = bytearray(path.read_bytes())
    where, bit = draw.randrange(len(content)), draw.randrange(8)
    content[where] ^= 1 << bit
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # which the report shows
    named = path.relative_to(run)
    note = f"bit {bit} of byte {where} of {named} ({bytes(content[max(0, where - 20) : where + 20])!r})"
    try:
        used = in_child(look, place / "flipped.log")
    except AssertionError as error:
        raise AssertionError(f"{note}: {error}") from None
    found = shown = False
    for command, (code, err, result) in used.items():
        whole = scene.references["flipped"][command]
        assert "Traceback" not in err, f"{note}, {command}: {err[-3000:]}"
        if code:
            assert (code, len(Ended(code, err).sentences)) == (2, 1), f"{note}, {command}: {code}\n{err[-2000:]}"
            found = True
        elif result != whole[2]:
            if "warning:" in err.replace(whole[1], ""):
                found = True
            elif command in SHOWS_RECORDS and RECORDS & {*named.parts}:
                shown = True
            else:
                raise AssertionError(f"{note}, {command}: another result without a word:\n{result}\nnot\n{whole[2]}")
        else:
            found = found or "warning:" in err.replace(whole[1], "")
    return Outcome(found=found, shown=shown and not found, harmless=not (found or shown), note=note)


def _use(run: Path, data: Path, folder: Path) -> dict[str, tuple[int, str, object]]:
    """Exit code, errors and result of each command that reads a run; resume comes last, which changes it."""
    exported, page = folder / "exported", folder / "report.html"
    commands: dict[str, tuple[list[object], Callable[[str], object]]] = {
        "evaluate": (["evaluate", run, "--data", data, "--json"], str),
        "fill-mask": (["fill-mask", run, "bato [MASK] kese", "--json"], str),
        "weights export": (["weights", "export", run, "--out", exported], lambda _: _without_card(exported)),
        "model card": (["weights", "export", run, "--out", exported / "again"], lambda _: files_of(exported / "again")),
        "report": (["report", run, "--out", page], lambda _: digest(page)),
        "logs": (["logs", run], str),
        "resume": (["resume", run], lambda _: _tensors(run)),
    }
    found = {}
    for command, (words, result) in commands.items():
        ended = command_line(*words, check=False)
        found[command] = (ended.code, ended.err, result(ended.out) if ended.code == 0 else None)
    return found


def _without_card(exported: Path) -> dict[str, str]:
    return {name: content for name, content in files_of(exported).items() if name != "README.md"}


def _tensors(run: Path) -> dict[str, str]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {path.name: digest(path) for path in newest.glob("*.safetensors")}


READING_S = 4.0


def mutate(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """Mutations of one file that bertrain reads, for some seconds."""
    reader = draw.choice(fuzz.readers())

    def read() -> list[int]:
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        fuzzed, end = fuzz.Fuzzed(reader, place / "fuzzed"), time.monotonic() + READING_S
        while time.monotonic() < end:
            if finding := fuzzed.try_one(draw):
                kept = scene.folder.with_name(f"{scene.folder.name}-{digest(fuzzed.path)}")
                kept.write_bytes(finding.content)
                raise AssertionError(f"{reader.name}: {finding.what} (mutated file: {kept})")
        return [fuzzed.num_read, fuzzed.num_refused]

    num_read, num_refused = in_child(read, place / "reader.log")
    return Outcome(found=num_refused, harmless=num_read, note=reader.name)
