"""The report of a run: one HTML file that needs nothing else, neither network nor scripts.

`history.py` reads what a run folder says and does the arithmetic, `compare.py` sets runs side by side, `plots.py`
draws, `markup.py` makes the page; here is what stands on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from bertrain.base.console import PHASES
from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.base.formatting import amount, compact, duration, is_metric, is_speed, show, title_of
from bertrain.base.logs import describe
from bertrain.config.settings import SECTIONS, Settings
from bertrain.reports.compare import (
    against_first,
    differing,
    dotted,
    environment_of,
    facts,
    known_facts,
    milliseconds,
    settings_of,
)
from bertrain.reports.history import History, Summary, by_rank, display_names, read, thin
from bertrain.reports.markup import Markup, figures, listed, quiet, table, unfolding, whole_page
from bertrain.reports.plots import (
    NUM_COLOURS,
    PHASE_NAMES,
    TRACKS,
    curves_of,
    how_to_read,
    phase_key,
    plot_curve,
    plot_lengths,
    plot_phases,
    plot_ranks,
    plot_track,
)

MOST_NAMED = 12  # skipped steps that are listed by number
MOST_ROWS = 50  # of a table about each rank, or each evaluation
NUM_READINGS = 9  # rows of the curves in numbers


def report(runs: Sequence[str | Path], *, out: str | Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, and return where it is.

    The first of several is what the others are compared with. The page goes to `out`, or to report.html in the first
    run's folder; a run may still be going on. Raises UserError for a folder that is no run, a run without a step, or a
    place that cannot be written.
    """
    folders = [Path(run) for run in runs]
    if len({folder.resolve() for folder in folders}) < max(1, len(folders)):
        raise UserError("a report is about one run or several different ones; name each of them once")
    histories = [read(folder, name) for folder, name in zip(folders, display_names(folders), strict=True)]
    path = Path(out) if out is not None else folders[0] / "report.html"
    if path.is_dir():
        raise UserError(f"cannot write the report to {path}, which is a folder; name a file")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"a report is a page, and {path} does not end in .html; choose another --out")
    try:
        # As ASCII the page means the same whatever encoding a locale or a reader takes it to have.
        write_atomically(path, page(histories).encode("ascii", "xmlcharrefreplace").decode())
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror or error}") from None
    return path


def page(histories: Sequence[History]) -> str:
    """The whole report."""
    is_one = len(histories) == 1
    sections = {
        "Summary": (_alone(histories[0]) if is_one else _side_by_side(histories)) + _warnings(histories),
        "Comparison": "" if is_one else _comparison(histories),
        "Curves": _curves(histories),
        "Time and balance": _time(histories),
        "Telemetry": _telemetry(histories),
        "Evaluations": _evaluations(histories),
        "Checkpoints": _checkpoints(histories),
        "Warnings and errors": _events(histories),
        "Settings": _settings(histories),
        "Environment": _environment(histories),
    }
    heading = histories[0].name if is_one else f"{len(histories)} runs"
    return whole_page(", ".join(history.name for history in histories), heading, sections)


# --- summary ---------------------------------------------------------------------------------------


def _alone(history: History) -> str:
    return figures(known_facts(history)) + _phase_bar(history.summary) + quiet(f"End: {history.ending}.")


def _side_by_side(histories: Sequence[History]) -> str:
    """The same figures with a column for each run."""
    every = [{label: (value, note) for label, value, note in facts(history)} for history in histories]
    known = {label for history in histories for label, _, _ in known_facts(history)}
    rows: list[list[str]] = []
    for label in (label for label in dict.fromkeys(label for one in every for label in one) if label in known):
        cells = [one.get(label, ("–", "")) for one in every]
        notes = [f" <small>{escape(note)}</small>" if note else "" for _, note in cells]
        shared = notes[0] if len(set(notes)) == 1 else ""
        values = (Markup(escape(cells[number][0]) + ("" if shared else note)) for number, note in enumerate(notes))
        rows.append([Markup(escape(label) + shared), *values])
    rows.append(["End", *(history.ending for history in histories)])
    rows.append(["Time per phase", *(_phase_bar(history.summary) for history in histories)])
    return table("The runs side by side", ["figure", *_run_names(histories)], rows)


