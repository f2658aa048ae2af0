"""The report of a run: one HTML file that needs nothing else, neither network nor scripts.

Read in this order: what a run folder says, the arithmetic on it, the plots (inline SVG by matplotlib whose colours
are variables of report.css, so that one picture serves light, dark and paper), and the page around them.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import bertrain
from bertrain.config import SECTIONS, Settings
from bertrain.data.shards import MANIFEST
from bertrain.errors import UserError
from bertrain.observe.console import PHASES
from bertrain.train.runs import Run, write_atomically

Floats = npt.NDArray[np.float64]

MOST_POINTS = 1000  # of a curve; more could not be told apart and would weigh megabytes
MOST_BARS = 40  # of the length histogram
MOST_NAMED = 12  # skipped steps that are listed by number
NUM_COLOURS = 8  # --run-0 to --run-7 in report.css
PLOT_WIDTH, PLOT_HEIGHT = 400, 230  # in CSS pixels, before the page scales it
PHASE_NAMES = ["data", "forward + backward", "optimizer"]


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


# --- what a run folder says ----------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """A run as its folder tells it."""

    name: str
    run: Run
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    lengths: dict[int, int] | None  # examples of each length; None if the data is no longer there

    def column(self, field: str) -> Floats:
        """One number of every step; NaN where it was not finite or is not there."""
        return np.array([step.get(field) for step in self.steps], dtype=np.float64)

    def phase(self, phase: str) -> Floats:
        """Seconds of one phase of every step."""
        return np.array([step["seconds"][phase] for step in self.steps], dtype=np.float64)

    @cached_property
    def summary(self) -> Summary:
        return summarise(self)


def read(folder: Path, name: str) -> History:
    """Read a run folder, or say in a sentence why there is nothing to report."""
    run = Run.open(folder)
    records = []
    for line in _text(folder / "metrics.jsonl").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # the last line of a run that is being written, or was killed
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        raise UserError(f"the run {folder} has no metrics yet; report on it after its first steps")
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    try:
        starts = json.loads(_text(folder / "environment.json") or "[]")
    except ValueError:
        raise UserError(f"{folder / 'environment.json'} is damaged; remove it to report without it") from None
    return History(name, run, steps, evaluations, starts, read_lengths(run))


def read_lengths(run: Run) -> dict[int, int] | None:
    """The length histogram of the data the run was trained on, if that very data is still where it was."""
    manifest = _text(run.data / MANIFEST)
    if hashlib.sha256(manifest.encode()).hexdigest() != run.data_fingerprint:
        return None
    return {int(length): count for length, count in json.loads(manifest)["length_histogram"].items()}


def count_parameters(settings: Settings) -> int:
    """Parameters of the model, which is described to PyTorch but never made."""
    import torch

    from bertrain.model.bert import Bert

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Bert(settings.model).parameters())


def display_names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where two are called the same."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.resolve()) for folder in folders]
    return [name.encode("utf-8", "replace").decode() for name in names]  # a folder's name need not be Unicode


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- the arithmetic ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The figures at the head of the page."""

    steps: int
    samples: int
    tokens: int
    seconds: list[float]  # of each phase, over all steps; evaluation and saving are not in them
    shares: list[float]  # the same, of their sum
    tokens_per_s: float
    tail: int  # steps at the end that the next two are means of
    loss: float
    mlm_accuracy: float
    best: dict[str, Any] | None  # the evaluation with the highest masked-word accuracy, the earliest of equals
    skipped: list[int]  # steps that were not finite, or not applied


