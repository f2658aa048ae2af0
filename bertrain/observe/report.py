"""The report of a run: one HTML file that needs nothing else, neither network nor scripts.

`history.py` reads what a run folder says and does the arithmetic, `plots.py` draws; here is the page around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import bertrain
from bertrain.errors import UserError
from bertrain.files import write_atomically
from bertrain.observe.history import (
    History,
    Summary,
    by_rank,
    compact,
    count_parameters,
    decimal,
    display_names,
    duration,
    percent,
    read,
)
from bertrain.observe.plots import (
    CURVES,
    NUM_COLOURS,
    PHASE_NAMES,
    how_to_read,
    phase_key,
    plot_curve,
    plot_lengths,
    plot_phases,
)
from bertrain.settings import SECTIONS, Settings

MOST_NAMED = 12  # skipped steps that are listed by number


def report(runs: Sequence[str | Path], *, out: str | Path | None = None) -> Path:
    """Write the report of one run, or of several laid over each other, and return where it is.

    The page goes to `out`, or to report.html in the first run's folder; a run may still be going on. Raises
    UserError for a folder that is no run, a run without a step, or a place that cannot be written.
    """
    folders = [Path(run) for run in runs]
    if len({folder.resolve() for folder in folders}) < max(1, len(folders)):
        raise UserError("a report is about one run or several different ones; name each of them once")
    histories = [read(folder, name) for folder, name in zip(folders, display_names(folders), strict=True)]
    path = Path(out) if out is not None else folders[0] / "report.html"
    if path.is_dir():
        raise UserError(f"cannot write the report to {path}, which is a folder; name a file")
    try:
        # As ASCII the page means the same whatever encoding a locale or a reader takes it to have.
        write_atomically(path, page(histories).encode("ascii", "xmlcharrefreplace").decode())
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror or error}") from None
    return path


class Markup(str):
    """Text that is HTML already; all other text is escaped on its way into the page."""


def page(histories: Sequence[History]) -> str:
    """The whole report."""
    is_one = len(histories) == 1
    plots = [plot_curve(curve, histories) for curve in CURVES]
    plots += [plot_phases(histories[0])] * is_one + [plot_lengths(histories)]
    heading = histories[0].name if is_one else f"{len(histories)} runs"
    style = (resources.files("bertrain.observe") / "report.css").read_text(encoding="ascii")
    sections = {
        "Summary": (_figures(histories[0]) if is_one else _side_by_side(histories)) + _warnings(histories),
        "Curves": _run_key(histories) + _quiet(how_to_read(histories)) + f'<div class="plots">{"".join(plots)}</div>',
        "Evaluations": _evaluations(histories),
        "Settings": _settings(histories),
        "Environment": _environment(histories) + _rank_times(histories),
    }
    body = "\n".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections.items())
    title = ", ".join(history.name for history in histories)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - bertrain report</title>
<style>
{style}</style>
</head>
<body>
<header><p>bertrain report</p><h1>{escape(heading)}</h1></header>
<main>
{body}
</main>
<footer>Written by bertrain {escape(bertrain.__version__)} from what the run folder holds.</footer>
</body>
</html>
"""


def facts(history: History) -> list[tuple[str, str, str]]:
    """Label, figure and a small note for each of the figures at the head."""
    summary, settings = history.summary, history.run.settings
    parameters = count_parameters(settings)
    last = f"mean of the last {summary.tail} steps" if summary.tail > 1 else "last step"
    best = summary.best or {"mlm_accuracy": None}
    return [
        ("Model", f"{settings.model.num_layers} × {settings.model.hidden_size}", "layers × width"),
        ("Parameters", compact(parameters), f"{parameters:,}"),
        ("Steps", f"{summary.steps:,}", f"of {settings.train.max_steps:,}"),
        ("Samples", compact(summary.samples), f"{summary.samples:,} examples"),
        ("Tokens", compact(summary.tokens), f"{summary.tokens:,}, no padding"),
        ("Loss", decimal(summary.loss), last),
        ("Masked words right", percent(summary.mlm_accuracy), last),
        (
            "Best evaluation",
            percent(best["mlm_accuracy"]),
            f"right at step {best['step']:,}" if summary.best else "none",
        ),
        ("Throughput", compact(summary.tokens_per_s), "real tokens per second"),
        ("Time in steps", duration(sum(summary.seconds)), "without evaluation and saving"),
    ]


