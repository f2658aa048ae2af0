"""Records to documents: what costs time, and can be done in any process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple
from xml.etree import ElementTree

from bertrain.data.choices import Splitter
from bertrain.data.records import Problem, Record
from bertrain.data.sentences import split_sentences
from bertrain.data.text import Document
from bertrain.data.wikipedia import NotAnArticle, article_text, paragraphs_of_extracted, paragraphs_of_wikitext


class Result(NamedTuple):
    """What became of a record: a document, or the reason why there is none."""

    document: Document
    skipped: str = ""
    problem: Problem | None = None


def parse_records(
    records: list[Record | Problem], *, text_column: str, splitter: Splitter, language: str
) -> list[Result]:
    """What becomes of each record; never raises, a damaged one comes back as its problem."""
    return [_document_of(record, text_column, splitter, language) for record in records]


def _document_of(record: Record | Problem, text_column: str, splitter: Splitter, language: str) -> Result:
    if isinstance(record, Problem):
        return Result([], "damaged", record)
    try:
        paragraphs = _paragraphs_of(record, text_column)
    except NotAnArticle as what:
        return Result([], str(what))
    except _Unreadable as error:
        return Result([], "damaged", Problem(record.place, str(error)))
    return Result(split_sentences(paragraphs, splitter=splitter, language=language))


class _Unreadable(Exception):
    """A record that does not hold what its form promises."""


def _paragraphs_of(record: Record, text_column: str) -> list[str]:
    content = record.content
    if isinstance(content, str):
        return content.split("\n")
    if record.form == "dump":
        return _paragraphs_of_page(record)
    if record.form == "jsonl":
        return _text_of_json(content, text_column).split("\n")
    # Bytes that are not UTF-8 become U+FFFD, which BERT's text cleaning then drops.
    text = content.decode("utf-8", errors="replace").removeprefix("\ufeff")
    if record.form == "wikiextractor":
        return paragraphs_of_extracted(text)
    if record.form == "prose":
        return [" ".join(lines) for lines in _paragraphs_of_lines(text.split("\n"))]
    return text.split("\n")


def _paragraphs_of_page(record: Record) -> list[str]:
    from mwparserfromhell.parser import ParserError

    assert isinstance(record.content, bytes)
    assert record.wiki is not None
    try:
        return paragraphs_of_wikitext(article_text(record.content, record.wiki), record.wiki)
    except ElementTree.ParseError as error:
        raise _Unreadable(f"is broken XML ({error})") from None
    except ParserError as error:
        raise _Unreadable(f"holds wikitext that cannot be parsed ({error})") from None


def _text_of_json(line: bytes, text_column: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _Unreadable("is not a JSON object")
    if text_column not in row:
        fields = ", ".join(map(repr, list(row)[:8])) or "no field at all"
        raise _Unreadable(f"has no field {text_column!r} but {fields}; give --text-column")
    text = row[text_column]
    if text is not None and not isinstance(text, str):
        raise _Unreadable(f"has {type(text).__name__} in {text_column!r}, not text; give --text-column")
    return (text or "").encode("utf-8", errors="replace").decode()  # JSON can name half of a surrogate pair


def _paragraphs_of_lines(lines: list[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []
