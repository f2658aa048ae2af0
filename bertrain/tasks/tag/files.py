"""Read sentences and the tags of their words: CoNLL, JSON lines with spans of characters, and `datasets`.

- CoNLL: a word per line, its tag in the last column, tabs or spaces between columns; a blank line ends a sentence. A
  file of one column has no tags.
- JSON lines, Parquet and Arrow: lists `tokens` and `ner_tags`; or `text`, and `spans` with start, end and label.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertrain.base.errors import UserError
from bertrain.base.files import is_valid_text
from bertrain.base.formatting import counted
from bertrain.config.settings import TaskSettings
from bertrain.data.text.records import Problem, listed
from bertrain.tasks.classify import STEMS
from bertrain.tasks.tables import BadRows, format_of, read_lines, read_objects
from bertrain.tasks.tag.schemes import IS_PREFIXED, OUTSIDE, Entity, Scheme, has_prefixes

WNUT_STEMS = {"train": "wnut17train", "dev": "emerging.dev", "test": "emerging.test"}
TAG_STEMS = {split: (*stems, WNUT_STEMS[split]) for split, stems in STEMS.items()}  # WNUT 17 has its own file names
TAG_FORMATS = frozenset({"conll", "tsv", "jsonl", "parquet", "arrow"})
DOCUMENT_START = "-DOCSTART-"
WORDS, TAGS = ("tokens", "words", "text"), ("ner_tags", "tags", "labels", "spans", "entities")  # columns, by preference
MARK = "\u0301"  # stands for every mark and joiner where words are found: Python's \w has none of them
JOINERS = "\u200c\u200d"
SPLIT_SIGNS = re.compile(rf"\w[\w{MARK}]*|[^\w\s]{MARK}*").finditer
SPLIT_SPACES = re.compile(rf"\w(?:\S*[\w{MARK}])?\.?|[^\w\s]{MARK}*").finditer
IS_INITIALS = re.compile(r"(?:[^\W\d_]\.){2,}").fullmatch
BIO = Scheme("BIO")
TextSplit = Literal["punctuation", "spaces"]


@dataclass(frozen=True)
class Sentence:
    """A sentence or a longer text, and the tag of each of its words; None where they are to be predicted."""

    text: str
    words: list[str]
    starts: list[int]  # index of each word's first character
    tags: list[str] | None
    place: str = ""  # its file and line, for messages
    is_of_words: bool = False  # whether its words were given, not found in its text

    @staticmethod
    def of_words(words: Sequence[str], tags: list[str] | None, place: str) -> Sentence:
        """A sentence whose text is its words with a space between them."""
        starts, start = [], 0
        for word in words:
            starts.append(start)
            start += len(word) + 1
        return Sentence(" ".join(words), list(words), starts, tags, place, is_of_words=True)

    @staticmethod
    def of_text(
        text: str, spans: Sequence[Span] | None = None, place: str = "", split: TextSplit = "punctuation"
    ) -> Sentence:
        """A text split into words and punctuation marks, and where a span begins or ends within a word."""
        cuts = sorted({cut for span in spans or () for cut in (span.start, span.end)})
        words, starts = [], []
        for first, stop in _split(text, split):
            inside = [cut for cut in cuts if first < cut < stop]
            for start, end in pairwise([first, *inside, stop]):
                words.append(text[start:end])
                starts.append(start)
        if not words:
            raise ValueError("has an empty text")
        return Sentence(text, words, starts, None if spans is None else _tags_of(spans, words, starts), place)

    def span_of(self, entity: Entity) -> tuple[int, int]:
        """The range of characters of some words."""
        last = entity.stop - 1
        return self.starts[entity.first], self.starts[last] + len(self.words[last])


def _split(text: str, split: TextSplit) -> Iterator[tuple[int, int]]:
    """The ranges of words and punctuation marks, each with its accents and vowel signs (Hindi, Thai).

    At spaces, the words are about those of CoNLL's files: Ada-Lou, O'Brien, U.S., and Ada 's.
    """
    plain = text if text.isascii() else "".join(MARK if _is_mark(sign) else sign for sign in text)
    if split == "punctuation":
        yield from (found.span() for found in SPLIT_SIGNS(plain))
        return
    for found in SPLIT_SPACES(plain):
        word = found.group() if IS_INITIALS(found.group()) else found.group().rstrip(".") or "."
        stop = found.start() + len(word)
        cuts = {found.start(), stop, found.end()}
        if len(word) > 2 and word.endswith(("'s", "\u2019s")):
            cuts.add(stop - 2)
        yield from pairwise(sorted(cuts))


def _is_mark(sign: str) -> bool:
    return sign in JOINERS or unicodedata.category(sign)[0] == "M"


class Span(NamedTuple):
    """Characters start .. end - 1 of a text."""

    start: int
    end: int
    label: str


def _tags_of(spans: Sequence[Span], words: Sequence[str], starts: Sequence[int]) -> list[str]:
    entities, ends = [], [start + len(word) for start, word in zip(starts, words, strict=True)]
    for span in spans:
        entity = Entity(span.label, bisect_right(ends, span.start), bisect_left(starts, span.end))
        if entity.first >= entity.stop:
            raise ValueError(f"has the span {span.start}:{span.end} of nothing but space")
        entities.append(entity)
    return BIO.write(entities, len(words))


def read_sentences(
    files: Sequence[Path], settings: TaskSettings, bad_rows: BadRows, split: TextSplit = "punctuation"
) -> list[Sentence]:
    """The sentences of some files, either all with tags or all without; texts are split as `split` says."""
    found: list[Sentence] = []
    for path in files:
        read = _read_conll if format_of(path) in ("conll", "tsv") else _read_records
        for one in read(path, settings, split):
            if isinstance(one, Problem):
                bad_rows.add(one)
            elif found and (one.tags is None) != (found[0].tags is None):
                missing, has = (one, found[0]) if one.tags is None else (found[0], one)
                bad_rows.add(Problem(missing.place, f"has no tags, but {has.place} has"))
            else:
                found.append(one)
    if not (usable := _without_mixed_tags(found, bad_rows)):
        raise bad_rows.nothing_usable(files, "sentence")
    return usable


def _without_mixed_tags(sentences: list[Sentence], bad_rows: BadRows) -> list[Sentence]:
    """Where some tags have prefixes, drop sentences with one that has none."""
    if not has_prefixes(sentence.tags or () for sentence in sentences):
        return sentences
    usable = []
    for sentence in sentences:
        wrong = next((tag for tag in sentence.tags or () if tag != OUTSIDE and not IS_PREFIXED(tag)), None)
        if wrong is None:
            usable.append(sentence)
        else:
            is_empty = wrong[1:] == "-"
            lack = "without a type after its prefix" if is_empty else "without a prefix like B- that others have"
            bad_rows.add(Problem(sentence.place, f"has the tag {wrong!r}, {lack}"))
    return usable


# --- CoNLL ----------------------------------------------------------------------------------------------------


def _read_conll(path: Path, settings: TaskSettings, split: TextSplit) -> Iterator[Sentence | Problem]:
    num_columns = 0
    for lines in _paragraphs(path):
        words, tags, problem = [], [], None
        for place, line in lines:
            if isinstance(line, Problem):
                problem = problem or line
                continue
            fields = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))
            num_columns = num_columns or len(fields)
            if len(fields) != num_columns:
                what = f"has {counted(len(fields), 'column')}, where the first line has {num_columns}"
                problem = problem or Problem(place, what)
            elif not fields[0].strip() or not fields[-1].strip():
                problem = problem or Problem(place, "has no word" if not fields[0].strip() else "has no tag")
            else:
                words.append(fields[0].strip())
                tags.append(fields[-1].strip())
        yield problem or Sentence.of_words(words, tags if num_columns > 1 else None, lines[0][0])


def _paragraphs(path: Path) -> Iterator[list[tuple[str, str | Problem]]]:
    """The lines between blank ones, each with its place; a line of -DOCSTART- counts as blank."""
    for is_blank, lines in groupby(read_lines(path), _is_blank):
        if not is_blank:
            yield list(lines)


def _is_blank(placed: tuple[str, str | Problem]) -> bool:
    line = placed[1]
    return isinstance(line, str) and (not line.strip() or line.split(maxsplit=1)[0] == DOCUMENT_START)


# --- JSON lines, Parquet and Arrow ----------------------------------------------------------------------------


def _read_records(path: Path, settings: TaskSettings, split: TextSplit) -> Iterator[Sentence | Problem]:
    # Columns named in the settings replace those that are looked for.
    wanted = (settings.text,) if settings.text != "text" else WORDS
    labels = (settings.label,) if settings.label != "label" else TAGS
    of_words, of_tags = "", ""

    def choose(names: list[str]) -> list[str]:
        nonlocal of_words, of_tags
        of_words = next((name for name in wanted if name in names), "")
        of_tags = next((name for name in labels if name in names), "")
        if not of_words or (not of_tags and settings.label != "label"):
            missing = " or ".join(map(repr, labels if of_words else wanted))
            columns = f"its columns are {listed(names)}; name yours with --task.text and --task.label"
            raise UserError("missing-column", f"{path} has no column {missing}; {columns}")
        return [name for name in (of_words, of_tags) if name]

    for place, record in read_objects(path, choose):
        late = () if of_tags or isinstance(record, Problem) else [name for name in labels if name in record]
        if late:
            yield Problem(place, f"has {late[0]!r}, but the first line has not; write an empty list where none applies")
            continue
        try:
            yield record if isinstance(record, Problem) else _parse_record(record, of_words, of_tags, place, split)
        except ValueError as error:
            yield Problem(place, str(error))


def _parse_record(record: dict[str, Any], of_words: str, of_tags: str, place: str, split: TextSplit) -> Sentence:
    words, tags = record.get(of_words), record.get(of_tags) if of_tags else None
    if of_tags and not isinstance(tags, list):
        raise ValueError(f"has no list {of_tags!r}")
    if isinstance(words, str):
        _check_text(words)
        return Sentence.of_text(words, None if tags is None else parse_spans(tags, words), place, split)
    if not isinstance(words, list) or not words:
        raise ValueError(f"has neither words nor a text in {of_words!r}")
    if not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"has an item in {of_words!r} that is not a word")
    if tags is not None:
        if len(tags) != len(words):
            raise ValueError(f"has {counted(len(words), 'word')} and {counted(len(tags), 'tag')}")
        if any(isinstance(tag, int) for tag in tags):
            raise ValueError(f"has numbers in {of_tags!r}, and its file no names for them; write names, such as B-PER")
        if wrong := [place for place, tag in enumerate(tags, start=1) if not (isinstance(tag, str) and tag.strip())]:
            raise ValueError(f"{of_tags!r} has no tag for word {wrong[0]}")
    for text in (*words, *(tags or ())):
        _check_text(text)
    return Sentence.of_words(words, tags, place)


def _check_text(text: str) -> None:
    if not is_valid_text(text):
        raise ValueError("has invalid Unicode (a lone surrogate)")


def parse_spans(spans: list[Any], text: str) -> list[Span]:
    """Spans of a text in its order; refuses those that overlap, or reach beyond it."""
    found = []
    for span in spans:
        fields: dict[str, Any] = span if isinstance(span, dict) else {}
        start, end, label = (fields.get(name, "") for name in Span._fields)
        if not (type(start) is int and type(end) is int and isinstance(label, str) and label.strip()):
            raise ValueError('has a span that is not {"start": 0, "end": 5, "label": "person"}')
        if not 0 <= start < end <= len(text):
            raise ValueError(f"has the span {start}:{end} outside its text of {counted(len(text), 'character')}")
        _check_text(label)
        found.append(Span(start, end, label.strip()))
    found.sort()
    for before, after in pairwise(found):
        if after.start < before.end:
            pair = f"{before.start}:{before.end} and {after.start}:{after.end}"
            raise ValueError(f"has overlapping spans, {pair}; a word has one tag")
    return found
