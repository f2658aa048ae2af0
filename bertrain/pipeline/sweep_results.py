"""The results of a sweep: the points of its grid, best first, as a table and as a report of its runs."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertrain.base.formatting import headline_of, is_better_low, show, title_of
from bertrain.reports.history import read
from bertrain.reports.report import report
from bertrain.run.records import is_metric
from bertrain.training.task_results import NO_SCORES, metrics_of, sample_deviation

if TYPE_CHECKING:
    from rich.table import Table

MOST_COMPARED = 16  # runs in the report: as many as there are styles of lines
WIDTH = 100  # columns of the table


@dataclass(frozen=True)
class Point:
    """A point of the grid, and its runs that are done: one for each seed, best first."""

    settings: dict[str, str]
    runs: tuple[Path, ...]
    values: tuple[float, ...]
    """The metric of each run."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        return sample_deviation(self.values)


@dataclass(frozen=True)
class Swept:
    """The result of `sweep`."""

    folder: Path
    metric: str
    """The metric that ranks the runs: the main metric of their evaluation, else the loss of their last steps."""
    points: tuple[Point, ...]
    """By the mean of their runs, best first."""
    failed: dict[str, str]
    """The runs that failed, by name, and why."""
    report: Path | None
    """The page that compares the best runs; None if no run is done."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON: a metric that is not finite is null."""
        points = [
            {"settings": point.settings, "runs": [str(run) for run in point.runs]}
            | {"mean": finite(point.mean), "deviation": finite(point.deviation), "values": [*map(finite, point.values)]}
            for point in self.points
        ]
        page = str(self.report) if self.report else None
        return {
            "folder": str(self.folder),
            "metric": self.metric,
            "points": points,
            "failed": self.failed,
            "report": page,
        }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rank_runs(out: Path, done: Sequence[tuple[dict[str, str], Path]], failed: Mapping[str, str]) -> Swept:
    """Rank the runs that are `done`, each the point of its grid and its folder, and write the report of the best."""
    evaluated = [
        {name: value for name, value in metrics_of(run).items() if is_metric(name) and not name.startswith(NO_SCORES)}
        for _, run in done
    ]
    metric = headline_of(list(evaluated[0])) if evaluated else None
    if metric is None:  # without evaluations
        evaluated = [read(run, run.name).summary.last for _, run in done]
        # in pre-training the masked-word loss, because settings such as model.rtd change the total loss
        metric = "mlm_loss" if all("mlm_loss" in last for last in evaluated) else "loss"
    sign = 1 if is_better_low(metric) else -1

    def order(value: float) -> float:
        return sign * value if math.isfinite(value) else math.inf

    by_point: dict[tuple[tuple[str, str], ...], list[tuple[float, Path]]] = {}
    for (settings, run), metrics in zip(done, evaluated, strict=True):
        by_point.setdefault(tuple(settings.items()), []).append((metrics.get(metric, math.nan), run))
    points = []
    for settings_of_point, runs in by_point.items():
        values, folders = zip(*sorted(runs, key=lambda one: order(one[0])), strict=True)
        points.append(Point(dict(settings_of_point), folders, values))
    points.sort(key=lambda point: order(point.mean))
    ranked = sorted((pair for runs in by_point.values() for pair in runs), key=lambda one: order(one[0]))
    best = [run for _, run in ranked[:MOST_COMPARED]]
    page = report(best, out=out / "report.html") if best else None
    return Swept(out, metric, tuple(points), dict(failed), page)


def table(swept: Swept) -> Table:
    """The points of the grid, best first."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    settings = list(swept.points[0].settings) if swept.points else []
    for heading in (*settings, title_of(swept.metric), "runs", "best run"):
        is_number = heading not in (*settings, "best run")
        shown.add_column(Text(heading), justify="right" if is_number else "left", overflow="fold")
    for point in swept.points:
        spread = f" ± {show(swept.metric, point.deviation)}" if len(point.runs) > 1 else ""
        value = f"{show(swept.metric, point.mean)}{spread}"
        cells = [*point.settings.values(), value, str(len(point.runs)), point.runs[0].name]
        shown.add_row(*map(Text, cells))
    return shown


def print_results(swept: Swept) -> None:
    """The table and where the report is, on at most 100 columns."""
    from rich.console import Console

    if not swept.points:
        return
    Console(width=min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns), highlight=False).print(table(swept))
    num_runs = sum(len(point.runs) for point in swept.points)
    most = f"the best {MOST_COMPARED} of {num_runs} runs" if num_runs > MOST_COMPARED else "the runs"
    print(f"{swept.report}: {most} side by side, best first")
