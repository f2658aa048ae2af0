"""The plots of a report: inline SVG by matplotlib whose colours are variables of report.css.

So one picture serves light, dark and paper.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from bertrain.observe.console import PHASES
from bertrain.observe.history import (
    Floats,
    History,
    bin_lengths,
    compact,
    describe_lengths,
    group_size,
    smooth,
    smoothing_window,
    thin,
)

NUM_COLOURS = 8  # --run-0 to --run-7 in report.css
PLOT_WIDTH, PLOT_HEIGHT = 400, 230  # in CSS pixels, before the page scales it
PHASE_NAMES = ["data", "forward + backward", "reduction", "optimizer"]

# matplotlib is given colours that nothing else uses; in the finished SVG they become variables of report.css.
INK, RULE, SURFACE = "#010000", "#010001", "#010002"
RUN_COLOURS = [f"#0200{number:02x}" for number in range(NUM_COLOURS)]
PHASE_COLOURS = [f"#0300{number:02x}" for number in range(len(PHASES))]
VARIABLES = {INK: "var(--muted)", RULE: "var(--rule)", SURFACE: "var(--surface)"}
VARIABLES |= {colour: f"var(--run-{number})" for number, colour in enumerate(RUN_COLOURS)}
VARIABLES |= {colour: f"var(--phase-{number})" for number, colour in enumerate(PHASE_COLOURS)}


@dataclass(frozen=True)
class Curve:
    """A number of every step, to be plotted."""

    field: str
    title: str
    note: str
    show: Callable[[float], str] = compact


CURVES = (
    Curve("mlm_loss", "Masked-word loss", "Mean cross-entropy of the masked words."),
    Curve("mlm_accuracy", "Masked-word accuracy", "Share of masked words guessed right.", "{:.3g}%".format),
    Curve("nsp_loss", "Next-sentence loss", "Mean cross-entropy of the next-sentence guess."),
    Curve("nsp_accuracy", "Next-sentence accuracy", "Share of pairs told right; chance is 50%.", "{:.3g}%".format),
    Curve("learning_rate", "Learning rate", "As the schedule set it.", "{:.3g}".format),
    Curve("gradient_norm", "Gradient norm", "Global norm, before clipping."),
    Curve("tokens_per_s", "Throughput", "Real tokens per second of step time; padding does not count."),
)
MARKED = ("mlm_loss", "gradient_norm")  # the curves that show which steps were skipped


def points(history: History, field: str) -> Floats:
    """The thinned curve of a number. A rate is the tokens over the seconds of a group, not a mean of rates."""
    if field == "tokens_per_s":
        seconds = np.sum([history.phase(phase) for phase in PHASES], axis=0)
        return thin(history.column("tokens")) / np.maximum(thin(seconds), 1e-9)
    return thin(history.column(field)) * (100 if field.endswith("accuracy") else 1)


def plot_curve(curve: Curve, histories: Sequence[History]) -> str:
    """The figure of one number, or nothing if no run has it."""
    figure, axes = blank_axes("step", curve.show)
    spans = []
    for number, history in enumerate(histories):
        values = points(history, curve.field)
        finite = values[np.isfinite(values)]
        if len(finite):
            spans.append(f"from {curve.show(finite[0])} to {curve.show(finite[-1])}")
            _draw_run(axes, curve.field, number, history, values)
    if not spans:
        return ""
    lowest, highest = axes.dataLim.intervaly
    if curve.field == "gradient_norm" and highest > 30 * lowest > 0:
        use_logarithm(axes, curve.show)
    if curve.field == "tokens_per_s":
        axes.set_ylim(bottom=0)
    return framed(curve.title, curve.note, to_svg(figure, f"{curve.title} by step: {'; '.join(spans)}"))


def _draw_run(axes: Any, field: str, number: int, history: History, values: Floats) -> None:
    """One run in a plot: raw and smoothed curve, evaluations as rings, skipped steps as crosses on the axis."""
    colour, steps = RUN_COLOURS[number % NUM_COLOURS], thin(history.column("step"))
    line = {"color": colour, "linestyle": "-" if number < NUM_COLOURS else "--"}
    window = smoothing_window(len(values)) if field != "learning_rate" else 1
    if window > 1:
        axes.plot(steps, values, linewidth=0.9, alpha=0.35, **line)
    axes.plot(steps, smooth(values, window), linewidth=1.7, marker="o" if len(values) == 1 else "", **line)
    judged = [result for result in history.evaluations if result.get(field) is not None]
    ring = {"markersize": 5.5, "color": SURFACE, "markeredgecolor": colour, "markeredgewidth": 1.5, "zorder": 5}
    scale = 100 if field.endswith("accuracy") else 1
    axes.plot([result["step"] for result in judged], [scale * result[field] for result in judged], "o", **ring)
    if field in MARKED and history.summary.skipped:
        skipped = history.summary.skipped
        axes.plot(skipped, [0.035] * len(skipped), "x", color=colour, transform=axes.get_xaxis_transform())


def how_to_read(histories: Sequence[History]) -> str:
    """What the points, lines and marks of the plots are."""
    counts = [len(history.steps) for history in histories]
    up_to = "up to " if len(counts) > 1 else ""
    group = max(map(group_size, counts))
    window = max(smoothing_window(-(-count // group_size(count))) for count in counts)
    raw = "points" if group > 1 else "single steps"
    sentences = [
        (group > 1, f"Each point is the mean of {up_to}{group:,} steps."),
        (window > 1, f"Pale lines are {raw}, strong lines the centred mean of {up_to}{window} of them."),
        (any(history.evaluations for history in histories), "Rings are held-out evaluations."),
        (any(history.summary.skipped for history in histories), "Crosses are steps that were not finite."),
    ]
    return " ".join(sentence for applies, sentence in sentences if applies)


def plot_phases(history: History) -> str:
    """Where the time of the steps went."""
    figure, axes = blank_axes("step", "{:.3g}%".format)
    steps, seconds = thin(history.column("step")), np.array([thin(history.phase(phase)) for phase in PHASES])
    axes.stackplot(steps, 100 * seconds / np.maximum(seconds.sum(axis=0), 1e-9), colors=PHASE_COLOURS, linewidth=0)
    axes.set(ylim=(0, 100), xlim=(steps[0], max(steps[-1], steps[0] + 1)))
    label = ", ".join(f"{name} {share:.1%}" for name, share in zip(PHASE_NAMES, history.summary.shares, strict=True))
    return framed("Time per phase", "Share of step time.", to_svg(figure, f"Time per phase: {label}"), phase_key())


def plot_lengths(histories: Sequence[History]) -> str:
    """The lengths of the examples, once for each data folder, where it is still there."""
    figure, axes = blank_axes("tokens in an example", "{:.3g}%".format)
    by_data: dict[str, list[int]] = {}
    for number, history in enumerate(histories):
        by_data.setdefault(history.run.data_fingerprint, []).append(number)
    notes, tallest = [], 0.0
    for numbers in by_data.values():
        history, colour = histories[numbers[0]], RUN_COLOURS[numbers[0] % NUM_COLOURS]
        whose = f"Run {', '.join(str(number + 1) for number in numbers)}: " if len(histories) > 1 else ""
        if history.lengths is None:
            notes.append(f"{whose}The data is not at {history.run.data} any more, so its lengths are not known.")
            continue
        edges, shares = bin_lengths(history.lengths)
        tallest = max(tallest, *shares)
        for style in ({"fill": True, "alpha": 0.2}, {"linewidth": 1.5}):
            axes.stairs([100 * share for share in shares], edges, color=colour, **style)
        notes.append(whose + describe_lengths(history.lengths))
    if tallest > 0.5:  # one length outnumbers all others, which a linear scale would hide
        use_logarithm(axes, "{:.3g}%".format)
        notes.append("The scale is logarithmic.")
    note = " ".join(notes)
    return framed("Lengths", note, to_svg(figure, f"Share of examples by length. {note}") if tallest else "")


def blank_axes(x_label: str, show: Callable[[float], str]) -> tuple[Any, Any]:
    """An empty plot in the house style: no frame, hairlines, few ticks."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(PLOT_WIDTH / 72, PLOT_HEIGHT / 72), facecolor="none")  # SVG counts 72 to the inch
    axes = figure.add_axes((0.115, 0.165, 0.875, 0.80), facecolor="none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(which="both", bottom=False, left=False, labelcolor=INK, labelsize=10, pad=5)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02, y=0.08)
    axes.set_xlabel(x_label, loc="right", color=INK, fontsize=10, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.yaxis.set_major_formatter(lambda value, _: show(value))
    return figure, axes


def use_logarithm(axes: Any, show: Callable[[float], str]) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")  # which forgets how its ticks are written
    axes.yaxis.set_major_formatter(lambda value, _: show(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def to_svg(figure: Any, label: str) -> str:
    """A figure as SVG to stand inside a page: our colours, the page's fonts, no id that another figure has too."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bertrain"}):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    prefix = "p" + hashlib.sha256(label.encode()).hexdigest()[:8]
    body = written.getvalue()[written.getvalue().index("<svg") :].partition(">")[2]
    body = re.sub(r"<defs>\s*<style.*?</defs>", "", body, flags=re.DOTALL)  # it would hold for the whole page
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = re.sub(r'font(-\w+)?: [^;"]*;? ?', "", body)
    body = re.sub("#0[123]00[0-9a-f]{2}", lambda found: VARIABLES[found[0]], body)
    body = re.sub(r"\s*\n\s*", " ", body)
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {names} viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" role="img" aria-label="{escape(label)}">{body}'


def framed(title: str, note: str, svg: str, key: str = "") -> str:
    return f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p>{key}</figcaption>{svg}</figure>"


def phase_key(values: Sequence[str] = ("",) * len(PHASE_NAMES)) -> str:
    items = (
        f'<li><i class="swatch phase-{number}"></i>{name} <b>{values[number]}</b></li>'
        for number, name in enumerate(PHASE_NAMES)
    )
    return f'<ul class="key">{"".join(items)}</ul>'
