"""The parts of a report's page: text that is safe, tables that can be read aloud, sections to jump to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

import bertrain


class Markup(str):
    """Text that is HTML already; all other text is escaped on its way into the page."""


def safe(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text)


def quiet(text: str) -> str:
    """A small paragraph, or nothing."""
    return f'<p class="quiet">{escape(text)}</p>' if text else ""


def listed(texts: Sequence[str], kind: str) -> str:
    """A list of sentences, or nothing."""
    items = "".join(f"<li>{safe(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{items}</ul>' if texts else ""


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table whose first column names its rows; where it is wider than the page it scrolls by itself."""

    def cells(tag: str, contents: Sequence[str]) -> str:
        return "".join(f"<{tag}>{safe(content)}</{tag[:2]}>" for content in contents)

    body = "".join(f"<tr>{cells('th scope=row', row[:1])}{cells('td', row[1:])}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{cells('th scope=col', headings)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def figures(entries: Iterable[tuple[str, str, str]]) -> str:
    """Label, figure and a small note of each: the head of a page."""
    cells = (
        f"<div><dt>{escape(label)}</dt><dd><b>{escape(value)}</b> <small>{escape(note)}</small></dd></div>"
        for label, value, note in entries
    )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def unfolding(title: str, content: str) -> str:
    """Content behind a title that opens it; no script is needed."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def whole_page(
    title: str, heading: str, sections: Mapping[str, str], *, kind: str = "report", source: str = "the run folder"
) -> str:
    """A page of its own from the contents of its sections, by title; those without content are left out."""
    style = (resources.files("bertrain.reports") / "report.css").read_text(encoding="ascii")
    shown = {name: content for name, content in sections.items() if content}
    links = "".join(f'<li><a href="#{_anchor(name)}">{escape(name)}</a></li>' for name in shown)
    body = "\n".join(
        f'<section id="{_anchor(name)}" aria-labelledby="{_anchor(name)}-title" tabindex="-1">'
        f'<h2 id="{_anchor(name)}-title">{escape(name)}</h2>{content}</section>'
        for name, content in shown.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - bertrain {kind}</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the figures</a>
<header><p>bertrain {kind}</p><h1>{escape(heading)}</h1></header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main id="content" tabindex="-1">
{body}
</main>
<footer>Written by bertrain {escape(bertrain.__version__)} from what {escape(source)} holds.</footer>
</body>
</html>
"""


def _anchor(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())
