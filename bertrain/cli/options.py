"""Options that several verbs share, and what they have in common: settings on the command line, ranks to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertrain.base.errors import UserError
from bertrain.config.resolve import parse_overrides

if TYPE_CHECKING:
    from bertrain.config.settings import TrainSettings

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]
Device = Literal["auto", "cpu", "cuda"]
RankCount = Annotated[int, typer.Option("--nproc", min=1, help="ranks to start on this machine")]
Restarts = Annotated[
    int,
    typer.Option(min=0, help="start all ranks again after one died or hung, so often without a new checkpoint"),
]
MaxSamples = Annotated[str | None, typer.Option("--max-samples", metavar="N", help="train.max_samples")]
OnError = Annotated[str | None, typer.Option("--on-error", metavar="WHAT", help="a damaged row: stop or skip")]
MaxTime = Annotated[str | None, typer.Option("--max-time", metavar="TIME", help="train.max_time, such as 1h30m")]
SkipSteps = Annotated[
    str | None, typer.Option("--skip-steps", metavar="STEPS", help="train.skip_steps, such as 1200-1210,1300")
]


Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="FORMAT",
        help="train.precision: auto, fp32, tf32, bf32, bf16, fp16, fp8; avx-fp32: without AMX",
    ),
]
Instructions = Annotated[str | None, typer.Option("--isa", metavar="ISA", help="train.isa: auto, avx2, avx512, amx")]


def prepare_process(train: TrainSettings) -> None:
    """What has to be settled before torch is there: instructions, and who hands out memory and threads."""
    from bertrain.base.isa import cap_isa
    from bertrain.ranks.preload import start_again

    start_again(train.device, train.allocator, train.openmp)
    cap_isa(train.isa)


def given_precision(precision: str | None, isa: str | None) -> list[tuple[str, str]]:
    """Two options as settings. Intel's scripts call fp32 without AMX avx-fp32."""
    if precision == "avx-fp32":
        if isa not in (None, "avx512"):
            raise UserError(f"--precision avx-fp32 is fp32 up to avx512, and --isa says {isa}; leave one of them out")
        precision, isa = "fp32", "avx512"
    return given(precision=precision, isa=isa)


def all_given(arguments: list[str], also: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Settings given as --section.field VALUE, of which the last one counts, and `also` by options of their own."""
    pairs = parse_overrides(arguments)
    values = dict(pairs)
    for key, value in also:
        if values.get(key, value) != value:
            raise UserError(f"{key} is given twice, as {values[key]} and as {value}; leave one of them out")
    return [*pairs, *also]


def given(**options: str | None) -> list[tuple[str, str]]:
    """The options of these names that were given, as settings of the run."""
    return [(f"train.{name}", value) for name, value in options.items() if value is not None]


def start_ranks(nproc: int, restarts: int = 0, runs: Sequence[Path] = ()) -> None:
    """Run this same command as several ranks, and end as they end; a new checkpoint in one of `runs` is progress."""
    from bertrain.launch.local import run_ranks

    def steps_saved() -> int:
        from bertrain.run.checkpoint import step_of, whole_checkpoints

        newest = [whole_checkpoints(run / "checkpoints")[-1:] for run in runs]
        return sum(step_of(path) for paths in newest for path in paths)

    raise SystemExit(run_ranks(nproc, sys.argv[1:], restarts=restarts, progress=steps_saved))


def under_launcher() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