def _phase_bar(summary: Summary) -> Markup:
    values = [f"{duration(part)}, {share:.1%}" for part, share in zip(summary.seconds, summary.shares, strict=True)]
    parts = (
        f'<i class="phase-{number}" style="flex-grow:{part:.4f}"></i>' for number, part in enumerate(summary.shares)
    )
    return Markup(f'<div class="bar" aria-hidden="true">{"".join(parts)}</div>{phase_key(values)}')


def _warnings(histories: Sequence[History]) -> str:
    """Steps that went wrong, and what the folders do not say."""
    wrong, missing = [], []
    for history in histories:
        summary, total = history.summary, f"{history.num_steps:,}"
        for steps, what in (
            (summary.skipped, f"of {total} steps were not finite and not applied"),
            (summary.left_out, f"of {total} steps were left out on request"),
            (summary.spikes, f"of {total} steps had a loss far above those before"),
        ):
            named = ", ".join(f"{step:,}" for step in steps[:MOST_NAMED]) + ", …" * (len(steps) > MOST_NAMED)
            if steps:
                wrong.append(f"{history.name}: {len(steps):,} {what}: {named}")
        missing += [f"{history.name}: {note}" for note in history.missing]
    return listed(wrong, "warning") + listed(missing, "warning")


def _comparison(histories: Sequence[History]) -> str:
    caption = f"Against {histories[0].name}"
    what_differs = _what_differs(histories)
    return table(caption, ["figure", *_run_names(histories)], against_first(histories), kind="numbers") + what_differs


def _what_differs(histories: Sequence[History]) -> str:
    every = [settings_of(history) | environment_of(history) for history in histories]
    rows = [[key, *(one.get(key) or "–" for one in every)] for key in differing(every)]
    if not rows:
        return quiet("Their settings and environments are the same.")
    return table("What differs", ["setting", *_run_names(histories)], rows)


# --- curves, time, telemetry -----------------------------------------------------------------------


def _curves(histories: Sequence[History]) -> str:
    plots = [plot_curve(curve, histories) for curve in curves_of(histories)] + [plot_lengths(histories)]
    key = _run_key(histories) + quiet(how_to_read(histories))
    return key + _plots(plots) + unfolding("The curves in numbers", _readings(histories))


def _readings(histories: Sequence[History]) -> str:
    """Every metric at a few points of the run, each the mean of the steps about it."""
    metrics = list(dict.fromkeys(name for one in histories for name in one.told.columns if is_metric(name)))
    rows = []
    for history, name in zip(histories, _run_names(histories), strict=True):
        columns = [thin(history.column(metric), NUM_READINGS) for metric in metrics]
        ends = thin(history.column("step"), NUM_READINGS)
        for index, step in enumerate(ends):
            cells = [show(metric, float(column[index])) for metric, column in zip(metrics, columns, strict=True)]
            rows.append([name] * (len(histories) > 1) + [f"{step:,.0f}", *cells])
    headings = ["run"] * (len(histories) > 1) + ["about step", *map(title_of, metrics)]
    return table("Means of equal stretches of the run", headings, rows, kind="numbers")


def _time(histories: Sequence[History]) -> str:
    plots = [plot_phases(histories[0])] if len(histories) == 1 else []
    plots += [plot_ranks(histories[0])] if len(histories) == 1 else []
    return _plots(plots) + _phase_times(histories) + _rank_times(histories)


def _phase_times(histories: Sequence[History]) -> str:
    rows = []
    for history, name in zip(histories, _run_names(histories), strict=True):
        parts = [history.phase(phase) for phase in PHASES]
        for title, seconds in zip([*PHASE_NAMES, "a step"], [*parts, np.sum(parts, axis=0)], strict=True):
            middle, late = np.percentile(seconds, [50, 95]).tolist()
            total = float(seconds.sum(dtype=np.float64))
            share = total / max(sum(history.summary.seconds), 1e-9)
            cells = [duration(total), f"{share:.1%}", *map(milliseconds, (middle, late, float(seconds.max())))]
            rows.append([name] * (len(histories) > 1) + [title, *cells])
    headings = ["run"] * (len(histories) > 1) + ["phase", "in all", "share", "median", "95% below", "longest"]
    return table("Time of the steps", headings, rows, kind="numbers")


