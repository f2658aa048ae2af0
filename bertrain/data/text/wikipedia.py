"""Wikipedia articles to paragraphs: pages of a MediaWiki dump, and output of WikiExtractor.

Only running text is kept. Tables, templates, references, images, categories, headings and lists are dropped, as in the
text that BERT was trained on.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from xml.etree import ElementTree

ARTICLES = 0
FILES, CATEGORIES, MEDIA = 6, 14, -2


class NotAnArticle(Exception):
    """A page that is skipped; the argument says why."""


@dataclass(frozen=True)
class Wiki:
    """A wiki as the header of its dump describes it: names of its namespaces, in lower case."""

    namespaces: frozenset[str]
    unprinted: frozenset[str]  # namespaces whose links show nothing, or a picture, in the text
    has_header: bool

    @staticmethod
    def from_header(header: bytes) -> Wiki:
        text = header.decode("utf-8", errors="replace")
        found = re.findall(r'<namespace key="(-?\d+)"[^>]*>([^<]+)</namespace>', text)
        names = {html.unescape(name).lower(): int(key) for key, name in found if int(key) != ARTICLES}
        unprinted = {name for name, key in names.items() if key in (FILES, CATEGORIES, MEDIA)}
        return Wiki(frozenset(names), frozenset(unprinted) | _UNPRINTED, "<mediawiki" in text)


_UNPRINTED = frozenset({"file", "image", "category", "media"})  # every wiki has these besides its own names
_LANGUAGE_LINK = re.compile(r"[a-z]{2,3}(-[a-z-]+)?|simple")


def article_text(page: bytes, wiki: Wiki) -> str:
    """The wikitext of a page's last revision. Raises NotAnArticle, or ElementTree.ParseError for invalid XML."""
    root = ElementTree.fromstring(b"<page>" + page + b"</page>")
    title = root.findtext("title") or ""
    namespace = root.findtext("ns")  # old dumps have only the title's prefix
    prefix = title.partition(":")[0].lower() if ":" in title else ""
    if (namespace != str(ARTICLES)) if namespace is not None else (prefix in wiki.namespaces):
        raise NotAnArticle("other namespace")
    text = ""
    for revision in root.iterfind("revision"):
        if revision.findtext("model") not in (None, "wikitext"):
            raise NotAnArticle("other namespace")
        text = revision.findtext("text") or ""
    if root.find("redirect") is not None or text.lstrip()[:9].lower() == "#redirect":
        raise NotAnArticle("redirect")
    return text


# fmt: off
_DROPPED_TAGS = frozenset([
    "ref", "references", "table", "gallery", "imagemap", "timeline", "graph", "mapframe", "maplink", "indicator",
    "math", "chem", "ce", "score", "hiero", "syntaxhighlight", "source", "code", "pre", "style", "script",
    "templatestyles", "ul", "ol", "dl", "div", "center", "noinclude", "includeonly",
])
# fmt: on
_BLOCK_TAGS = frozenset(["p", "blockquote", "poem"])
_LIST_MARKS = frozenset(["li", "dd", "dt", "hr"])
_LIST_LINE = "\0"  # replaces the mark of a list item; XML text cannot contain it

_PREFORMATTED = re.compile(r"\n +(?=\S)")  # a line that begins with a space is preformatted: code, diagrams

_LEFT_OVER = re.compile(r"'{2,}|__[A-Z]+__|\[\[|\]\]|</?[A-Za-z][^<>]*>")
_UNBALANCED = re.compile(r"^[|!]|\{\{|\}\}|\{\||\|\}")
_EMPTY_BRACKETS = re.compile(r"\s*[(\[][\s,;:]*[)\]]")
_BEGINS_WITH_COMMA = re.compile(r"\(\s*[,;:]\s*")
_SPACE_BEFORE_MARK = re.compile(r"\s+([,.;:])(?=\s|$)")


_TAG = re.compile(r"<(/?)([A-Za-z]\w*)[^<>]*?(/?)(>|(?=<)|$)")
MAX_WORK = 10**7  # open marks times characters: some seconds


def _refuse_open_marks(wikitext: str) -> None:
    """Refuse what takes the parser minutes: it searches the whole rest for the end of each tag, link and comment."""
    from mwparserfromhell.definitions import SINGLE

    opened: Counter[str] = Counter()
    for is_end, name, is_single, end in _TAG.findall(wikitext):
        if not end:
            opened[""] += 4  # the slowest of all
        elif not is_single and name.lower() not in SINGLE:
            opened[name.lower()] += -1 if is_end else 1
    for begin, end in (("[", "]"), ("<!--", "-->")):
        opened[begin] = wikitext.count(begin) - wikitext.count(end)
    if sum(count for count in opened.values() if count > 0) * len(wikitext) > 4 * MAX_WORK:
        raise NotAnArticle("unclosed marks")


