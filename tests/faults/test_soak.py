"""The driver of the soak: it shares the time, counts, keeps failures with the command that repeats them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import typer

from bertrain.cli.main import app
from tests.soak.__main__ import show, soak
from tests.soak.jobs import JOBS, Scene
from tests.soak.outcome import Outcome, Unavailable


def fine(draw: random.Random, _scene: Scene, place: Path) -> Outcome:
    assert place.is_dir()
    return Outcome(found=draw.randrange(2), harmless=1)


def wrong(draw: random.Random, _scene: Scene, _place: Path) -> Outcome:
    raise AssertionError(f"drawn {draw.random()}")


def lacking(*_: object) -> Outcome:
    raise Unavailable("no such device")


def test_a_soak_counts_rounds_and_keeps_failures(tmp_path: Path) -> None:
    kinds = {"a": (0.5, fine), "b": (0.3, wrong), "c": (0.2, lacking)}
    rows = soak(1 / 36000, 7, kinds, Scene(tmp_path))
    assert rows["a"].harmless == rows["a"].rounds > 0
    assert len(rows["b"].failures) == rows["b"].rounds > 0
    assert rows["b"].failures[0] == {
        "what": f"drawn {random.Random('7 b 0').random()}",
        "repeat": 'python -m tests.soak --only "b" --seed 7 --round 0',
    }
    assert (rows["c"].rounds, rows["c"].left_out) == (0, "no such device")
    assert "left out: no such device" in show(rows)
    assert {path.name[0] for path in tmp_path.iterdir()} == {"b", "c"}, "a failure leaves its folder"


NOT_KILLED = {
    *("doctor", "evaluate", "fill-mask", "logs", "mlperf check", "profile roofline", "recipes", "score", "settings"),
    *("watch", "data inspect", "data stats", "data verify", "weights compare", "weights show"),  # write nothing
    *("data download", "data mlperf"),  # need servers; tests/faults/test_download.py stops a download
    *("launch cancel", "launch logs", "launch mpi", "launch pbs", "launch preflight", "launch slurm", "launch ssh"),
    *("launch status", "serve"),  # write nothing
}
"""The launchers of clusters are tried in tests/services."""


def test_every_verb_is_killed_in_the_soak_or_named_here() -> None:
    root: Any = typer.main.get_command(app)
    verbs = set[str]()
    for name, verb in root.commands.items():
        below = getattr(verb, "commands", {"": verb})
        verbs |= {f"{name} {one}".strip() for one, command in below.items() if not command.hidden}
    killed = {verb for verb in verbs for job in JOBS if job == verb or job.startswith(f"{verb} on ")}
    assert verbs - killed == NOT_KILLED