def _rank_times(histories: Sequence[History]) -> str:
    """Where each rank's time went; nothing for runs of one rank."""
    rows, cut = [], 0
    for history, name in zip(histories, _run_names(histories), strict=True):
        entries = by_rank(history.told)
        if len(entries) > MOST_ROWS:
            cut = max(cut, len(entries))
            entries.sort(key=lambda entry: -entry["seconds"]["data"] - entry["seconds"]["forward_backward"])
        rows += [
            [name] * (len(histories) > 1)
            + [f"{entry['rank']}", entry["host"], f"{entry['tokens']:,.0f}"]
            + [f"{1e3 * seconds:,.1f}" for seconds in entry["seconds"].values()]
            for entry in entries[:MOST_ROWS]
        ]
    if not rows:
        return ""
    columns = ["rank", "host", "tokens", *(f"{name}, ms" for name in PHASE_NAMES)]
    caption = "Each rank, on average of a step; who waits longest in the reduction is the quickest"
    note = quiet(f"Of {cut:,} ranks, the {MOST_ROWS} that take longest over their own work." if cut else "")
    return table(caption, ["run"] * (len(histories) > 1) + columns, rows, kind="numbers") + note


def _telemetry(histories: Sequence[History]) -> str:
    if not any(history.telemetry.devices for history in histories):
        return quiet("None: telemetry was not switched on, or nothing of it is in the run folder.")
    devices, numbers = [], []
    for history, name in zip(histories, _run_names(histories), strict=True):
        run = [name] * (len(histories) > 1)
        for device in history.telemetry.devices:
            throttled = ", ".join(
                f"{reason} in {count / device.num_samples:.1%}" for reason, count in device.reasons.most_common()
            )
            energy = amount(device.energy_j, "J") if device.energy_j else "–"
            sampled = [f"{device.num_samples:,}", duration(device.seconds)]
            devices.append([*run, device.name, *sampled, energy, throttled or "–"])
            for column, track in device.tracks.items():
                cells = [compact(value) if track.count else "–" for value in (track.least, track.mean, track.most)]
                numbers.append([*run, device.name, column, *cells])
    run_heading = ["run"] * (len(histories) > 1)
    names = [device.name for device in histories[0].telemetry.devices]
    key = _key(names, numbered=False) if len(histories) == 1 and len(names) > 1 else _run_key(histories)
    plots = _plots([plot_track(track, histories) for track in TRACKS])
    of_devices = table(
        "Each device",
        [*run_heading, "device", "samples", "over", "energy", "throttled, share of samples"],
        devices,
        kind="numbers",
    )
    headings = [*run_heading, "device", "number", "least", "mean", "most"]
    of_numbers = table("What the samples say", headings, numbers, kind="numbers")
    return key + plots + of_devices + unfolding("Every number of every device", of_numbers)


# --- evaluations, checkpoints, events --------------------------------------------------------------


def _evaluations(histories: Sequence[History]) -> str:
    metrics = [
        metric
        for metric in dict.fromkeys(metric for history in histories for metric in history.metrics)
        if any(metric in result for history in histories for result in history.evaluations)
    ]
    told = dict.fromkeys(name for history in histories for result in history.evaluations for name in result)
    speeds = [name for name in told if is_speed(name)]
    rows, cut = [], 0
    for history, name in zip(histories, _run_names(histories), strict=True):
        best, results = history.summary.best, history.evaluations
        if len(results) > MOST_ROWS:
            cut = max(cut, len(results))
            results = [result for result in results[:-MOST_ROWS] if result is best] + results[-MOST_ROWS:]
        for result in results:
            counts = [f"{result[field]:,.0f}" if field in result else "–" for field in ("step", "samples", "examples")]
            cells = [show(metric, result.get(metric)) for metric in metrics]
            if result is best and history.summary.headline is not None:
                place = metrics.index(history.summary.headline)
                cells[place] = Markup(f"<mark>best</mark> {escape(cells[place])}")
            cells += [compact(result[speed]) if speed in result else "–" for speed in speeds]
            rows.append([name] * (len(histories) > 1) + counts + cells)
    if not rows:
        return quiet("None so far; evaluate.data names a folder to evaluate on.")
    headings = ["run"] * (len(histories) > 1) + ["step", "samples", "examples", *map(title_of, metrics + speeds)]
    note = quiet(f"The last {MOST_ROWS} of up to {cut:,}, and the best." if cut else "")
    return table("On held-out examples", headings, rows, kind="numbers") + note


