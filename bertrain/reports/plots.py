"""The plots of a report: SVG by matplotlib whose colors are variables of colors.css, for light, dark and paper."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from bertrain.base.console import PHASES
from bertrain.base.extras import import_extra
from bertrain.base.formatting import YARDSTICKS, compact, heading_of, is_share, is_speed
from bertrain.config.choices import MASK_PROBABILITY
from bertrain.reports.history import History, group_size, rank_means, smooth, smoothing_window, thin
from bertrain.reports.page import NUM_COLORS, PLOT_HEIGHT, PLOT_WIDTH, Plot
from bertrain.run.stream import Floats

MAX_MARKS = 200  # rings or crosses in a plot
MAX_BARS = 64  # ranks in a plot
MAX_NAMED = 16  # devices in the words beside a plot
PHASE_NAMES = ["data", "forward + backward", "reduction", "optimizer"]
PHASE_LEGEND = [(name, "") for name in PHASE_NAMES]

# Placeholders for matplotlib; in the finished SVG they become variables of colors.css.
INK, RULE, SURFACE = "#010000", "#010001", "#010002"
RUN_COLORS = [f"#0200{number:02x}" for number in range(NUM_COLORS)]
PHASE_COLORS = [f"#0300{number:02x}" for number in range(len(PHASES))]
VARIABLES = {INK: "var(--muted)", RULE: "var(--rule)", SURFACE: "var(--surface)"}
VARIABLES |= {color: f"var(--run-{number})" for number, color in enumerate(RUN_COLORS)}
VARIABLES |= {color: f"var(--phase-{number})" for number, color in enumerate(PHASE_COLORS)}


@dataclass(frozen=True)
class Curve:
    """A number of every step, to be plotted."""

    field: str
    title: str
    note: str = ""

    @property
    def show(self) -> Callable[[float], str]:
        other = PERCENT if is_share(self.field) else compact
        return "{:.3g}".format if self.field == "learning_rate" else other


PERCENT = "{:.3g}%".format
CURVES = (
    Curve("mlm_loss", "Masked-word loss", "Mean cross-entropy of the masked words."),
    Curve("mlm_accuracy", "Masked-word accuracy", "Share of masked words predicted correctly."),
    Curve("nsp_loss", "Next-sentence loss", "Mean cross-entropy of next-sentence prediction."),
    Curve("nsp_accuracy", "Next-sentence accuracy", "Share of pairs classified correctly; chance is 50%."),
    Curve("rtd_loss", "Replaced-token loss", "Cross-entropy of replaced-token detection, per token of the step."),
    Curve("rtd_accuracy", "Replaced-token accuracy", "Share of tokens correctly called replaced or original."),
)
COURSE = (
    Curve("learning_rate", "Learning rate", "As set by the schedule."),
    Curve("gradient_norm", "Gradient norm", "Global norm, before clipping."),
    Curve("tokens_per_s", "Throughput", "Real tokens per second of step time; padding does not count."),
    Curve("sequences_per_s", "Sequences", "Sequences per second of step time."),
    Curve("padding_share", "Padding", "Share of the computed tokens that are padding."),
)
IDLE = Curve("idle_share", "Idle ranks", "Share of the ranks' time spent waiting, estimated from lengths.")


def curves_of(histories: Sequence[History]) -> list[Curve]:
    """The curves to plot: the metrics of pre-training, other metrics, and the course of training."""
    metrics = list(dict.fromkeys(name for history in histories for name in history.metrics))
    known = [curve for curve in CURVES if curve.field in metrics]
    left = [
        name for name in metrics if not name.startswith(YARDSTICKS) and name not in (curve.field for curve in known)
    ]
    if any(curve.field.endswith("_loss") for curve in known):
        left = [name for name in left if name != "loss"]  # it is their sum
    others = [Curve(name, heading_of(name)) for name in left]
    idle = [IDLE] if any(history.table.ranks for history in histories) else []
    return [*known, *others, *COURSE, *idle]


def points(history: History, field: str) -> Floats:
    """The downsampled curve of a number. Rates are averaged over time, not over steps."""
    if is_speed(field):
        seconds = np.maximum(np.sum([history.phase(phase) for phase in PHASES], axis=0), 1e-9)
        return thin(history.column(field) * seconds) / thin(seconds)
    return thin(history.column(field)) * (100 if is_share(field) else 1)


def plot_curve(curve: Curve, histories: Sequence[History]) -> Plot | None:
    """The plot of one number by step; None if no run has it."""
    figure, axes = blank_axes("step", curve.show)
    spans = []
    for number, history in enumerate(histories):
        values = points(history, curve.field)
        evaluations = [one for one in history.evaluations if curve.field in one.metrics]
        evaluated = [one.metrics[curve.field] * (100 if is_share(curve.field) else 1) for one in evaluations]
        finite = [*values[np.isfinite(values)]] or evaluated
        if finite:
            whose = f"run {number + 1} " if len(histories) > 1 else ""
            spans.append(f"{whose}from {curve.show(finite[0])} to {curve.show(finite[-1])}")
            _draw_run(axes, curve, number, history, values)
            _draw_evaluations(axes, number, [one.step for one in evaluations], evaluated)
    if not spans:
        return None
    lowest, highest = axes.dataLim.intervaly
    if curve.field == "gradient_norm" and highest > 30 * lowest > 0:
        use_logarithm(axes, curve.show)
    if curve.field.endswith(("_per_s", "_share")):
        axes.set_ylim(bottom=0)
    return Plot(curve.title, curve.note, to_svg(figure, f"{curve.title} by step: {'; '.join(spans)}"))


def _draw_run(axes: Any, curve: Curve, number: int, history: History, values: Floats) -> None:
    """One run in a plot: raw and smoothed curve, steps that were not finite as crosses on the axis."""
    if not np.isfinite(values).any():
        return
    steps, line = thin(history.column("step")), line_style(number)
    window = smoothing_window(len(values)) if curve.field != "learning_rate" else 1
    if window > 1:
        axes.plot(steps, values, linewidth=0.9, alpha=0.35, **line)
    axes.plot(steps, smooth(values, window), linewidth=1.7, marker="o" if len(values) == 1 else "", **line)
    if curve.field in ("loss", "mlm_loss", "gradient_norm") and history.summary.not_applied:
        skipped = few_marks(history.summary.not_applied)
        axes.plot(skipped, [0.035] * len(skipped), "x", color=line["color"], transform=axes.get_xaxis_transform())


def _draw_evaluations(axes: Any, number: int, steps: Sequence[int], values: Sequence[float]) -> None:
    """Evaluations as rings; a metric that steps do not have is a line through them."""
    color = line_style(number)["color"]
    ring = {"markersize": 5.5, "color": SURFACE, "markeredgecolor": color, "markeredgewidth": 1.5, "zorder": 5}
    if not axes.lines or axes.lines[-1].get_color() != color:
        axes.plot(few_marks(steps), few_marks(values), linewidth=1.2, **line_style(number))
    axes.plot(few_marks(steps), few_marks(values), "o", **ring)


def line_style(number: int) -> dict[str, str]:
    """The style of the line of a run or device; after the last color they repeat, dashed."""
    return {"color": RUN_COLORS[number % NUM_COLORS], "linestyle": "-" if number < NUM_COLORS else "--"}


def few_marks(values: Sequence[Any]) -> Sequence[Any]:
    """Evenly spaced values, if there are more than MAX_MARKS."""
    return values[:: group_size(len(values), MAX_MARKS)]


def how_to_read(histories: Sequence[History]) -> str:
    """Sentences that explain the points, lines and marks of the plots."""
    counts = [history.num_steps for history in histories]
    up_to = "up to " if len(counts) > 1 else ""
    group = max(map(group_size, counts))
    window = max(smoothing_window(-(-count // group_size(count))) for count in counts)
    raw = "points" if group > 1 else "single steps"
    sentences = [
        (group > 1, f"Each point is the mean of {up_to}{group:,} steps."),
        (window > 1, f"Pale lines are {raw}, strong lines their centered mean over {up_to}{window}."),
        (any(history.evaluations for history in histories), _what_rings_are(histories)),
        (any(history.summary.not_applied for history in histories), "Crosses are steps that were not finite."),
    ]
    return " ".join(sentence for applies, sentence in sentences if applies)


def _what_rings_are(histories: Sequence[History]) -> str:
    settings = [history.run.settings for history in histories]
    shares = {one.data.mask_probability for one in settings if one.model.head == "pretrain"}
    if shares <= {MASK_PROBABILITY}:
        return "Rings are held-out evaluations."
    trained = " or ".join(f"{share:.0%}" for share in sorted(shares))
    return (
        f"Rings are held-out evaluations, always with {MASK_PROBABILITY:.0%} of the words masked; training: {trained}."
    )


def plot_phases(history: History) -> Plot:
    figure, axes = blank_axes("step", PERCENT)
    steps, seconds = thin(history.column("step")), np.array([thin(history.phase(phase)) for phase in PHASES])
    axes.stackplot(steps, 100 * seconds / np.maximum(seconds.sum(axis=0), 1e-9), colors=PHASE_COLORS, linewidth=0)
    axes.set(ylim=(0, 100), xlim=(steps[0], max(steps[-1], steps[0] + 1)))
    label = ", ".join(f"{name} {share:.1%}" for name, share in zip(PHASE_NAMES, history.summary.shares, strict=True))
    return Plot("Time per phase", "Share of step time.", to_svg(figure, f"Time per phase: {label}"), PHASE_LEGEND)


def plot_ranks(history: History) -> Plot | None:
    """Time of each rank in a step, as bars; None for a run of one rank."""
    ranks = rank_means(history.table)
    if not ranks:
        return None
    figure, axes = blank_axes("rank", "{:.3g} ms".format)
    group = group_size(len(ranks), MAX_BARS)
    places = np.arange(0, len(ranks), group)
    under = np.zeros(len(places))
    for phase, color in zip(PHASES, PHASE_COLORS, strict=True):
        heights = 1e3 * thin(np.array([one.seconds[phase] for one in ranks]), MAX_BARS)
        axes.bar(places, heights, 0.8 * group, under, color=color)
        under += heights
    note = "Mean time per step. The fastest rank waits longest in the reduction."
    note += f" A bar is the mean of {group} ranks." if group > 1 else ""
    own = [1e3 * one.own_seconds for one in ranks]
    slowest = ranks[int(np.argmax(own))].rank
    label = f"Time of each rank: own work from {min(own):.3g} to {max(own):.3g} ms, longest on rank {slowest}"
    return Plot("Ranks", note, to_svg(figure, label), PHASE_LEGEND)


TRACKS = {
    "power_w": ("Power", "W"),
    "sm_clock_mhz": ("Clock", "MHz"),
    "temperature_c": ("Temperature", "°C"),
    "gpu_utilisation": ("GPU utilization", ""),
    "cpu_utilisation": ("CPU utilization", ""),
    "memory_used_bytes": ("GPU memory", "bytes"),
    "rss_bytes": ("Process memory", "bytes"),
}


def plot_track(name: str, histories: Sequence[History]) -> Plot | None:
    """A column of the telemetry over time: a line for each device, in the color of the device or of its run."""
    title, unit = TRACKS[name]
    figure, axes = blank_axes("minutes", compact)
    spans = []
    for number, history in enumerate(histories):
        with_it = [device for device in history.telemetry.devices if name in device.tracks]
        for place, device in enumerate(with_it):
            track = device.tracks[name]
            line = line_style(number if len(histories) > 1 else place)
            axes.plot(device.minutes, track.curve[: len(device.minutes)], linewidth=1.4, **line)
            whose = f"run {number + 1}, {device.name}" if len(histories) > 1 else device.name
            shown = [f"{compact(value)} {unit}".rstrip() for value in (track.minimum, track.maximum, track.mean)]
            spans.append(f"{whose} {shown[0]} to {shown[1]}, mean {shown[2]}")
    if not spans:
        return None
    shown = spans[:MAX_NAMED] + [f"and {len(spans) - MAX_NAMED} more"] * (len(spans) > MAX_NAMED)
    note = f"In {unit}." if unit else "As sampled."
    return Plot(title, note, to_svg(figure, f"{title} over time: {'; '.join(shown)}"))


def plot_lengths(histories: Sequence[History]) -> Plot:
    """The lengths of the examples of each data folder that still exists."""
    figure, axes = blank_axes("tokens in an example", PERCENT)
    by_data: dict[str, list[int]] = {}
    for number, history in enumerate(histories):
        by_data.setdefault(history.run.data_fingerprint, []).append(number)
    notes = []
    for numbers in by_data.values():
        history, color = histories[numbers[0]], RUN_COLORS[numbers[0] % NUM_COLORS]
        whose = f"Run {', '.join(str(number + 1) for number in numbers)}: " if len(histories) > 1 else ""
        if history.lengths is None:
            gone = f"The data is no longer at {history.run.data}, so its lengths are unknown."
            notes.append(whose + ("The lengths of a task's examples are not shown." if history.run.task else gone))
            continue
        draw_lengths(axes, history.lengths, color)
        notes.append(whose + describe_lengths(history.lengths))
    if axes.get_yscale() == "log":
        notes.append("The scale is logarithmic.")
    note = " ".join(notes)
    return Plot("Lengths", note, to_svg(figure, f"Share of examples by length. {note}") if axes.patches else Markup())


def bin_lengths(lengths: dict[int, int], most: int = 40) -> tuple[list[int], list[float]]:
    """Edges and shares of examples of at most `most` equal ranges of length; an edge belongs to the range below."""
    width, total = group_size(max(lengths), most), sum(lengths.values())
    shares = [0.0] * -(-max(lengths) // width)
    for length, count in lengths.items():
        shares[(length - 1) // width] += count / total
    return [number * width for number in range(len(shares) + 1)], shares


def describe_lengths(lengths: dict[int, int]) -> str:
    """Number, mean and maximum of the lengths in a sentence."""
    total, longest = sum(lengths.values()), max(lengths)
    average = sum(length * count for length, count in lengths.items()) / total
    at_most = f"{lengths[longest] / total:.1%} have {longest}, the most"
    return f"{total:,} examples of {average:.1f} tokens on average; {at_most}."


def draw_lengths(axes: Any, lengths: dict[int, int], color: str) -> None:
    edges, shares = bin_lengths(lengths)
    for style in ({"fill": True, "alpha": 0.2}, {"linewidth": 1.5}):
        axes.stairs([100 * share for share in shares], edges, color=color, **style)
    if max(shares) > 0.5:  # on a linear scale the most frequent length would hide the others
        use_logarithm(axes, PERCENT)


def blank_axes(x_label: str, show: Callable[[float], str]) -> tuple[Any, Any]:
    """An empty plot: no frame, thin grid lines, few ticks."""
    new_figure = import_extra("matplotlib.figure").Figure
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(figsize=(PLOT_WIDTH / 72, PLOT_HEIGHT / 72), facecolor="none")  # SVG counts 72 to the inch
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

    axes.set_yscale("log")  # resets the formatter
    axes.yaxis.set_major_formatter(lambda value, _: show(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def to_svg(figure: Any, label: str) -> Markup:
    """A figure as SVG inside a page: with the colors and fonts of the page, and ids that no other figure has."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bertrain"}):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    prefix = "p" + hashlib.sha256(label.encode()).hexdigest()[:8]
    body = written.getvalue()[written.getvalue().index("<svg") :].partition(">")[2]
    body = re.sub(r"<defs>\s*<style.*?</defs>", "", body, flags=re.DOTALL)  # would apply to the whole page
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = re.sub(r'font(-\w+)?: [^;"]*;? ?', "", body)
    body = re.sub("#0[123]00[0-9a-f]{2}", lambda found: VARIABLES[found[0]], body)
    body = re.sub(r"\s*\n\s*", " ", body)
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg {names} viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" role="img" aria-label="'
    return Markup(opening) + label + Markup(f'">{body}')
