"""`bertrain report`: one HTML file about a run, or several side by side, without scripts or network access.

`history.py` reads the run folder, `compare.py` compares runs, `plots.py` draws, `page.py` renders; this module chooses
the contents of each section.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bertrain.base.console import PHASES
from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.base.formatting import amount, compact, duration, is_speed, show, title_of
from bertrain.base.logs import describe
from bertrain.config.settings import SECTIONS, Settings
from bertrain.reports.compare import (
    UNKNOWN,
    against_first,
    differing,
    dotted,
    environment_of,
    facts,
    known_facts,
    milliseconds,
    settings_of,
)
from bertrain.reports.history import History, Summary, display_names, own_seconds, rank_means, read, thin
from bertrain.reports.page import (
    Best,
    Cell,
    Changed,
    Details,
    Facts,
    Legend,
    Noted,
    Paragraph,
    Part,
    PhaseBar,
    Plot,
    Plots,
    RunName,
    Section,
    Sentences,
    Table,
    Tables,
    render_page,
)
from bertrain.reports.plots import (
    PHASE_NAMES,
    TRACKS,
    curves_of,
    how_to_read,
    plot_curve,
    plot_lengths,
    plot_phases,
    plot_ranks,
    plot_track,
)
from bertrain.run.records import is_metric

MAX_NAMED = 12  # steps listed by number in a warning
MAX_ROWS = 50  # of a table of ranks, evaluations or starts
NUM_READINGS = 9  # rows of the curves in numbers


def report(runs: Sequence[str | Path], *, out: str | Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, and return its path.

    The first run is the baseline of the comparison. The page goes to `out`, or to report.html in the first run's
    folder; a run may still be training. Raises UserError for a folder that holds no run, a run without steps, or a
    path that cannot be written.
    """
    folders = [Path(run) for run in runs]
    if len({folder.resolve() for folder in folders}) < max(1, len(folders)):
        raise UserError("runs-not-distinct", "a report is about one run or several different ones; name each run once")
    histories = [read(folder, name) for folder, name in zip(folders, display_names(folders), strict=True)]
    path = Path(out) if out is not None else folders[0] / "report.html"
    if path.is_dir():
        raise UserError("out-is-folder", f"cannot write the report to {path}, which is a folder; name a file")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError("out-not-html", f"the report is an HTML page; give --out a name that ends in .html, not {path}")
    try:
        write_atomically(path, page(histories))
    except OSError as error:
        raise UserError("cannot-write", f"cannot write the report to {path}: {error.strerror or error}") from None
    return path


def page(histories: Sequence[History]) -> str:
    """The whole report."""
    is_one = len(histories) == 1
    sections = [
        Section("Summary", [*(_one_run(histories[0]) if is_one else _side_by_side(histories)), *_warnings(histories)]),
        Section("Comparison", [] if is_one else _comparison(histories)),
        Section("Curves", _curves(histories)),
        Section("Time and balance", _time(histories)),
        Section("Telemetry", _telemetry(histories)),
        Section("Evaluations", _evaluations(histories)),
        Section("Checkpoints", _checkpoints(histories)),
        Section("Warnings and errors", _events(histories)),
        Section("Settings", _settings(histories)),
        Section("Environment", _environment(histories)),
    ]
    heading = histories[0].name if is_one else f"{len(histories)} runs"
    return render_page(", ".join(history.name for history in histories), heading, sections)


# --- summary ---------------------------------------------------------------------------------------


def _one_run(history: History) -> list[Part]:
    return [Facts(known_facts(history)), _phase_bar(history.summary), Paragraph(f"End: {history.ending}.")]


