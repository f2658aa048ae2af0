"""Looks at a sample of the input: its formats, encoding and language, and what in it is a document.

In bertrain's own form of plain text a line is a sentence and a blank line ends a document. Elsewhere prose is wrapped
at a column, a blank line ends a paragraph, and a file is a document or a whole book; or each line is a document.
"""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bertrain.base.errors import UserError
from bertrain.base.formatting import amount, counted
from bertrain.config.choices import DocumentEnd, Form
from bertrain.data.text.documents import find_inputs
from bertrain.data.text.languages import LANGUAGES, guess_language
from bertrain.data.text.records import Reading, Record, form_of, read_stream, text_column_of
from bertrain.data.text.streams import DAMAGE, Stream, check_encoding, open_streams, recode

SAMPLED_FILES, SAMPLED_BYTES = 64, 1 << 16
TABLES = ("csv", "jsonl", "parquet", "arrow")
SMALL_FILE = 1 << 17  # bytes at the median of files that hold one document each
ARTICLES, LONG_ARTICLE = 20, 1 << 20  # this many files with paragraphs may be larger, as long articles are
_ENDS_SENTENCE = tuple('.!?:;…。！？"”»)')
_SENTENCE_WITHIN = re.compile(r"[.!?…][\"”»')\]]*\s+\S|[。！？].")
_DOCUMENTS = {
    "blank-line": "a blank line ends a document",
    "file": "each file is one document, or several if it has more than 16 MiB",
    "line": "each line is one document",
    "size": "a document ends at the first blank line after 8 kB",
}


@dataclass(frozen=True)
class Survey:
    """What the input looks like, by a sample of it."""

    files: int
    bytes: int
    forms: dict[str, int]  # sampled files by format; "" for those that are not text
    encoding: str  # of plain text; "" if it is none of UTF-8, UTF-16 and the given one
    document_end: DocumentEnd
    why: str  # the reason for document_end
    wrapped: bool
    language: str  # its code, or "" if it is not recognized
    text_columns: tuple[str, ...] = ()  # of sampled tables

    @property
    def sentences(self) -> list[str]:
        forms = ", ".join({"text": "plain text"}.get(form, form) for form in self.forms if form)
        forms += " (files that are not text are left out)" if forms and "" in self.forms else ""
        forms = forms or ("not text" if self.forms else "")
        files = f"{counted(self.files, 'file')}, {amount(self.bytes, 'B')}"
        facts = [f"{files}: {forms}" if forms else files, LANGUAGES.get(self.language, "")]
        if set(self.text_columns) - {"text"}:
            facts.append(f"the text is in {', '.join(map(repr, self.text_columns))} (--text-column)")
        if "text" not in self.forms:
            return ["; ".join(filter(None, facts))]
        facts.append(self.encoding.upper() or "neither UTF-8 nor UTF-16")
        lines = "wrapped lines are joined" if self.wrapped else "lines are not joined"
        how = f"{_DOCUMENTS[self.document_end]} ({self.why}); {lines}"
        return ["; ".join(filter(None, facts)), how]


class Sample(NamedTuple):
    """The beginning of a file, or of a member of an archive, and the size of it all as far as that is known."""

    form: str
    text: str
    encoding: str
    size: int
    text_column: str = ""  # of a table