def _figures(history: History) -> str:
    cells = (
        f"<div><dt>{escape(label)}</dt><dd><b>{escape(value)}</b> <small>{escape(note)}</small></dd></div>"
        for label, value, note in facts(history)
    )
    return f'<dl class="figures">{"".join(cells)}</dl>{_phase_bar(history.summary)}'


def _side_by_side(histories: Sequence[History]) -> str:
    """The same figures with a column for each run."""
    rows: list[list[str]] = []
    for row in zip(*map(facts, histories), strict=True):
        notes = [f" <small>{escape(note)}</small>" for _, _, note in row]
        shared = notes[0] if len(set(notes)) == 1 else ""
        values = (Markup(escape(row[number][1]) + ("" if shared else note)) for number, note in enumerate(notes))
        rows.append([Markup(row[0][0] + shared), *values])
    rows.append(["Time per phase", *(_phase_bar(history.summary) for history in histories)])
    return _table("The runs side by side", ["", *_run_names(histories)], rows)


def _phase_bar(summary: Summary) -> Markup:
    values = [f"{duration(part)}, {share:.1%}" for part, share in zip(summary.seconds, summary.shares, strict=True)]
    parts = (
        f'<i class="phase-{number}" style="flex-grow:{part:.4f}"></i>' for number, part in enumerate(summary.shares)
    )
    return Markup(f'<div class="bar" aria-hidden="true">{"".join(parts)}</div>{phase_key(values)}')


def _run_names(histories: Sequence[History]) -> list[Markup]:
    """The name of each run with the colour it has in all plots."""
    return [
        Markup(f'<i class="swatch run-{number % NUM_COLOURS}"></i>{number + 1} <span>{escape(history.name)}</span>')
        for number, history in enumerate(histories)
    ]


def _run_key(histories: Sequence[History]) -> str:
    items = "".join(f"<li>{name}</li>" for name in _run_names(histories))
    return f'<ul class="key runs">{items}</ul>' if len(histories) > 1 else ""


def _warnings(histories: Sequence[History]) -> str:
    notes = []
    for history in histories:
        summary, total = history.summary, f"{len(history.steps):,}"
        for steps, what in (
            (summary.skipped, f"of {total} steps were not finite and not applied"),
            (summary.left_out, f"of {total} steps were left out on request"),
            (summary.spikes, f"of {total} steps had a loss far above those before"),
        ):
            named = ", ".join(f"{step:,}" for step in steps[:MOST_NAMED]) + ", …" * (len(steps) > MOST_NAMED)
            text = f"{history.name}: {len(steps):,} {what}: {named}"
            notes.append(f'<p class="warning">{escape(text)}</p>' if steps else "")
    return "".join(notes)


def _evaluations(histories: Sequence[History]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "step": lambda result: f"{result['step']:,}",
        "samples": lambda result: f"{result['samples']:,}",
        "examples": lambda result: f"{result['examples']:,.0f}",
        "loss": lambda result: decimal(result["loss"]),
        "masked-word loss": lambda result: decimal(result["mlm_loss"]),
        "masked words right": lambda result: percent(result["mlm_accuracy"]),
        "next-sentence loss": lambda result: decimal(result.get("nsp_loss")),
        "next sentences right": lambda result: percent(result.get("nsp_accuracy")),
    }
    rows = []
    for history, name in zip(histories, _run_names(histories), strict=True):
        for result in history.evaluations:
            cells = [show(result) for show in columns.values()]
            if result is history.summary.best:
                cells[5] = Markup(f"<mark>best</mark> {cells[5]}")
            rows.append([name] * (len(histories) > 1) + cells)
    if not rows:
        return _quiet("None so far; evaluate.data names a folder to evaluate on.")
    return _table("On held-out examples", ["run"] * (len(histories) > 1) + list(columns), rows, kind="numbers")


