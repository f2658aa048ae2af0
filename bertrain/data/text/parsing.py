"""Records to documents: the expensive part, which runs in worker processes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple
from xml.etree import ElementTree

from bertrain.base.extras import import_extra
from bertrain.config.choices import Splitter
from bertrain.data.text.documents import LONGEST_LINE, Document
from bertrain.data.text.records import Problem, Record, no_column
from bertrain.data.text.wikipedia import NotAnArticle, article_text, paragraphs_of_extracted, paragraphs_of_wikitext


class Result(NamedTuple):
    """The document of a record, or the reason why there is none; a problem if it is damaged or lost bytes."""

    document: Document
    skipped: str = ""
    problem: Problem | None = None
    lines_not_utf8: int = 0
    name: str = ""  # of the file that lost bytes or was skipped


def parse_records(records: list[Record | Problem], *, splitter: Splitter, language: str) -> list[Result]:
    """The result of each record; never raises: a damaged record becomes a problem."""
    return [_document_of(record, splitter, language) for record in records]


def _document_of(record: Record | Problem, splitter: Splitter, language: str) -> Result:
    if isinstance(record, Problem):
        return Result([], "damaged", record)
    if record.form == "skipped":
        return Result([], str(record.content), name=record.name)
    try:
        paragraphs = _paragraphs_of(record)
    except NotAnArticle as reason:
        return Result([], str(reason))
    except _Unreadable as error:
        return Result([], "damaged", Problem(record.place, str(error)))
    document = split_sentences(paragraphs, splitter=splitter, language=language)
    longest = max((len(sentence.encode()) + 1 for sentence in document), default=0)  # with its newline
    if longest > LONGEST_LINE:
        what = f"contains a sentence of {longest:,} bytes, which is too long; try another --sentences"
        return Result([], "damaged", Problem(record.place, what))
    lost = _lines_not_utf8(record)
    if not lost:
        return Result(document)
    problem = Problem(
        f"line {lost[0]:,} of {record.name}", "has bytes that are not UTF-8, or not in the given --encoding"
    )
    return Result(document, problem=problem, lines_not_utf8=len(lost), name=record.name)


def _lines_not_utf8(record: Record) -> list[int]:
    """The lines that lost bytes; in JSON and XML, invalid UTF-8 makes a record damaged."""
    content = record.content
    if record.form in ("dump", "jsonl") or isinstance(content, str) or content.isascii():
        return []
    lines = enumerate(content.split(b"\n"), record.number)
    return [number for number, line in lines if line.decode(errors="ignore").encode() != line]


def split_sentences(paragraphs: Iterable[str], *, splitter: Splitter, language: str = "en") -> Document:
    """The non-empty sentences of a document, runs of white space reduced to one space.

    "sentencex" (Wikimedia's library) splits each paragraph by the rules and abbreviations of `language` and drops
    sentences without letter or digit; "lines" makes each paragraph one sentence; "none" the whole document.
    """
    # sentencex panics on white space of more than one byte beside an initial, so white space is replaced first.
    squeezed = [text for text in (" ".join(paragraph.split()) for paragraph in paragraphs) if text]
    if splitter == "none":
        return [" ".join(squeezed)] if squeezed else []
    if splitter == "lines":
        return squeezed
    from sentencex import segment

    sentences = (sentence.strip() for text in squeezed for sentence in segment(language, text))
    return [sentence for sentence in sentences if any(map(str.isalnum, sentence))]


class _Unreadable(Exception):
    """A record that does not have the format of its file."""


def _paragraphs_of(record: Record) -> list[str]:
    content = record.content
    if isinstance(content, str):
        return content.split("\n")
    if record.form == "dump":
        return _paragraphs_of_page(record)
    if record.form == "jsonl":
        return _text_of_json(content, record.text_column).split("\n")
    text = content.decode(errors="ignore").removeprefix("\ufeff")  # as BERT's reference reads text
    if record.form == "wikiextractor":
        return paragraphs_of_extracted(text)
    if record.form == "prose":
        blocks = groupby(text.split("\n"), lambda line: bool(line.strip()))
        return [" ".join(lines) for is_text, lines in blocks if is_text]
    return text.split("\n")


def _paragraphs_of_page(record: Record) -> list[str]:
    parser = import_extra("mwparserfromhell.parser")

    assert isinstance(record.content, bytes)
    assert record.wiki is not None
    try:
        return paragraphs_of_wikitext(article_text(record.content, record.wiki), record.wiki)
    except ElementTree.ParseError as error:
        raise _Unreadable(f"is broken XML ({error})") from None
    except parser.ParserError as error:
        raise _Unreadable(f"contains wikitext that cannot be parsed ({error})") from None


def _text_of_json(line: bytes, text_column: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _Unreadable("is not a JSON object")
    if text_column not in row:
        raise _Unreadable(no_column("field", text_column, row, [row]))
    text = row[text_column]
    if text is not None and not isinstance(text, str):
        raise _Unreadable(f"has {type(text).__name__} in {text_column!r}, not text; give --text-column")
    return (text or "").encode("utf-8", errors="replace").decode()  # JSON can contain half of a surrogate pair