def _side_by_side(histories: Sequence[History]) -> list[Part]:
    """The same facts with a column for each run."""
    columns = [{label: (value, note) for label, value, note in facts(history)} for history in histories]
    known = {label for history in histories for label, _, _ in known_facts(history)}
    rows: list[list[Cell]] = []
    for label in (label for label in dict.fromkeys(label for column in columns for label in column) if label in known):
        cells = [column.get(label, (UNKNOWN, "")) for column in columns]
        notes = {note for _, note in cells}
        shared = notes.pop() if len(notes) == 1 else ""
        rows.append([Noted(label, shared), *(Noted(value, "" if shared else note) for value, note in cells)])
    rows.append(["End", *(history.ending for history in histories)])
    rows.append(["Time per phase", *(_phase_bar(history.summary) for history in histories)])
    return [Table("The runs side by side", ["metric", *_run_names(histories)], rows, style="")]


def _phase_bar(summary: Summary) -> PhaseBar:
    values = [f"{duration(part)}, {share:.1%}" for part, share in zip(summary.seconds, summary.shares, strict=True)]
    return PhaseBar(summary.shares, list(zip(PHASE_NAMES, values, strict=True)))


def _warnings(histories: Sequence[History]) -> list[Part]:
    """Steps that went wrong, and files that are missing or damaged."""
    wrong: list[str] = []
    missing: list[str] = []
    for history in histories:
        summary, total = history.summary, f"{history.num_steps:,}"
        for steps, what in (
            (summary.not_applied, f"of {total} steps were not finite and not applied"),
            (summary.skipped, f"of {total} steps were skipped by train.skip_steps"),
            (summary.spikes, f"of {total} steps had a loss far above those before"),
        ):
            if steps:
                named = ", ".join(f"{step:,}" for step in steps[:MAX_NAMED]) + ", …" * (len(steps) > MAX_NAMED)
                wrong.append(f"{history.name}: {len(steps):,} {what}: {named}")
        missing += [f"{history.name}: {note}" for note in history.missing]
    return [Sentences(texts, "warning") for texts in (wrong, missing) if texts]


def _comparison(histories: Sequence[History]) -> list[Part]:
    names = _run_names(histories)
    columns = [settings_of(history) | environment_of(history) for history in histories]
    rows = [[key, *(column.get(key) or UNKNOWN for column in columns)] for key in differing(columns)]
    return [
        Table(f"Against {histories[0].name}", ["metric", *names], against_first(histories)),
        Table("Differences", ["setting", *names], rows, style="")
        if rows
        else Paragraph("Their settings and environments are the same."),
    ]


# --- curves, time, telemetry -----------------------------------------------------------------------


def _curves(histories: Sequence[History]) -> list[Part]:
    text = how_to_read(histories)
    plots = [plot_curve(curve, histories) for curve in curves_of(histories)] + [plot_lengths(histories)]
    readings = Details("The curves as a table", _readings(histories))
    return [*_run_legend(histories), *([Paragraph(text)] if text else []), *_plots(plots), readings]


def _readings(histories: Sequence[History]) -> Table:
    """Every metric at a few points of the run, each the mean of the steps around it."""
    metrics = list(dict.fromkeys(name for history in histories for name in history.table.columns if is_metric(name)))
    rows: list[list[Cell]] = []
    for history, run in _with_names(histories):
        columns = [thin(history.column(metric), NUM_READINGS) for metric in metrics]
        for index, step in enumerate(thin(history.column("step"), NUM_READINGS)):
            cells = [show(metric, float(column[index])) for metric, column in zip(metrics, columns, strict=True)]
            rows.append([*run, f"{step:,.0f}", *cells])
    headings = [*_run_heading(histories), "around step", *map(title_of, metrics)]
    return Table("Means over equal parts of the run", headings, rows)


def _time(histories: Sequence[History]) -> list[Part]:
    plots = [plot_phases(histories[0]), plot_ranks(histories[0])] if len(histories) == 1 else []
    return [*_plots(plots), _phase_times(histories), *_rank_times(histories)]


def _phase_times(histories: Sequence[History]) -> Table:
    rows: list[list[Cell]] = []
    for history, run in _with_names(histories):
        parts = [history.phase(phase) for phase in PHASES]
        for title, seconds in zip([*PHASE_NAMES, "whole step"], [*parts, np.sum(parts, axis=0)], strict=True):
            median, late = np.percentile(seconds, [50, 95]).tolist()
            total = float(seconds.sum(dtype=np.float64))
            share = total / max(sum(history.summary.seconds), 1e-9)
            times = map(milliseconds, (median, late, float(seconds.max())))
            rows.append([*run, title, duration(total), f"{share:.1%}", *times])
    headings = [*_run_heading(histories), "phase", "total", "share", "median", "95th percentile", "maximum"]
    return Table("Time of the steps", headings, rows)


