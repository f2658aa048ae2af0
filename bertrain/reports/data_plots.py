"""`bertrain data stats --plot`: an SVG of the lengths of the examples, and of the overhead of each policy."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from bertrain.data.feed.stats import DataStats
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.packing import count_lengths
from bertrain.data.formats.source import open_data
from bertrain.reports.page import Plot, check_plot, render_panels, write_page
from bertrain.reports.plots import PERCENT, RUN_COLORS, blank_axes, describe_lengths, draw_lengths, to_svg

OVERHEADS = ("padding", "tokens", "attention")


def plot_stats(stats: DataStats, path: str | Path, *, vocab: str | Path | None = None) -> None:
    lengths = open_data(stats.folder, vocab=vocab, verify="size").lengths
    write_page(check_plot(path), draw_stats(stats, count_lengths(lengths)), "plot")


def draw_stats(stats: DataStats, histogram: Ints) -> str:
    lengths = {length: int(histogram[length]) for length in histogram.nonzero()[0].tolist()}
    note = "Padding, and the busiest rank over the mean in tokens and in attention"
    figure, axes = blank_axes("tokens in an example", PERCENT)
    draw_lengths(axes, lengths, RUN_COLORS[0])
    said = describe_lengths(lengths)
    of_lengths = Plot("Lengths", said, to_svg(figure, f"Share of examples by length. {said}"))
    return render_panels([of_lengths, Plot("Policies", note, _draw_policies(stats))])


def _draw_policies(stats: DataStats) -> Markup:
    """Three bars for each policy, all in percent."""
    figure, axes = blank_axes("", PERCENT)
    sentences = []
    for number, entry in enumerate(stats.policies):
        overheads = (entry.padding, entry.token_imbalance - 1, entry.attention_imbalance - 1)
        places = [number + 0.26 * (bar - 1) for bar in range(len(OVERHEADS))]
        axes.bar(places, [100 * overhead for overhead in overheads], 0.24, color=RUN_COLORS[: len(OVERHEADS)])
        sentences.append(f"{entry.policy} {', '.join(f'{overhead:.1%}' for overhead in overheads)}")
    axes.set_xticks(range(len(stats.policies)), [entry.policy for entry in stats.policies])
    axes.set_xlim(-0.6, len(stats.policies) - 0.4)
    for name, color, place in zip(OVERHEADS, RUN_COLORS, (0.64, 0.8, 1.0), strict=False):
        axes.text(place, -0.2, name, color=color, ha="right", va="bottom", transform=axes.transAxes, fontsize=10)
    return to_svg(figure, f"Padding, token and attention imbalance: {'; '.join(sentences)}")
