"""Renders pages and plots with the templates in this folder, which hold all HTML and escape every text.

A part of a page is the result of a macro of parts.html.j2, such as `parts.table(caption, headings, rows)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import bertrain
from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically, writing

NUM_COLORS = 8  # --run-0 to --run-7 in colors.css
PLOT_WIDTH, PLOT_HEIGHT = 400, 230  # in CSS pixels, before the page scales it
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent, encoding="ascii"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals["num_colors"] = NUM_COLORS
parts: Any = TEMPLATES.get_template("parts.html.j2").module


@dataclass(frozen=True)
class Plot:
    """A figure with its caption; `legend` holds the names of the phases it shows."""

    title: str
    note: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()


def render_page(
    title: str,
    heading: str,
    sections: Mapping[str, Sequence[Markup]],
    *,
    kind: str = "report",
    source: str = "the run folder",
    refresh_s: float = 0.0,
) -> str:
    """The whole page, in ASCII so that it reads the same in any encoding. Sections without content are left out.

    With `refresh_s`, which needs a server, a script asks for the page again and again.
    """
    contents = {name: "\n".join(filter(None, (part.strip() for part in found))) for name, found in sections.items()}
    words = {"title": title, "heading": heading, "kind": kind, "source": source, "version": bertrain.__version__}
    filled = {name: Markup(content) for name, content in contents.items() if content}
    page = TEMPLATES.get_template("page.html.j2").render(sections=filled, refresh_s=refresh_s, **words)
    return page.encode("ascii", "xmlcharrefreplace").decode()


def render_panels(plots: Sequence[Plot], legend: Sequence[str] = ()) -> str:
    """An SVG file of two plots side by side; the legend names the lines of both in the order of their colors."""
    return TEMPLATES.get_template("panels.svg.j2").render(
        panels=plots, legend=legend, plot_width=PLOT_WIDTH, plot_height=PLOT_HEIGHT
    )


def page_path(out: str | Path | None, default: Path) -> Path:
    """The path of a page. Raises UserError if it is a folder."""
    path = Path(out) if out is not None else default
    if path.is_dir():
        raise UserError("out-is-folder", f"cannot write the report to {path}, which is a folder; name a file")
    return path


def write_page(path: Path, text: str, what: str = "report") -> None:
    """Write a page, a file beside it, or a plot. Raises UserError if that fails."""
    with writing(f"the {what} {path}"):
        write_atomically(path, text)


def check_plot(path: str | Path) -> Path:
    """The path of a plot. Raises UserError unless it ends in .svg."""
    if Path(path).suffix != ".svg":
        raise UserError("plot-not-svg", f"--plot draws an SVG; give its file a name that ends in .svg, not {path}")
    return Path(path)