def survey(
    inputs: Iterable[str | Path], *, form: Form = "auto", encoding: str = "auto", text_column: str = "auto"
) -> Survey:
    """Look at a bounded sample of files or folders of text, before `extract` reads them whole."""
    check_encoding(encoding)
    files = find_inputs(inputs)
    strided = (files[number * len(files) // SAMPLED_FILES] for number in range(SAMPLED_FILES))
    of_each_kind = islice({path.suffix: path for path in reversed(files)}.values(), SAMPLED_FILES)
    chosen = dict.fromkeys([*strided, *of_each_kind])
    reading = Reading(form, encoding, text_column)
    samples: list[Sample] = []
    for path in chosen:
        with suppress(UserError, *DAMAGE):  # `extract` says what cannot be read
            for stream in islice(open_streams(path, lambda _: None), SAMPLED_FILES):
                samples.append(_sample(recode(stream, encoding), reading, path.stat().st_size))
    texts = [sample for sample in samples if sample.form == "text"]
    end, wrapped, why = document_form(texts)
    codings = Counter(sample.encoding for sample in texts)
    return Survey(
        files=len(files),
        bytes=sum(path.stat().st_size for path in files),
        forms=dict(Counter(sample.form for sample in samples).most_common()),
        encoding="" if "" in codings else max(codings, key=codings.__getitem__, default="utf-8"),
        document_end=end,
        why=why,
        wrapped=wrapped,
        language=guess_language([sample.text for sample in samples]),
        text_columns=tuple(sorted({sample.text_column for sample in samples if sample.text_column})),
    )


def _sample(stream: Stream, reading: Reading, size: int) -> Sample:
    form, head = form_of(stream, reading.form), stream.bytes.peek(SAMPLED_BYTES)
    size = size if stream.path else len(head)
    column = text_column_of(stream, form, reading.text_column) if form in TABLES else ""
    if form != "text":
        records = islice(read_stream(stream, reading, skip_binary=True), 20) if form else ()
        texts = (record.content for record in records if isinstance(record, Record))
        head = b"\n".join(text.encode() if isinstance(text, str) else text for text in texts)
    head = head[:SAMPLED_BYTES]
    try:
        text, _ = codecs.utf_8_decode(head, "strict", len(head) < SAMPLED_BYTES)
        return Sample(form, text, stream.encoding, size, column)
    except UnicodeDecodeError:
        return Sample(form, head.decode(errors="ignore"), "", size, column)


def document_form(samples: list[Sample]) -> tuple[DocumentEnd, bool, str]:
    """What ends a document in these plain texts, whether their lines are wrapped, and the reason."""
    texts = [[line.rstrip() for line in sample.text.split("\n")] for sample in samples]
    lines = [line for text in texts for line in text if line]
    blocks = [block for sample in samples for block in re.split(r"\n\s*\n", sample.text) if block.strip()]
    typical = median(sample.size for sample in samples) if len(samples) > 1 else math.inf
    files = "a file" if math.isinf(typical) else f"files of about {amount(typical, 'B')}"
    are_articles = typical <= SMALL_FILE or (typical <= LONG_ARTICLE and len(samples) >= ARTICLES)
    if _are_wrapped(texts):
        return ("file" if are_articles or len(samples) >= 50 else "size"), True, f"{files}, of wrapped prose"
    if len(blocks) <= len(samples):  # no blank lines
        are_long = [len(line) >= 400 or len(_SENTENCE_WITHIN.findall(line)) >= 2 for line in lines]
        are_many = len(lines) >= 50 or any(sample.size > SAMPLED_BYTES for sample in samples)
        has_documents = are_many and sum(are_long) > len(lines) / 2
        end: DocumentEnd = "file" if typical <= SMALL_FILE else "line" if has_documents else "size"
        return end, False, f"{files}, of {'long ' if has_documents else ''}lines without blank lines between them"
    if sum("\n" not in block.strip() for block in blocks) <= len(blocks) / 2:
        return "blank-line", False, "several lines stand between two blank lines"
    why = f"{files}, of paragraphs with blank lines between them"
    return ("file" if are_articles else "blank-line"), False, why


def _are_wrapped(texts: list[list[str]]) -> bool:
    """Whether many lines end within a sentence, just before the word that would reach a column."""
    breaks = wrapped = sentences = 0
    for lines in texts:
        widths = sorted(len(line) for line in lines if line)
        column = widths[len(widths) * 9 // 10] if widths else 0
        pairs = [(line, after.split()[0]) for line, after in pairwise(lines) if line.strip() and after.strip()]
        breaks += len(pairs)
        sentences += sum(bool(_SENTENCE_WITHIN.search(line)) for line in lines)
        if 30 <= column <= 200:
            before = (line for line, word in pairs if len(line) + len(word) >= 0.9 * column)
            wrapped += sum(not line.endswith(_ENDS_SENTENCE) for line in before)
    return breaks >= 8 and wrapped > 0.25 * breaks and sentences > 0.05 * breaks
