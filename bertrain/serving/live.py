"""`bertrain watch --web`: the report of a run, or of every run in a folder, as it would be written now.

GET /            the report; of a folder, its runs and what each does
GET /runs/NAME/  the report of a run in the folder
GET /compare     that of all its runs side by side
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from bertrain.base import logs
from bertrain.base.errors import UserError
from bertrain.base.formatting import duration, show
from bertrain.reports.history import read
from bertrain.reports.page import parts, render_page
from bertrain.reports.report import page
from bertrain.reports.watch import look, step_text
from bertrain.run.folder import Run, runs_in
from bertrain.serving.app import HEADERS

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

REST = 4  # pause after drawing a page, as a multiple of the drawing time: a run may train on the same cores
LINK = Markup('<a href="{}">{}</a>')


class LiveReports:
    """The pages of a run folder, or of a folder of runs; drawn when they are asked for and something was written."""

    def __init__(self, folder: Path, every_s: float) -> None:
        self.folder, self.name, self.every_s = folder, folder.resolve().name, every_s
        self._drawn: dict[str, tuple[Any, float, str]] = {}  # by path: the files it is of, when to draw again, the page
        self.is_run = not self._find()
        if self.is_run:
            Run.open(folder)  # refuses what is no run

    def _find(self) -> dict[str, Path]:
        found = [] if runs_in(self.folder, depth=0) else [*runs_in(self.folder), *runs_in(self.folder, depth=2)]
        return {str(run.relative_to(self.folder)): run for run in found}

    def page(self, path: str) -> str | None:
        """The page at a path; None if there is none."""
        runs = {} if self.is_run else self._find()
        if not path:
            return self._report(path, [self.folder]) if self.is_run else self._list(runs)
        run = runs.get(path.removeprefix("runs/")) if path.startswith("runs/") else None
        shown = list(runs.values()) if path == "compare" else [run] if run else []
        return self._report(path, shown) if shown else None

    def _list(self, runs: dict[str, Path]) -> str:
        rows = []
        for name, run in runs.items():
            link = LINK.format(f"/runs/{quote(name)}/", name)
            try:
                seen = look(run)
            except UserError as error:  # config.json is being written, or damaged
                rows.append([link, str(error), "", "", ""])
                continue
            loss = show("loss", seen["metrics"]["loss"]) if "loss" in seen.get("metrics", {}) else ""
            ago = "" if seen["last_word_s"] is None else f"{duration(seen['last_word_s'])} ago"
            rows.append([link, state_text(seen), step_text(seen, bar_width=0), loss, ago])
        headings = ["run", "state", "step", "loss", "last output"]
        content = [parts.table("Runs", headings, rows, style="")]
        if len(runs) > 1:
            content.append(parts.paragraph(LINK.format("/compare", "Compare all")))
        return render_page(self.name, self.name, {"Runs": content}, source="the run folders", refresh_s=self.every_s)

    def _report(self, path: str, runs: Sequence[Path]) -> str:
        """The report of some runs; those without steps are left out of a comparison."""
        now = time.monotonic()
        seen = _look(runs[0]) if len(runs) == 1 else None
        files = [state_text(seen) if seen else "", *map(_files_of, runs)]  # a run that was killed changes no file
        if path in self._drawn and (self._drawn[path][0] == files or now < self._drawn[path][1]):
            return self._drawn[path][2]
        back = [] if self.is_run else [parts.paragraph(LINK.format("/", "All runs"))]
        histories, problems = [], []
        for run in runs:
            try:
                histories.append(read(run, str(run.relative_to(self.folder)) if run != self.folder else self.name))
            except UserError as error:
                problems.append(str(error))
        if seen and histories:
            back.append(parts.paragraph(f"{state_text(seen)}; step {step_text(seen, bar_width=0)}"))
        back.append(parts.sentences(problems, "warning"))
        if histories:
            drawn = page(histories, now=back, refresh_s=self.every_s)
        else:
            drawn = render_page(self.name, self.name, {"Summary": back}, refresh_s=self.every_s)
        ended = time.monotonic()
        self._drawn[path] = (files, ended + REST * (ended - now), drawn)
        return drawn


def _look(run: Path) -> dict[str, Any] | None:
    try:
        return look(run)
    except UserError:  # config.json is being written, or damaged, which the report says
        return None


def state_text(seen: dict[str, Any]) -> str:
    return f"{seen['state']}: {seen['why']}" if seen["why"] else str(seen["state"])


def _files_of(run: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files that a report is made of."""
    found = []
    for path in sorted([*run.glob("*"), *(run / logs.FOLDER).glob("*"), *(run / "checkpoints").glob("*")]):
        try:
            status = path.stat()
        except OSError:  # removed by the run just now
            continue
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return found


def build_live_app(reports: LiveReports) -> Starlette:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    drawing = threading.Lock()  # matplotlib draws in one thread at a time

    def respond(request: Request) -> Response:
        with drawing:
            found = reports.page(request.scope["path"].strip("/"))
        if found is None:
            raise HTTPException(404)
        return HTMLResponse(found, headers=HEADERS)

    return Starlette(routes=[Route(path, respond) for path in ("/", "/compare", "/runs/{name:path}/")])
