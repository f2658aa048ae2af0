"""`bertrain report`: one HTML file about a run, or several side by side, without scripts or network access.

`history.py` reads the run folder, `compare.py` compares runs, `plots.py` draws, `page.py` renders; this module chooses
the contents of each section.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from markupsafe import Markup

from bertrain.base.console import PHASES
from bertrain.base.errors import UserError
from bertrain.base.extras import is_installed, missing_package
from bertrain.base.formatting import amount, compact, duration, few, is_speed, show, title_of
from bertrain.base.logs import describe
from bertrain.config.settings import SECTIONS, Settings
from bertrain.reports import compare, plots
from bertrain.reports.compare import UNKNOWN
from bertrain.reports.history import History, Summary, display_names, rank_means, read, thin
from bertrain.reports.page import Plot, page_path, parts, render_page, write_page
from bertrain.run.records import is_metric

MAX_NAMED = 12  # steps listed by number in a warning
MAX_ROWS = 50  # of a table of ranks, evaluations or starts
NUM_READINGS = 9  # rows of the curves in numbers


def report(runs: str | Path | Sequence[str | Path], *, out: str | Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, and return its path.

    The first run is the baseline of the comparison. The page goes to `out`, or to report.html in the first run's
    folder; a run may still be training. Raises UserError for a folder that holds no run, a run without steps, or a
    path that cannot be written.

    Example: bertrain.report("runs/tiny")
    """
    folders = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    if len({folder.resolve() for folder in folders}) < max(1, len(folders)):
        raise UserError("runs-not-distinct", "a report is about one run or several different ones; name each run once")
    histories = [read(folder, name) for folder, name in zip(folders, display_names(folders), strict=True)]
    path = page_path(out, folders[0] / "report.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError("out-not-html", f"the report is an HTML page; give --out a name that ends in .html, not {path}")
    write_page(path, page(histories))
    return path


def page(histories: Sequence[History], *, now: Sequence[Markup] = (), refresh_s: float = 0.0) -> str:
    """The page of one run or several; a live one begins with `now`."""
    is_one = len(histories) == 1
    sections = {
        "Summary": [*now, *_summary(histories), *_warnings(histories)],
        "Comparison": [] if is_one else _comparison(histories),
        "Curves": _curves(histories),
        "Time and balance": _time(histories),
        "Telemetry": _telemetry(histories),
        "Evaluations": [_evaluations(histories)],
        "Checkpoints": [_checkpoints(histories)],
        "Warnings and errors": [_events(histories)],
        "Settings": _settings(histories),
        "Environment": [_environment(histories)],
    }
    heading = histories[0].name if is_one else f"{len(histories)} runs"
    return render_page(", ".join(history.name for history in histories), heading, sections, refresh_s=refresh_s)


def _table(
    caption: str,
    headings: Iterable[str],
    histories: Sequence[History],
    rows_of: Callable[[History], Iterable[Sequence[str]]],
    **options: str,
) -> Markup:
    """A table of the rows of each run, whose first column names the run if there are several."""
    if len(histories) == 1:
        return parts.table(caption, headings, list(rows_of(histories[0])), **options)
    names = zip(_run_names(histories), histories, strict=True)
    rows = [[name, *row] for name, history in names for row in rows_of(history)]
    return parts.table(caption, ["run", *headings], rows, **options)


def _plots(drawn: Iterator[Plot | None]) -> Markup:
    """The plots, or nothing without matplotlib."""
    return parts.plots(list(drawn) if is_installed("matplotlib") else [])


def _run_names(histories: Sequence[History]) -> list[str]:
    return [parts.run_name(index, history.name) for index, history in enumerate(histories)]


# --- summary ---------------------------------------------------------------------------------------


def _summary(histories: Sequence[History]) -> list[Markup]:
    """The facts of a run; of several, with a column for each."""
    if len(histories) == 1:
        (history,) = histories
        facts, end = parts.facts(compare.known_facts(history)), parts.paragraph(f"End: {history.ending}.")
        return [facts, _phase_bar(history.summary), end]
    columns = [{label: (value, note) for label, value, note in compare.facts(history)} for history in histories]
    known = {label for history in histories for label, _, _ in compare.known_facts(history)}
    rows = []
    for label in (label for label in dict.fromkeys(label for column in columns for label in column) if label in known):
        cells = [column.get(label, (UNKNOWN, "")) for column in columns]
        notes = {note for _, note in cells}
        shared = notes.pop() if len(notes) == 1 else ""
        values = (parts.noted(value, "" if shared else note) for value, note in cells)
        rows.append([parts.noted(label, shared), *values])
    rows.append(["End", *(history.ending for history in histories)])
    rows.append(["Time per phase", *(_phase_bar(history.summary) for history in histories)])
    return [parts.table("The runs side by side", ["metric", *_run_names(histories)], rows, style="")]


def _phase_bar(summary: Summary) -> Markup:
    values = [f"{duration(part)}, {share:.1%}" for part, share in zip(summary.seconds, summary.shares, strict=True)]
    return parts.phase_bar(summary.shares, list(zip(plots.PHASE_NAMES, values, strict=True)))


def _warnings(histories: Sequence[History]) -> list[Markup]:
    wrong = []
    for history in histories:
        summary, total = history.summary, f"{history.num_steps:,}"
        for steps, what in (
            (summary.not_applied, f"of {total} steps were not finite and not applied"),
            (summary.skipped, f"of {total} steps were skipped by train.skip_steps"),
            (summary.spikes, f"of {total} steps had a loss far above those before"),
        ):
            if steps:
                named = few((f"{step:,}" for step in steps), MAX_NAMED)
                wrong.append(f"{history.name}: {len(steps):,} {what}: {named}")
    missing = [f"{history.name}: {note}" for history in histories for note in history.missing]
    return [parts.sentences(texts, "warning") for texts in (wrong, missing)]


def _comparison(histories: Sequence[History]) -> list[Markup]:
    names = _run_names(histories)
    columns = [compare.settings_of(history) | compare.environment_of(history) for history in histories]
    rows = [[key, *(column.get(key) or UNKNOWN for column in columns)] for key in compare.differing(columns)]
    same = "Their settings and environments are the same."
    return [
        parts.table(f"Against {histories[0].name}", ["metric", *names], compare.against_first(histories)),
        parts.table("Differences", ["setting", *names], rows, style="", empty=same),
    ]


# --- curves, time, telemetry -----------------------------------------------------------------------


def _curves(histories: Sequence[History]) -> list[Markup]:
    """The curves, and every metric at a few points of the run, each the mean of the steps around it."""
    metrics = list(dict.fromkeys(name for history in histories for name in history.table.columns if is_metric(name)))

    def readings(history: History) -> Iterator[list[str]]:
        columns = [thin(history.column(metric), NUM_READINGS) for metric in metrics]
        for index, step in enumerate(thin(history.column("step"), NUM_READINGS)):
            cells = [show(metric, float(column[index])) for metric, column in zip(metrics, columns, strict=True)]
            yield [f"{step:,.0f}", *cells]

    headings = ["around step", *map(title_of, metrics)]
    table = _table("Means over equal parts of the run", headings, histories, readings)
    curves = (plots.plot_curve(curve, histories) for curve in plots.curves_of(histories))
    can_plot = is_installed("matplotlib")
    return [
        parts.legend(_run_names(histories) if len(histories) > 1 else []),
        parts.paragraph(plots.how_to_read(histories) if can_plot else f"No curves: {missing_package('matplotlib')}"),
        _plots(chain(curves, map(plots.plot_lengths, [histories]))),
        parts.details("The curves as a table", table),
    ]


def _time(histories: Sequence[History]) -> list[Markup]:
    def phases(history: History) -> Iterator[list[str]]:
        measured = [history.phase(phase) for phase in PHASES]
        titles = [*plots.PHASE_NAMES, "whole step"]
        for title, seconds in zip(titles, [*measured, np.sum(measured, axis=0)], strict=True):
            total = float(seconds.sum(dtype=np.float64))
            share = total / max(sum(history.summary.seconds), 1e-9)
            times = map(compare.milliseconds, (*np.percentile(seconds, [50, 95]).tolist(), float(seconds.max())))
            yield [title, duration(total), f"{share:.1%}", *times]

    def ranks(history: History) -> Iterator[list[str]]:
        found = rank_means(history.table)
        if len(found) > MAX_ROWS:
            found.sort(key=lambda rank: -rank.own_seconds)
        for rank in found[:MAX_ROWS]:
            times = [f"{1e3 * seconds:,.1f}" for seconds in rank.seconds.values()]
            yield [f"{rank.rank}", rank.host, f"{rank.tokens:,.0f}", *times]

    of_phases = ["phase", "total", "share", "median", "95th percentile", "maximum"]
    of_ranks = ["rank", "host", "tokens", *(f"{name}, ms" for name in plots.PHASE_NAMES)]
    caption = "Mean time per step of each rank; the fastest rank waits longest in the reduction"
    num_ranks = max(len(history.table.ranks) for history in histories)
    note = f"The slowest {MAX_ROWS} of {num_ranks:,} ranks." if num_ranks > MAX_ROWS else ""
    return [
        _plots(draw(histories[0]) for draw in (plots.plot_phases, plots.plot_ranks) if len(histories) == 1),
        _table("Time of the steps", of_phases, histories, phases),
        _table(caption, of_ranks, histories, ranks, note=note),
    ]


def _telemetry(histories: Sequence[History]) -> list[Markup]:
    if not any(history.telemetry.devices for history in histories):
        return [parts.paragraph("None in the run folder; `--log.telemetry true` records it.")]

    def devices(history: History) -> Iterator[list[str]]:
        for device in history.telemetry.devices:
            counts = device.reasons.most_common()
            throttled = ", ".join(f"{reason} in {count / device.num_samples:.1%}" for reason, count in counts)
            energy = amount(device.energy_j, "J") if device.energy_j else UNKNOWN
            yield [device.name, f"{device.num_samples:,}", duration(device.seconds), energy, throttled or UNKNOWN]

    def columns(history: History) -> Iterator[list[str]]:
        for device in history.telemetry.devices:
            for column, track in device.tracks.items():
                values = (track.minimum, track.mean, track.maximum)
                yield [device.name, column, *map(compact, values)]

    entries = _run_names(histories)
    if len(histories) == 1:
        names = (device.name for device in histories[0].telemetry.devices)
        entries = [parts.run_name(index, name, is_numbered=False) for index, name in enumerate(names)]
    of_devices = ["device", "samples", "over", "energy", "throttled, share of samples"]
    of_columns = ["device", "column", "minimum", "mean", "maximum"]
    table = _table("Minimum, mean and maximum of each column", of_columns, histories, columns)
    return [
        parts.legend(entries if len(entries) > 1 else []),
        _plots(plots.plot_track(track, histories) for track in plots.TRACKS),
        _table("Each device", of_devices, histories, devices),
        parts.details("All columns of all devices", table),
    ]


# --- evaluations, checkpoints, events --------------------------------------------------------------


def _evaluations(histories: Sequence[History]) -> Markup:
    names = dict.fromkeys(name for history in histories for one in history.evaluations for name in one.metrics)
    metrics = [name for name in dict.fromkeys(name for run in histories for name in run.metrics) if name in names]
    speeds = [name for name in names if is_speed(name)]

    def rows(history: History) -> Iterator[list[str]]:
        best, headline, evaluations = history.summary.best, history.summary.headline, history.evaluations
        for one in [*(one for one in evaluations[:-MAX_ROWS] if one is best), *evaluations[-MAX_ROWS:]]:
            shown = {metric: show(metric, one.metrics.get(metric)) for metric in metrics}
            if one is best and headline is not None:
                shown[headline] = parts.best(shown[headline])
            examples = f"{one.metrics['examples']:,.0f}" if "examples" in one.metrics else UNKNOWN
            rates = [compact(one.metrics[speed]) if speed in one.metrics else UNKNOWN for speed in speeds]
            yield [f"{one.step:,}", f"{one.samples:,}", examples, *shown.values(), *rates]

    most = max(len(history.evaluations) for history in histories)
    headings = ["step", "samples", "examples", *map(title_of, metrics + speeds)]
    note = f"The last {MAX_ROWS} of up to {most:,}, and the best." if most > MAX_ROWS else ""
    empty = "None so far; set evaluate.data to evaluate during training."
    return _table("On held-out examples", headings, histories, rows, empty=empty, note=note)


def _checkpoints(histories: Sequence[History]) -> Markup:
    def rows(history: History) -> Iterator[list[str]]:
        for entry in history.checkpoints:
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.saved_s))
            state = parts.best(entry.state) if entry.is_best else entry.state
            yield [f"{entry.step:,}", state, amount(entry.bytes, "B"), saved]

    caption, headings = "Checkpoints in the run folder; hashes are not verified", ["step", "state", "size", "saved"]
    return _table(caption, headings, histories, rows, empty="None in the run folder.")


