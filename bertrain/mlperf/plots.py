"""The picture that `bertrain mlperf show --plot` draws: accuracy on the way, by samples and by time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from bertrain.mlperf.show import LogSummary
from bertrain.reports.plots import NUM_COLOURS, PLOT_HEIGHT, PLOT_WIDTH, RUN_COLOURS, VARIABLES, blank_axes, to_svg

MARGIN, TITLE_HEIGHT, LINE_HEIGHT = 16, 44, 16


def draw_logs(logs: Sequence[LogSummary]) -> str:
    """An SVG file of its own, light by day and dark by night as a report is, with a line for each log below."""
    panels = [
        ("Accuracy by samples", "Sequences trained on, where the log tells", _draw(logs, by_samples=True)),
        ("Accuracy by time", "Seconds from run_start, evaluations included", _draw(logs, by_samples=False)),
    ]
    width = 2 * PLOT_WIDTH + 3 * MARGIN
    top = PLOT_HEIGHT + TITLE_HEIGHT + 2 * MARGIN
    height = top + LINE_HEIGHT * len(logs) + MARGIN
    style = resources.files("bertrain.reports").joinpath("report.css").read_text().partition("* {")[0]
    style += (
        "text { font: 10px var(--sans); fill: var(--muted) } .title { font: 650 14px var(--sans); fill: var(--ink) }"
    )
    parts = [f"<style>{style}</style>", '<rect width="100%" height="100%" fill="var(--surface)"/>']
    for number, (title, note, drawn) in enumerate(panels):
        left = MARGIN + number * (PLOT_WIDTH + MARGIN)
        parts.append(f'<text class="title" x="{left}" y="{MARGIN + 14}">{title}</text>')
        parts.append(f'<text x="{left}" y="{MARGIN + 30}">{escape(note)}</text>')
        place = f'x="{left}" y="{MARGIN + TITLE_HEIGHT}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"'
        parts.append(drawn.replace("<svg ", f"<svg {place} ", 1))
    for number, log in enumerate(logs):
        y = top + LINE_HEIGHT * number
        colour = VARIABLES[RUN_COLOURS[number % NUM_COLOURS]]
        dashes = ' stroke-dasharray="5 3"' if number >= NUM_COLOURS else ""
        parts.append(f'<path d="M{MARGIN} {y}h24" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{MARGIN + 32}" y="{y + 3}">{escape(describe(log))}</text>')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


def describe(log: LogSummary) -> str:
    """A log in a few words."""
    path = Path(log.file)
    words = [f"{path.parent.name}/{path.name}" if path.parent.name else path.name]
    words += [text for text in (log.organization, log.platform) if text and text != "unknown"]
    if log.time_to_train_s is not None:
        words.append(f"{log.time_to_train_s:,.1f} s")
    return ", ".join(words) + ("" if log.has_converged else f" ({log.status})")


def _draw(logs: Sequence[LogSummary], *, by_samples: bool) -> str:
    figure, axes = blank_axes("samples" if by_samples else "seconds", "{:.3g}%".format)
    sentences = []
    for number, log in enumerate(logs):
        points = [
            (one.samples if by_samples else one.seconds, 100 * one.accuracy)
            for one in log.evaluations
            if one.samples is not None or not by_samples
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=RUN_COLOURS[number % NUM_COLOURS],
                linestyle="-" if number < NUM_COLOURS else "--",
                linewidth=1.5,
                marker="o",
                markersize=3,
            )
            sentences.append(f"{describe(log)}: {points[-1][1]:.2f}% at {points[-1][0]:,.0f}")
    axes.set_xlim(left=0)
    return to_svg(figure, f"Accuracy by {'samples' if by_samples else 'seconds'}. {'; '.join(sentences)}")
