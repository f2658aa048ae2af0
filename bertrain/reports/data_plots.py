"""The picture that `bertrain data stats --plot` draws: the lengths, and what each policy wastes of them."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.data.feed.stats import DataStats
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.packing import count_lengths
from bertrain.data.formats.source import open_data
from bertrain.reports.history import bin_lengths, describe_lengths
from bertrain.reports.plots import PLOT_HEIGHT, PLOT_WIDTH, RUN_COLOURS, blank_axes, to_svg, use_logarithm

MARGIN, TITLE_HEIGHT = 16, 44
WASTES = ("padding", "tokens", "attention")


def check_plot(path: str | Path) -> Path:
    """The file to draw into. Raises UserError for a name that does not end in .svg."""
    if Path(path).suffix != ".svg":
        raise UserError(f"--plot draws an SVG; give its file a name that ends in .svg, unlike {path}")
    return Path(path)


def plot_stats(stats: DataStats, path: str | Path, *, vocab: str | Path | None = None) -> None:
    """Write `draw_stats` of a data folder to the SVG file `path`."""
    lengths = open_data(stats.folder, vocab=vocab, verify="size").lengths
    try:
        write_atomically(check_plot(path), draw_stats(stats, count_lengths(lengths)))
    except OSError as error:
        raise UserError(f"cannot write the plot to {path}: {error.strerror or error}") from None


def draw_stats(stats: DataStats, histogram: Ints) -> str:
    """An SVG file of its own, light by day and dark by night as a report is."""
    lengths = {length: int(histogram[length]) for length in histogram.nonzero()[0].tolist()}
    panels = [
        ("Lengths", describe_lengths(lengths), _draw_lengths(lengths)),
        ("Policies", "Padding, and the busiest rank over the mean in tokens and in attention", _draw_policies(stats)),
    ]
    width, height = 2 * PLOT_WIDTH + 3 * MARGIN, PLOT_HEIGHT + TITLE_HEIGHT + 2 * MARGIN
    style = resources.files("bertrain.reports").joinpath("report.css").read_text().partition("* {")[0]
    style += (
        "text { font: 10px var(--sans); fill: var(--muted) } .title { font: 650 14px var(--sans); fill: var(--ink) }"
    )
    parts = [f"<style>{style}</style>", '<rect width="100%" height="100%" fill="var(--surface)"/>']
    for number, (title, note, plot) in enumerate(panels):
        left = MARGIN + number * (PLOT_WIDTH + MARGIN)
        parts.append(f'<text class="title" x="{left}" y="{MARGIN + 14}">{title}</text>')
        parts.append(f'<text x="{left}" y="{MARGIN + 30}">{escape(note)}</text>')
        place = f'x="{left}" y="{MARGIN + TITLE_HEIGHT}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"'
        parts.append(plot.replace("<svg ", f"<svg {place} ", 1))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


def _draw_lengths(lengths: dict[int, int]) -> str:
    figure, axes = blank_axes("tokens in an example", "{:.3g}%".format)
    edges, shares = bin_lengths(lengths)
    for style in ({"fill": True, "alpha": 0.2}, {"linewidth": 1.5}):
        axes.stairs([100 * share for share in shares], edges, color=RUN_COLOURS[0], **style)
    if max(shares) > 0.5:
        use_logarithm(axes, "{:.3g}%".format)
    return to_svg(figure, f"Share of examples by length. {describe_lengths(lengths)}")


def _draw_policies(stats: DataStats) -> str:
    """Three bars for each policy, all in percent."""
    figure, axes = blank_axes("", "{:.3g}%".format)
    sentences = []
    for number, entry in enumerate(stats.policies):
        wastes = (entry.padding, entry.token_imbalance - 1, entry.attention_imbalance - 1)
        places = [number + 0.26 * (bar - 1) for bar in range(len(WASTES))]
        axes.bar(places, [100 * waste for waste in wastes], 0.24, color=RUN_COLOURS[: len(WASTES)])
        sentences.append(f"{entry.policy} {', '.join(f'{waste:.1%}' for waste in wastes)}")
    axes.set_xticks(range(len(stats.policies)), [entry.policy for entry in stats.policies])
    axes.set_xlim(-0.6, len(stats.policies) - 0.4)
    for name, colour, place in zip(WASTES, RUN_COLOURS, (0.64, 0.8, 1.0), strict=False):
        axes.text(place, -0.2, name, color=colour, ha="right", va="bottom", transform=axes.transAxes, fontsize=10)
    return to_svg(figure, f"Padding, token and attention imbalance: {'; '.join(sentences)}")