def paragraphs_of_wikitext(wikitext: str, wiki: Wiki) -> list[str]:
    """The paragraphs of an article; raises NotAnArticle, or mwparserfromhell's ParserError."""
    import mwparserfromhell

    _refuse_open_marks(wikitext)
    pieces: list[str] = []
    _render(mwparserfromhell.parse(wikitext, skip_style_tags=True), wiki, pieces)
    blocks = groupby("".join(pieces).split("\n"), _is_text)
    paragraphs = (_tidy(" ".join(lines)) for is_text, lines in blocks if is_text)
    return [paragraph for paragraph in paragraphs if paragraph]


def _is_text(line: str) -> bool:
    return bool(line.strip()) and _LIST_LINE not in line and not _UNBALANCED.search(line)


def _render(code: Any, wiki: Wiki, pieces: list[str]) -> None:
    from mwparserfromhell import nodes

    for node in code.nodes:
        if isinstance(node, nodes.Text):
            pieces.append(_PREFORMATTED.sub("\n" + _LIST_LINE, node.value))
        elif isinstance(node, nodes.Wikilink):
            _render_link(node, wiki, pieces)
        elif isinstance(node, nodes.Tag):
            _render_tag(node, wiki, pieces)
        elif isinstance(node, nodes.HTMLEntity):
            character = str(node.normalize())
            pieces.append("" if "\ud800" <= character <= "\udfff" else character)  # half of a surrogate pair
        elif isinstance(node, nodes.ExternalLink):
            if node.brackets and node.title is not None:
                _render(node.title, wiki, pieces)
        elif isinstance(node, nodes.Heading):
            pieces.append("\n\n")
        elif isinstance(node, nodes.Template):
            _render_template(node, wiki, pieces)


def _render_link(node: Any, wiki: Wiki, pieces: list[str]) -> None:
    title = str(node.title).strip()
    prefix = title.partition(":")[0].strip().lower() if ":" in title else ""
    if prefix in wiki.unprinted or (prefix and node.text is None and _LANGUAGE_LINK.fullmatch(prefix)):
        return
    if node.text is None:
        pieces.append(title.removeprefix(":"))
    else:
        _render(node.text, wiki, pieces)


def _render_tag(node: Any, wiki: Wiki, pieces: list[str]) -> None:
    tag = str(node.tag).strip().lower()
    if tag in _LIST_MARKS:
        pieces.append(_LIST_LINE)
    elif tag in _DROPPED_TAGS:
        pieces.append("\n\n" if tag == "table" else "")
    elif tag == "br":
        pieces.append(" ")
    elif node.contents is not None:
        edge = "\n\n" if tag in _BLOCK_TAGS else ""
        pieces.append(edge)
        _render(node.contents, wiki, pieces)
        pieces.append(edge)


_INLINE_TEMPLATES = {"lang": ("2",), "nowrap": ("1",), "nobr": ("1",), "convert": ("1", "2"), "cvt": ("1", "2")}
"""Templates within sentences, and the arguments that they display; all others are dropped."""


def _render_template(node: Any, wiki: Wiki, pieces: list[str]) -> None:
    wanted = _INLINE_TEMPLATES.get(str(node.name).strip().lower(), ())
    for position, name in enumerate(wanted):
        if node.has(name):
            pieces.append(" " if position else "")
            _render(node.get(name).value, wiki, pieces)


def _tidy(paragraph: str) -> str:
    """Remove left-over markup, and the empty brackets that removed templates leave."""
    text = _LEFT_OVER.sub("", paragraph)
    text = _BEGINS_WITH_COMMA.sub("(", _EMPTY_BRACKETS.sub("", text))
    return " ".join(_SPACE_BEFORE_MARK.sub(r"\1", text).split())


_TITLE = re.compile(r'title="([^"]*)"')


def paragraphs_of_extracted(document: str) -> list[str]:
    """The lines of a <doc> block without tag, title and left-over markup."""
    head, *lines = document.split("\n")
    title = _TITLE.search(head)
    if lines and title and lines[0].strip() == html.unescape(title.group(1)).strip():
        del lines[0]
    return list(map(_tidy, lines))