def _events(histories: Sequence[History]) -> Markup:
    several = len(histories) > 1
    found = [(f"{history.name}: " * several, entry) for history in histories for entry in history.events]
    events = [name + describe(entry) for name, entry in found]
    return parts.sentences(events, "events") if events else parts.paragraph("None in the logs.")


# --- settings and environment ----------------------------------------------------------------------


def _settings(histories: Sequence[History]) -> list[Markup]:
    """The settings that all runs share, with values that are not the default marked."""
    settings = [compare.settings_of(history) for history in histories]
    not_shared, defaults = compare.differing(settings), Settings().dotted()
    tables = []
    for section in ("run", *SECTIONS):
        rows = []
        for key, value in settings[0].items():
            if key.startswith(f"{section}.") and key not in not_shared:
                shown, default = value or UNKNOWN, defaults.get(key, value)
                cell = shown if value == default else parts.changed(default or UNKNOWN, shown)
                rows.append([key.partition(".")[2], cell])
        tables.append(parts.table(section, ["setting", "value"], rows, style=""))
    marked = "Values that differ from the default are marked, with the default struck out."
    return [parts.paragraph(marked), parts.tables(tables)]


def _environment(histories: Sequence[History]) -> Markup:
    columns = list(dict.fromkeys(column for history in histories for start in history.starts for column in start))

    def rows(history: History) -> Iterator[list[str]]:
        for start in history.starts[-MAX_ROWS:]:
            yield [UNKNOWN if (value := start.get(column)) is None else str(value) for column in columns]

    return _table("Each start of a run", columns, histories, rows, style="", empty="Unknown.")
