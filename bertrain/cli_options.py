"""Options that several verbs share, and what they have in common: settings on the command line, ranks to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]
Device = Literal["auto", "cpu", "cuda"]
RankCount = Annotated[int, typer.Option("--nproc", min=1, help="ranks to start on this machine")]
Restarts = Annotated[
    int,
    typer.Option(min=0, help="start all ranks again after one died or hung, so often without a new checkpoint"),
]
MaxSamples = Annotated[str | None, typer.Option("--max-samples", metavar="N", help="train.max_samples")]
MaxTime = Annotated[str | None, typer.Option("--max-time", metavar="TIME", help="train.max_time, such as 1h30m")]
SkipSteps = Annotated[
    str | None, typer.Option("--skip-steps", metavar="STEPS", help="train.skip_steps, such as 1200-1210,1300")
]


def given(**options: str | None) -> list[tuple[str, str]]:
    """The options of these names that were given, as settings of the run."""
    return [(f"train.{name}", value) for name, value in options.items() if value is not None]


def start_ranks(nproc: int, restarts: int = 0, runs: Sequence[Path] = ()) -> None:
    """Run this same command as several ranks, and end as they end; a new checkpoint in one of `runs` is progress."""
    from bertrain.launch.local import run_ranks

    def steps_saved() -> int:
        from bertrain.train.checkpoint import step_of, whole_checkpoints

        newest = [whole_checkpoints(run / "checkpoints")[-1:] for run in runs]
        return sum(step_of(path) for paths in newest for path in paths)

    raise SystemExit(run_ranks(nproc, sys.argv[1:], restarts=restarts, progress=steps_saved))


def under_launcher() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
