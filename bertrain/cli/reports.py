"""The commands that read run folders: report, watch, logs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bertrain.base.errors import UserError
from bertrain.base.logs import Level
from bertrain.cli.options import AsJson, RunFolder, new_app

app = new_app()


@app.command("report")
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="run folders; the others are compared with the first")],
    out: Annotated[Path | None, Option(help="the page to write; default: report.html in the first run")] = None,
) -> None:
    """Write one self-contained HTML page about one run, or about several side by side.

    Example: bertrain report runs/tiny runs/other --out compared.html
    """
    from bertrain.reports.report import report as write_report

    print(write_report(runs, out=out))


@app.command("watch")
def watch(
    run: RunFolder,
    web: Annotated[
        bool, Option("--web", help="serve the live report of a run, or of a folder of runs, instead")
    ] = False,
    host: Annotated[str | None, Option(help="with --web: address to listen on; default: this machine only")] = None,
    port: Annotated[
        int | None, Option(min=0, max=65535, help="with --web: port to listen on; default: 8001; 0: any free one")
    ] = None,
    once: Annotated[bool, Option("--once", help="print the state once and exit, for scripts")] = False,
    every: Annotated[float, Option(min=0.1, help="seconds between two updates")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show the progress of a run on the terminal until it ends, from any machine that sees its folder.

    It only reads the folder. It also follows a run that is stopped and resumed. With --json, it prints a line of JSON
    per update. With --web, it serves the live report of a run, or of all runs in a folder.

    Example: bertrain watch runs/tiny --once
    """
    if web and (once or as_json):
        raise UserError("conflicting-options", "--web serves pages and prints nothing; leave --once and --json out")
    if not web and (host is not None or port is not None):
        raise UserError("option-without-effect", "--host and --port need --web; give it, or leave them out")
    if web:
        from bertrain.serving.server import watch_web

        watch_web(run, host=host or "127.0.0.1", port=8001 if port is None else port, every_s=every)
        return
    from bertrain.reports.watch import watch as show

    with suppress(KeyboardInterrupt):
        show(run, once=once, every_s=every, as_json=as_json)


@app.command("logs")
def logs(
    run: RunFolder,
    rank: Annotated[int | None, Option(min=0, help="only this rank; default: all, sorted by time")] = None,
    since: Annotated[str, Option(metavar="TIME", help="only entries of the last TIME, such as 10m")] = "",
    level: Annotated[Level, Option(help="the lowest level to show")] = "info",
    follow: Annotated[bool, Option("--follow", help="wait for new lines, until Ctrl-C")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the logs of a run's ranks: console lines, warnings, and how each rank started and ended.

    With --json, each entry is a line of JSON.

    Example: bertrain logs runs/tiny --rank 0 --since 10m --level warning
    """
    from bertrain.base.logs import describe
    from bertrain.base.logs import logs as read_logs

    with suppress(KeyboardInterrupt):
        for entry in read_logs(run, rank=rank, since=since, level=level, follow=follow):
            print(json.dumps(entry) if as_json else describe(entry), flush=follow)
