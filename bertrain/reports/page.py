"""The parts of a report's page: plain data that page.html.j2 renders. All HTML is in that template.

Every text is escaped by the template. Only `Plot.svg` is markup already: an SVG that we drew ourselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import bertrain

NUM_COLORS = 8  # --run-0 to --run-7 in colors.css
PLOT_WIDTH, PLOT_HEIGHT = 400, 230  # in CSS pixels, before the page scales it
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent, encoding="ascii"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["kind"] = lambda part: type(part).__name__


# --- cells of a table, and parts of a section -------------------------------------------------------


@dataclass(frozen=True)
class RunName:
    """The name of a run, or of a device, with its color in all plots."""

    index: int
    name: str
    is_numbered: bool = True

    @property
    def color(self) -> int:
        return self.index % NUM_COLORS


@dataclass(frozen=True)
class Noted:
    """Text followed by a small note."""

    text: str
    note: str


@dataclass(frozen=True)
class Best:
    """Text marked as the best."""

    text: str


@dataclass(frozen=True)
class Changed:
    """A value that differs from its default."""

    default: str
    value: str


@dataclass(frozen=True)
class PhaseBar:
    """A bar divided by the share of each phase, and its legend: (name, value) of each phase."""

    shares: Sequence[float]
    legend: Sequence[tuple[str, str]]


Cell = str | RunName | Noted | Best | Changed | PhaseBar


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows; one wider than the page scrolls."""

    caption: str
    headings: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    style: str = "numbers"


@dataclass(frozen=True)
class Facts:
    """Label, value and a small note of each fact, in large type."""

    entries: Iterable[tuple[str, str, str]]


@dataclass(frozen=True)
class Paragraph:
    """A small paragraph."""

    text: str


@dataclass(frozen=True)
class Sentences:
    """A list of sentences."""

    texts: Sequence[str]
    style: str


@dataclass(frozen=True)
class Legend:
    """The colors of runs or devices; a sticky one stays in sight."""

    runs: Sequence[RunName]
    is_sticky: bool = True


@dataclass(frozen=True)
class Plot:
    """A figure with its caption; `legend` holds the names of the phases it shows."""

    title: str
    note: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Plots:
    """Figures side by side."""

    plots: Sequence[Plot]


@dataclass(frozen=True)
class Tables:
    """Tables side by side."""

    tables: Sequence[Table]


@dataclass(frozen=True)
class Details:
    """A part behind a title that opens it."""

    title: str
    part: Table


Part = Table | Tables | Facts | Paragraph | Sentences | Legend | Plots | PhaseBar | Details


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    parts: Sequence[Part]

    @property
    def anchor(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())


def render_page(
    title: str,
    heading: str,
    sections: Sequence[Section],
    *,
    kind: str = "report",
    source: str = "the run folder",
) -> str:
    """The whole page, in ASCII so that it reads the same in any encoding. Sections without parts are left out."""
    page = TEMPLATES.get_template("page.html.j2").render(
        title=title,
        heading=heading,
        sections=[section for section in sections if section.parts],
        kind=kind,
        source=source,
        version=bertrain.__version__,
    )
    return page.encode("ascii", "xmlcharrefreplace").decode()


def render_panels(plots: Sequence[Plot], legend: Sequence[str] = ()) -> str:
    """An SVG file of two plots side by side; the legend names the lines of both in the order of their colors."""
    return TEMPLATES.get_template("panels.svg.j2").render(
        panels=plots, legend=legend, plot_width=PLOT_WIDTH, plot_height=PLOT_HEIGHT, num_colors=NUM_COLORS
    )
