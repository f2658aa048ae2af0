"""The verbs of `bertrain profile`, each a thin skin over one Python function of `bertrain.observe`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bertrain.cli.data import AsJson, NewFolder
from bertrain.config import resolve as config


class RunIsTheDefault(TyperGroup):
    """`bertrain profile RECIPE` means `bertrain profile run RECIPE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


profile_app = typer.Typer(
    cls=RunIsTheDefault,
    help="See what the machine does: steps, kernels, clocks and power; how devices differ; where time is lost.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Sets = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="folders of `bertrain profile`, or runs made with --telemetry")
]


@profile_app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def profile_run(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="a recipe's name, or a .toml file")],
    out: NewFolder,
    data: Annotated[
        Path | None, typer.Option(help="examples to compute; default: random ones, all of data.max_seq_length")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="steps that are timed")] = 250,
    warm_up_steps: Annotated[int, typer.Option(min=3, help="steps before those")] = 10,
    repeat: Annotated[int, typer.Option(min=1, help="measure so often, each time from the beginning")] = 1,
    each_gpu: Annotated[
        bool, typer.Option("--each-gpu", help="every GPU of this machine alone, one after another")
    ] = False,
    cool_down: Annotated[float, typer.Option(min=0, help="seconds between two measurements")] = 0,
    bins: Annotated[
        int, typer.Option(min=0, help="bins of batch.token_budget that a rank computes in a step; 0: the recipe's step")
    ] = 1,
    recorded_steps: Annotated[int, typer.Option(min=1, help="steps after the timed ones whose kernels are kept")] = 3,
    telemetry_ms: Annotated[int, typer.Option(min=10, max=60_000, help="milliseconds between two samples")] = 50,
    trace: Annotated[bool, typer.Option("--trace", help="keep a trace of those steps, for Perfetto")] = False,
    settings_file: Annotated[Path | None, typer.Option("--settings", help="a .toml file laid over the recipe")] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="ranks to start on this machine")] = 1,
) -> None:
    """Time a fixed number of steps on each device and keep what it did: iterations, kernels, roofline, telemetry.

    `run` may be left out. Any setting can be given as --section.field VALUE.

    Example: bertrain profile run bert-tiny --steps 20 --out profiles/tiny
    """
    from bertrain.base.files import refuse_occupied
    from bertrain.cli.options import all_given, prepare_process, start_ranks, under_launcher

    resolved = config.resolve(recipe, all_given(context.args, []), settings_file)
    prepare_process(resolved.train)
    if nproc > 1 and not under_launcher():
        refuse_occupied(out)
        start_ranks(nproc)
    from bertrain.profiling.profile import profile

    profile(
        resolved, out, data=data, steps=steps, warm_up=warm_up_steps, repeat=repeat, each_gpu=each_gpu,
        cool_down=cool_down, bins=bins, recorded=recorded_steps, telemetry_ms=telemetry_ms, trace=trace,
    )  # fmt: skip


@profile_app.command("report")
def profile_report(
    folders: Sets,
    out: Annotated[
        Path | None, typer.Option(help="the page to write; default: profile-report.html in the first folder")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how devices, nodes and repeats differ, what durations go with, and who is slow; a page, CSV and JSON.

    Example: bertrain profile report profiles/tiny
    """
    from bertrain.profiling.profile_report import profile_report as write_report

    path, found = write_report(folders, out=out)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    print(found.verdict)
    spread = f", {found.spread:.1%} between the whiskers of the devices" if len(found.devices) > 1 else ""
    print(f"{1e3 * found.median_s:.2f} ms a step (median){spread}")
    if found.joules_per_million_tokens is not None:
        print(f"{found.joules_per_million_tokens:,.0f} J a million tokens")
    print(path)


@profile_app.command("roofline")
def profile_roofline(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="a folder of `bertrain profile`; its first set is shown")
    ],
    as_json: AsJson = False,
) -> None:
    """For each part of the model: operations, bytes, the floor they set, the measured time, and the share of the floor.

    Example: bertrain profile roofline profiles/tiny
    """
    from bertrain.profiling.profile_report import read_roofline
    from bertrain.profiling.roofline import table_text

    rows, facts = read_roofline(folder)
    if as_json:
        print(json.dumps({"ceilings": facts["ceilings"], "parts": [asdict(row) for row in rows]}))
        return
    ceilings = facts["ceilings"]
    print(
        f"{facts['device']['name']}: {ceilings['operations_per_s'] / 1e12:.4g} TFLOP/s in a product of "
        f"{ceilings['product']}, {ceilings['bytes_per_s'] / 1e9:,.4g} GB/s in a copy"
    )
    print(table_text(rows))