def summarise(history: History) -> Summary:
    """The run in a dozen figures."""
    steps, tail = history.steps, max(1, min(10, len(history.steps) // 10))
    seconds = [float(history.phase(phase).sum()) for phase in PHASES]
    total_seconds, tokens = max(sum(seconds), 1e-9), sum(step["tokens"] for step in steps)
    judged = [result for result in history.evaluations if result["mlm_accuracy"] is not None]
    finite = np.isfinite(history.column("loss") + history.column("gradient_norm"))
    return Summary(
        steps=steps[-1]["step"],
        samples=steps[-1]["samples"],
        tokens=tokens,
        seconds=seconds,
        shares=[part / total_seconds for part in seconds],
        tokens_per_s=tokens / total_seconds,
        tail=tail,
        loss=mean(history.column("loss")[-tail:]),
        mlm_accuracy=mean(history.column("mlm_accuracy")[-tail:]),
        best=max(judged, key=lambda result: result["mlm_accuracy"], default=None),
        skipped=[step["step"] for step, good in zip(steps, finite, strict=True) if not (good and step["applied"])],
    )


def mean(values: Floats) -> float:
    """Mean of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def group_size(count: int, most: int = MOST_POINTS) -> int:
    """How many consecutive values become one, so that at most `most` are left."""
    return max(1, -(-count // most))


def thin(values: Floats, most: int = MOST_POINTS) -> Floats:
    """Means of consecutive groups of equal size, the last one perhaps smaller."""
    group = group_size(len(values), most)
    return np.array([mean(values[first : first + group]) for first in range(0, len(values), group)])


def smoothing_window(count: int) -> int:
    """Points that a smoothed curve averages: an odd number near a thirtieth of them; 1 is no smoothing."""
    return 2 * (count // 60) + 1


def smooth(values: Floats, window: int) -> Floats:
    """Centred mean over `window` points, over fewer at the ends so that it stays centred."""
    reach = [min(index, len(values) - 1 - index, window // 2) for index in range(len(values))]
    return np.array([mean(values[index - half : index + half + 1]) for index, half in enumerate(reach)])


def bin_lengths(lengths: dict[int, int], most: int = MOST_BARS) -> tuple[list[int], list[float]]:
    """Edges of at most `most` equal ranges of length, an edge belonging to the range below; shares of examples."""
    width, total = group_size(max(lengths), most), sum(lengths.values())
    shares = [0.0] * -(-max(lengths) // width)
    for length, count in lengths.items():
        shares[(length - 1) // width] += count / total
    return [number * width for number in range(len(shares) + 1)], shares


def describe_lengths(lengths: dict[int, int]) -> str:
    """The length histogram in a sentence."""
    total, longest = sum(lengths.values()), max(lengths)
    average = sum(length * count for length, count in lengths.items()) / total
    at_most = f"{lengths[longest] / total:.1%} have {longest}, the most"
    return f"{total:,} examples of {average:.1f} tokens on average; {at_most}."


def compact(value: float) -> str:
    """A number in at most four digits: 0.25, 9,870, 45.6 k, 1.59 M, 3.3 B."""
    if float(f"{value:.4g}") < 1e4:
        return f"{value:,.4g}"
    rounded = float(f"{value:.3g}")
    unit, suffix = next(pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if rounded >= pair[0])
    return f"{rounded / unit:.3g} {suffix}"


def duration(seconds: float) -> str:
    """0.8 s, 45 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = round(seconds)
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {part}"
    return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"


def decimal(value: float | None) -> str:
    """A loss in four decimals; a dash where it is not finite or not there."""
    return "–" if value is None or value != value else f"{value:.4f}"


def percent(value: float | None) -> str:
    """A share in hundredths of a percent; a dash where it is not finite or not there."""
    return "–" if value is None or value != value else f"{value:.2%}"


# --- the plots -----------------------------------------------------------------------------------

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
    figure, axes = _axes("step", curve.show)
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
        _use_logarithm(axes, curve.show)
    if curve.field == "tokens_per_s":
        axes.set_ylim(bottom=0)
    return _figure(curve.title, curve.note, _svg(figure, f"{curve.title} by step: {'; '.join(spans)}"))


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
    figure, axes = _axes("step", "{:.3g}%".format)
    steps, seconds = thin(history.column("step")), np.array([thin(history.phase(phase)) for phase in PHASES])
    axes.stackplot(steps, 100 * seconds / np.maximum(seconds.sum(axis=0), 1e-9), colors=PHASE_COLOURS, linewidth=0)
    axes.set(ylim=(0, 100), xlim=(steps[0], max(steps[-1], steps[0] + 1)))
    label = ", ".join(f"{name} {share:.1%}" for name, share in zip(PHASE_NAMES, history.summary.shares, strict=True))
    return _figure("Time per phase", "Share of step time.", _svg(figure, f"Time per phase: {label}"), _phase_key())


def plot_lengths(histories: Sequence[History]) -> str:
    """The lengths of the examples, once for each data folder, where it is still there."""
    figure, axes = _axes("tokens in an example", "{:.3g}%".format)
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
        _use_logarithm(axes, "{:.3g}%".format)
        notes.append("The scale is logarithmic.")
    note = " ".join(notes)
    return _figure("Lengths", note, _svg(figure, f"Share of examples by length. {note}") if tallest else "")


def _axes(x_label: str, show: Callable[[float], str]) -> tuple[Any, Any]:
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


def _use_logarithm(axes: Any, show: Callable[[float], str]) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")  # which forgets how its ticks are written
    axes.yaxis.set_major_formatter(lambda value, _: show(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _svg(figure: Any, label: str) -> str:
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


# --- the page ------------------------------------------------------------------------------------


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
        "Environment": _environment(histories),
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
    return Markup(f'<div class="bar" aria-hidden="true">{"".join(parts)}</div>{_phase_key(values)}')


def _phase_key(values: Sequence[str] = ("", "", "")) -> str:
    items = (
        f'<li><i class="swatch phase-{number}"></i>{name} <b>{values[number]}</b></li>'
        for number, name in enumerate(PHASE_NAMES)
    )
    return f'<ul class="key">{"".join(items)}</ul>'


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
        skipped = history.summary.skipped
        steps = ", ".join(f"{step:,}" for step in skipped[:MOST_NAMED]) + ", …" * (len(skipped) > MOST_NAMED)
        text = (
            f"{history.name}: {len(skipped):,} of {len(history.steps):,} steps were not finite and not applied: {steps}"
        )
        notes.append(f'<p class="warning">{escape(text)}</p>' if skipped else "")
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


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if text else ""


def _figure(title: str, note: str, svg: str, key: str = "") -> str:
    return f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p>{key}</figcaption>{svg}</figure>"


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
