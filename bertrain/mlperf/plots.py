"""`bertrain mlperf show --plot`: an SVG of the accuracy by samples and by time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from bertrain.mlperf.show import LogSummary
from bertrain.reports.page import Plot, render_panels
from bertrain.reports.plots import PERCENT, blank_axes, line_style, to_svg


def draw_logs(logs: Sequence[LogSummary]) -> str:
    """The SVG, in the colors of a report, with a line of legend for each log."""
    plots = [
        Plot("Accuracy by samples", "Sequences trained on, where the log tells", _draw(logs, by_samples=True)),
        Plot("Accuracy by time", "Seconds from run_start, evaluations included", _draw(logs, by_samples=False)),
    ]
    return render_panels(plots, [describe(log) for log in logs])


def describe(log: LogSummary) -> str:
    path = Path(log.file)
    words = [f"{path.parent.name}/{path.name}" if path.parent.name else path.name]
    words += [text for text in (log.organization, log.platform) if text and text != "unknown"]
    if log.time_to_train_s is not None:
        words.append(f"{log.time_to_train_s:,.1f} s")
    return ", ".join(words) + ("" if log.has_converged else f" ({log.status})")


def _draw(logs: Sequence[LogSummary], *, by_samples: bool) -> Markup:
    figure, axes = blank_axes("samples" if by_samples else "seconds", PERCENT)
    sentences = []
    for number, log in enumerate(logs):
        shown = [one for one in log.evaluations if one.samples is not None or not by_samples]
        points = [(one.samples if by_samples else one.seconds, 100 * one.accuracy) for one in shown]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=1.5, marker="o", markersize=3, **line_style(number))
            sentences.append(f"{describe(log)}: {points[-1][1]:.2f}% at {points[-1][0]:,.0f}")
    axes.set_xlim(left=0)
    return to_svg(figure, f"Accuracy by {'samples' if by_samples else 'seconds'}. {'; '.join(sentences)}")
