"""The commands of `bertrain profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from bertrain.cli import options
from bertrain.config import resolve as config


class RunIsTheDefault(options.Commands):
    """`bertrain profile RECIPE` means `bertrain profile run RECIPE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


app = options.new_app(
    "profile",
    "Profile training: steps, kernels, clocks and power; differences between devices; the roofline.",
    cls=RunIsTheDefault,
)

Sets = Annotated[list[Path], Argument(metavar="DIR...", help="folders of `bertrain profile`, or runs with --telemetry")]


@app.command("run", context_settings=options.OVERRIDES)
@options.takes_settings()
def profile_run(
    recipe: options.RecipeName,
    out: options.NewFolder,
    overrides: options.Overrides,
    data: Annotated[
        Path | None, Option(help="data to train on; default: random examples of data.max_seq_length tokens")
    ] = None,
    steps: Annotated[int, Option(min=2, help="steps to time")] = 250,
    warm_up_steps: Annotated[int, Option(min=3, help="steps before the timed ones")] = 10,
    repeat: Annotated[int, Option(min=1, help="number of measurements, each from scratch")] = 1,
    each_gpu: Annotated[bool, Option("--each-gpu", help="measure the GPUs of this machine one after another")] = False,
    cool_down: Annotated[float, Option(min=0, help="seconds between two measurements")] = 0,
    bins: Annotated[int, Option(min=0, help="bins (micro-batches) of a rank in a step; 0: the recipe's step")] = 1,
    recorded_steps: Annotated[int, Option(min=1, help="steps after the timed ones whose kernels are recorded")] = 3,
    telemetry_ms: Annotated[int, Option(min=10, max=60_000, help="milliseconds between two samples of telemetry")] = 50,
    trace: Annotated[bool, Option("--trace", help="keep a trace of the recorded steps, for Perfetto")] = False,
    settings_file: options.SettingsFile = None,
    nproc: options.RankCount = 1,
) -> None:
    """Time a fixed number of steps on each device and record iterations, kernels, roofline and telemetry.

    `run` may be omitted. Any setting can be given as --section.field VALUE.

    Example: bertrain profile run bert-tiny --steps 20 --out profiles/tiny
    """
    from bertrain.base.files import refuse_occupied

    resolved = config.resolve(recipe, overrides, settings_file)
    options.prepare_process(resolved.train)
    if options.starts_ranks(nproc):
        refuse_occupied(out)
        options.start_ranks(nproc, runs=[out], settings=resolved, data=[data] if data else [])
    from bertrain.profiling.profile import profile

    profile(
        resolved, out, data=data, steps=steps, warm_up=warm_up_steps, repeat=repeat, each_gpu=each_gpu,
        cool_down=cool_down, bins=bins, recorded=recorded_steps, telemetry_ms=telemetry_ms, trace=trace,
    )  # fmt: skip


@app.command("report")
def profile_report(
    folders: Sets,
    out: Annotated[Path | None, Option(help="the page; default: profile-report.html in the first folder")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Report how devices, nodes and repeats differ, what correlates with their times, and which are slow.

    Example: bertrain profile report profiles/tiny
    """
    from bertrain.profiling.profile_report import profile_report as write_report

    path, found = write_report(folders, out=out)
    if options.printed_json(found, as_json):
        return
    print(found.verdict)
    spread = f", {found.spread:.1%} between the whiskers of the devices" if len(found.devices) > 1 else ""
    print(f"{1e3 * found.median_s:.2f} ms per step (median){spread}")
    if found.joules_per_million_tokens is not None:
        print(f"{found.joules_per_million_tokens:,.0f} J per million tokens")
    print(path)


@app.command("roofline")
def profile_roofline(
    folder: Annotated[
        Path, Argument(metavar="DIR", help="a folder of `bertrain profile`; its first measurement is shown")
    ],
    as_json: options.AsJson = False,
) -> None:
    """Print operations, bytes, lower bound, measured time and share of the bound for each part of the model.

    Example: bertrain profile roofline profiles/tiny
    """
    from bertrain.profiling.profile_report import describe_ceilings, read_roofline
    from bertrain.profiling.roofline import table_text

    rows, facts = read_roofline(folder)
    if options.printed_json({"ceilings": facts["ceilings"], "parts": rows}, as_json):
        return
    print(describe_ceilings(facts))
    print(table_text(rows))