def _checkpoints(histories: Sequence[History]) -> str:
    rows = []
    for history, name in zip(histories, _run_names(histories), strict=True):
        for kept in history.checkpoints:
            step = f"{kept.step:,}" if kept.step is not None else kept.name
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kept.saved_s))
            state = Markup(f"<mark>best</mark> {kept.state}") if kept.is_best else kept.state
            rows.append([name] * (len(histories) > 1) + [step, state, amount(kept.bytes, "B"), saved])
    if not rows:
        return quiet("None in the run folder.")
    headings = ["run"] * (len(histories) > 1) + ["step", "state", "size", "saved"]
    return table("What lies in the run folder; hashes were not compared", headings, rows, kind="numbers")


def _events(histories: Sequence[History]) -> str:
    events = [
        f"{history.name}: {describe(entry)}" if len(histories) > 1 else describe(entry)
        for history in histories
        for entry in history.events
    ]
    return listed(events, "events") or quiet("None in the logs.")


# --- settings and environment ----------------------------------------------------------------------


def _settings(histories: Sequence[History]) -> str:
    """What the runs share, what is no default being marked."""
    every = [settings_of(history) for history in histories]
    not_shared = differing(every)
    parts = [quiet("Marked: what is not the default, which is struck out beside it."), '<div class="settings">']
    defaults = dotted(Settings())
    for section in ("run", *SECTIONS):
        rows = []
        for key, value in every[0].items():
            default = defaults.get(key, value)
            if key.startswith(f"{section}.") and key not in not_shared:
                shown = f"<del>{escape(default or '–')}</del> <mark>{escape(value or '–')}</mark>"
                rows.append([key.partition(".")[2], Markup(shown) if value != default else value or "–"])
        if rows:
            parts.append(table(section, ["setting", "value"], rows))
    return "".join([*parts, "</div>"])


def _environment(histories: Sequence[History]) -> str:
    columns = list(dict.fromkeys(column for history in histories for start in history.starts for column in start))
    rows = [
        [name] * (len(histories) > 1) + [str(start.get(column, "–")) for column in columns]
        for history, name in zip(histories, _run_names(histories), strict=True)
        for start in history.starts[-MOST_ROWS:]
    ]
    if not rows:
        return quiet("Not known.")
    return table("Each start of a run", ["run"] * (len(histories) > 1) + columns, rows)


# --- what several sections need --------------------------------------------------------------------


def _plots(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>' if any(plots) else ""


def _run_names(histories: Sequence[History]) -> list[Markup]:
    """The name of each run with the colour it has in all plots."""
    return _coloured([history.name for history in histories])


def _coloured(names: Sequence[str], *, numbered: bool = True) -> list[Markup]:
    return [
        Markup(
            f'<i class="swatch run-{number % NUM_COLOURS}"></i>{f"{number + 1} " if numbered else ""}'
            f"<span>{escape(name)}</span>"
        )
        for number, name in enumerate(names)
    ]


def _run_key(histories: Sequence[History]) -> str:
    return _key([history.name for history in histories]) if len(histories) > 1 else ""


def _key(names: Sequence[str], *, numbered: bool = True) -> str:
    return f'<ul class="key runs">{"".join(f"<li>{name}</li>" for name in _coloured(names, numbered=numbered))}</ul>'