def _rank_times(histories: Sequence[History]) -> list[Part]:
    """Time of each rank; nothing for runs of one rank."""
    rows: list[list[Cell]] = []
    num_ranks = max(len(history.table.ranks) for history in histories)
    for history, run in _with_names(histories):
        ranks = rank_means(history.table)
        if len(ranks) > MAX_ROWS:
            ranks.sort(key=lambda rank: -own_seconds(rank))
        for rank in ranks[:MAX_ROWS]:
            times = [f"{1e3 * seconds:,.1f}" for seconds in rank.seconds.values()]
            rows.append([*run, f"{rank.rank}", rank.host, f"{rank.tokens:,.0f}", *times])
    if not rows:
        return []
    headings = [*_run_heading(histories), "rank", "host", "tokens", *(f"{name}, ms" for name in PHASE_NAMES)]
    caption = "Mean time per step of each rank; the fastest rank waits longest in the reduction"
    note = Paragraph(f"The slowest {MAX_ROWS} of {num_ranks:,} ranks.")
    return [Table(caption, headings, rows), *([note] if num_ranks > MAX_ROWS else [])]


def _telemetry(histories: Sequence[History]) -> list[Part]:
    if not any(history.telemetry.devices for history in histories):
        return [Paragraph("None in the run folder; `--log.telemetry true` records it.")]
    devices: list[list[Cell]] = []
    numbers: list[list[Cell]] = []
    for history, run in _with_names(histories):
        for device in history.telemetry.devices:
            throttled = ", ".join(
                f"{reason} in {count / device.num_samples:.1%}" for reason, count in device.reasons.most_common()
            )
            energy = amount(device.energy_j, "J") if device.energy_j else UNKNOWN
            sampled = [f"{device.num_samples:,}", duration(device.seconds)]
            devices.append([*run, device.name, *sampled, energy, throttled or UNKNOWN])
            for column, track in device.tracks.items():
                values = (track.minimum, track.mean, track.maximum)
                cells = [compact(value) if track.count else UNKNOWN for value in values]
                numbers.append([*run, device.name, column, *cells])
    heading = [*_run_heading(histories), "device"]
    names = [device.name for device in histories[0].telemetry.devices]
    legend = _run_legend(histories)
    if len(histories) == 1 and len(names) > 1:
        legend = [Legend([RunName(index, name, is_numbered=False) for index, name in enumerate(names)])]
    return [
        *legend,
        *_plots([plot_track(track, histories) for track in TRACKS]),
        Table("Each device", [*heading, "samples", "over", "energy", "throttled, share of samples"], devices),
        Details(
            "All columns of all devices",
            Table(
                "Minimum, mean and maximum of each column", [*heading, "column", "minimum", "mean", "maximum"], numbers
            ),
        ),
    ]


# --- evaluations, checkpoints, events --------------------------------------------------------------


def _evaluations(histories: Sequence[History]) -> list[Part]:
    names = dict.fromkeys(name for history in histories for one in history.evaluations for name in one.metrics)
    metrics = [name for name in dict.fromkeys(name for run in histories for name in run.metrics) if name in names]
    speeds = [name for name in names if is_speed(name)]
    rows: list[list[Cell]] = []
    most = max(len(history.evaluations) for history in histories)
    for history, run in _with_names(histories):
        best, evaluations = history.summary.best, history.evaluations
        dropped, shown = evaluations[:-MAX_ROWS], evaluations[-MAX_ROWS:]
        for one in [*(one for one in dropped if one is best), *shown]:
            examples = f"{one.metrics['examples']:,.0f}" if "examples" in one.metrics else UNKNOWN
            cells: list[Cell] = [show(metric, one.metrics.get(metric)) for metric in metrics]
            if one is best and history.summary.headline is not None:
                place = metrics.index(history.summary.headline)
                cells[place] = Best(show(metrics[place], one.metrics[metrics[place]]))
            cells += [compact(one.metrics[speed]) if speed in one.metrics else UNKNOWN for speed in speeds]
            rows.append([*run, f"{one.step:,}", f"{one.samples:,}", examples, *cells])
    if not rows:
        return [Paragraph("None so far; set evaluate.data to evaluate during training.")]
    headings = [*_run_heading(histories), "step", "samples", "examples", *map(title_of, metrics + speeds)]
    note = Paragraph(f"The last {MAX_ROWS} of up to {most:,}, and the best.")
    return [Table("On held-out examples", headings, rows), *([note] if most > MAX_ROWS else [])]