def settings_of(history: History) -> dict[str, str]:
    """Every setting as text by its dotted name; what was given beside the settings comes first."""
    run = history.run
    given = {"run.data": str(run.data), "run.data_fingerprint": run.data_fingerprint[:12], "run.init": run.init}
    return given | _dotted(run.settings)


def differing_settings(histories: Sequence[History]) -> list[str]:
    """Dotted names of the settings that are not the same in all runs."""
    every = [settings_of(history) for history in histories]
    return [key for key in every[0] if len({settings[key] for settings in every}) > 1]


def _settings(histories: Sequence[History]) -> str:
    """What differs between the runs, side by side; then what they share, what is no default being marked."""
    every, differing = [settings_of(history) for history in histories], differing_settings(histories)
    parts = [_quiet("Marked: what is not the default, which is struck out beside it."), '<div class="settings">']
    if differing:
        rows = [[key, *(settings[key] or "–" for settings in every)] for key in differing]
        parts.insert(0, _table("What differs", ["setting", *_run_names(histories)], rows))
    defaults = _dotted(Settings())
    for section in ("run", *SECTIONS):
        rows = []
        for key, value in every[0].items():
            default = defaults.get(key, value)
            if key.startswith(f"{section}.") and key not in differing:
                shown = f"<del>{escape(default)}</del> <mark>{escape(value or '–')}</mark>"
                rows.append([key.partition(".")[2], Markup(shown) if value != default else value or "–"])
        if rows:
            parts.append(_table(section, ["setting", "value"], rows))
    return "".join([*parts, "</div>"])


def _dotted(settings: Settings) -> dict[str, str]:
    return {
        f"{section}.{name}": str(value) for section, part in settings.to_dict().items() for name, value in part.items()
    }


def _environment(histories: Sequence[History]) -> str:
    columns = list(dict.fromkeys(column for history in histories for start in history.starts for column in start))
    rows = [
        [name] * (len(histories) > 1) + [str(start.get(column, "–")) for column in columns]
        for history, name in zip(histories, _run_names(histories), strict=True)
        for start in history.starts
    ]
    return _table("Each start of a run", ["run"] * (len(histories) > 1) + columns, rows)


def _rank_times(histories: Sequence[History]) -> str:
    """Where each rank's time went; nothing for runs of one rank."""
    rows = [
        [name] * (len(histories) > 1)
        + [f"{entry['rank']}", entry["host"], f"{entry['tokens']:,.0f}"]
        + [f"{1e3 * seconds:,.1f}" for seconds in entry["seconds"].values()]
        for history, name in zip(histories, _run_names(histories), strict=True)
        for entry in by_rank(history.rank_times)
    ]
    if not rows:
        return ""
    columns = ["rank", "host", "tokens", *(f"{name}, ms" for name in PHASE_NAMES)]
    caption = "Each rank, on average of a step; who waits longest in the reduction is the quickest"
    return _table(caption, ["run"] * (len(histories) > 1) + columns, rows, kind="numbers")


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if text else ""


def _table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table whose first column names its rows; where it is wider than the page it scrolls by itself."""

    def cells(tag: str, contents: Sequence[str]) -> str:
        safe = (content if isinstance(content, Markup) else escape(content) for content in contents)
        return "".join(f"<{tag}>{content}</{tag[:2]}>" for content in safe)

    body = "".join(f"<tr>{cells('th scope=row', row[:1])}{cells('td', row[1:])}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{cells('th scope=col', headings)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
