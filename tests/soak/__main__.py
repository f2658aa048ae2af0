"""Make trouble of every kind for some hours, and print one table: any failure is one too many.

    python -m tests.soak --hours 1 --seed 1 [--only kills flips] [--output FILE]

`--only KIND --seed SEED --round NUMBER` repeats one round: the same signals after the same seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.soak import damage, processes, resources
from tests.soak.jobs import Scene
from tests.soak.outcome import Trouble, Unavailable

TROUBLES: dict[str, tuple[float, Trouble]] = {
    "kills": (0.3, processes.kill),
    "full disk": (0.1, resources.fill_disk),
    "limits": (0.1, resources.limit),
    "stop": (0.1, processes.stop),
    "clock": (0.05, processes.jump),
    "flips": (0.15, damage.flip),
    "readers": (0.1, damage.mutate),
    "long": (0.1, partial(resources.run_long, 30.0)),
}
"""Each kind with its share of the time."""
COLUMNS = ("rounds", "found", "harmless", "shown", "failures")


@dataclass
class Row:
    """What one kind of trouble came to."""

    rounds: int = 0
    found: int = 0
    harmless: int = 0
    shown: int = 0
    seconds: float = 0.0
    left_out: str = ""
    failures: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_trouble(kind: str, trouble: Trouble, row: Row, scene: Scene, seed: int, number: int) -> None:
    """One round, in a folder of its own that only a failure leaves behind."""
    place, began = scene.folder / f"{kind.replace(' ', '-')}-{number}" / "round", time.monotonic()
    place.mkdir(parents=True)
    try:
        outcome = trouble(random.Random(f"{seed} {kind} {number}"), scene, place)
    except Unavailable as reason:
        row.left_out = str(reason)
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        repeat = f'python -m tests.soak --only "{kind}" --seed {seed} --round {number}'
        row.failures.append({"what": what[-3000:].replace(str(Path.cwd()), "."), "repeat": repeat})
        row.rounds += 1
        print(f"FAILURE in {kind}, {repeat}:\n{what}", flush=True)
    else:
        row.rounds += 1
        row.found += outcome.found
        row.harmless += outcome.harmless
        row.shown += outcome.shown
        row.notes.append(outcome.note.replace(str(scene.folder), "SOAK"))
        print(f"{kind} {number}: {outcome}", flush=True)
        shutil.rmtree(place.parent, ignore_errors=True)
    row.seconds += time.monotonic() - began


def soak(hours: float, seed: int, kinds: dict[str, tuple[float, Trouble]], scene: Scene) -> dict[str, Row]:
    """Always the kind that is furthest behind its share, until the time is over."""
    rows, seconds = {kind: Row() for kind in kinds}, 3600 * hours
    end, total = time.monotonic() + seconds, sum(share for share, _ in kinds.values())
    if "long" in kinds:
        share = kinds["long"][0]
        kinds["long"] = (share, partial(resources.run_long, seconds * share / total))
    while time.monotonic() < end:
        waiting = [kind for kind, row in rows.items() if not row.left_out and not (kind == "long" and row.rounds)]
        if not waiting:
            break
        kind = min(waiting, key=lambda kind: rows[kind].seconds / kinds[kind][0])
        make_trouble(kind, kinds[kind][1], rows[kind], scene, seed, rows[kind].rounds)
    return rows


def show(rows: dict[str, Row]) -> str:
    lines = [f"{'kind':<10}" + "".join(f"{name:>10}" for name in COLUMNS)]
    for kind, row in rows.items():
        values = (row.rounds, row.found, row.harmless, row.shown, len(row.failures))
        left_out = f"  left out: {row.left_out}" if row.left_out else ""
        lines.append(f"{kind:<10}" + "".join(f"{value:>10}" for value in values) + left_out)
    return "\n".join(lines)


def write(path: Path, rows: dict[str, Row], seed: int) -> None:
    """Add a row to each kind that was run: no failure is written over."""
    table = json.loads(path.read_text()) if path.is_file() else {}
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    for kind, row in rows.items():
        table.setdefault(kind, []).append({"seed": seed, "machine": machine} | asdict(row))
    path.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--only", nargs="+", choices=TROUBLES, default=list(TROUBLES))
    parser.add_argument("--round", type=int, help="this round alone, of the one kind of --only")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    kinds = {kind: TROUBLES[kind] for kind in given.only}
    scene = Scene(Path(tempfile.mkdtemp(prefix="soak-")))
    print(f"seed {given.seed}, in {scene.folder}", flush=True)
    if given.round is None:
        rows = soak(given.hours, given.seed, kinds, scene)
    else:
        rows = {kind: Row() for kind in kinds}
        for kind, (_, trouble) in kinds.items():
            make_trouble(kind, trouble, rows[kind], scene, given.seed, given.round)
    print(show(rows))
    num_failures = sum(len(row.failures) for row in rows.values())
    if given.output:
        write(given.output, rows, given.seed)
    if not num_failures:
        shutil.rmtree(scene.folder)
    raise SystemExit(num_failures > 0)


if __name__ == "__main__":
    main()