def _checkpoints(histories: Sequence[History]) -> list[Part]:
    rows: list[list[Cell]] = []
    for history, run in _with_names(histories):
        for entry in history.checkpoints:
            step = f"{entry.step:,}" if entry.step is not None else entry.name
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.saved_s))
            state = Best(entry.state) if entry.is_best else entry.state
            rows.append([*run, step, state, amount(entry.bytes, "B"), saved])
    if not rows:
        return [Paragraph("None in the run folder.")]
    headings = [*_run_heading(histories), "step", "state", "size", "saved"]
    return [Table("Checkpoints in the run folder; hashes are not verified", headings, rows)]


def _events(histories: Sequence[History]) -> list[Part]:
    events = [
        f"{history.name}: {describe(entry)}" if len(histories) > 1 else describe(entry)
        for history in histories
        for entry in history.events
    ]
    return [Sentences(events, "events") if events else Paragraph("None in the logs.")]


# --- settings and environment ----------------------------------------------------------------------


def _settings(histories: Sequence[History]) -> list[Part]:
    """The settings that all runs share, with values that are not the default marked."""
    settings = [settings_of(history) for history in histories]
    not_shared, defaults = differing(settings), dotted(Settings())
    tables = []
    for section in ("run", *SECTIONS):
        rows: list[list[Cell]] = []
        for key, value in settings[0].items():
            if key.startswith(f"{section}.") and key not in not_shared:
                shown, default = value or UNKNOWN, defaults.get(key, value)
                cell = shown if value == default else Changed(default or UNKNOWN, shown)
                rows.append([key.partition(".")[2], cell])
        if rows:
            tables.append(Table(section, ["setting", "value"], rows, style=""))
    return [Paragraph("Values that differ from the default are marked, with the default struck out."), Tables(tables)]


def _environment(histories: Sequence[History]) -> list[Part]:
    columns = list(dict.fromkeys(column for history in histories for start in history.starts for column in start))
    rows: list[list[Cell]] = [
        [*run, *(str(start.get(column, UNKNOWN)) for column in columns)]
        for history, run in _with_names(histories)
        for start in history.starts[-MAX_ROWS:]
    ]
    if not rows:
        return [Paragraph("Unknown.")]
    return [Table("Each start of a run", [*_run_heading(histories), *columns], rows, style="")]


# --- shared by sections ----------------------------------------------------------------------------


def _plots(plots: Sequence[Plot | None]) -> list[Part]:
    drawn = [plot for plot in plots if plot is not None]
    return [Plots(drawn)] if drawn else []


def _run_names(histories: Sequence[History]) -> list[RunName]:
    return [RunName(index, history.name) for index, history in enumerate(histories)]


def _with_names(histories: Sequence[History]) -> Iterator[tuple[History, list[Cell]]]:
    """Each run with the first cell of its rows; a report of one run has no such column."""
    for history, name in zip(histories, _run_names(histories), strict=True):
        yield history, [name] if len(histories) > 1 else []


def _run_heading(histories: Sequence[History]) -> list[str]:
    return ["run"] if len(histories) > 1 else []


def _run_legend(histories: Sequence[History]) -> list[Part]:
    return [Legend(_run_names(histories))] if len(histories) > 1 else []
