"""Units: the parts of a preparation, which processes and machines make in parallel.

They are in a hidden work folder beside the output, named after a hash of arguments and input. Each unit is a part of
the input and becomes a folder of shards, written under a temporary name and renamed when it is complete; an interrupted
preparation keeps finished units. A unit's content depends on the plan alone.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import sync, write_atomically
from bertrain.base.schema import Count, load_json
from bertrain.base.seeds import derive
from bertrain.config.choices import OnError
from bertrain.data.formats.block import Block, Values, in_batches
from bertrain.data.formats.shards import FILE, VOCABULARY
from bertrain.data.formats.write import Histogram, histogram_of, shard_name, write_shard
from bertrain.data.prepare.examples import (
    SINGLE_SPECIAL_TOKENS,
    Pair,
    TokenText,
    block_of_pairs,
    draw_pairs,
    full_sentences,
)
from bertrain.data.prepare.reference import reference_rows
from bertrain.data.text.documents import Span, read_lines
from bertrain.data.text.tokenizer import AnyTokenizer, tokenizer_of
from bertrain.data.text.vocabulary import Vocabulary

PLAN, SUMMARY = "plan.json", "unit.json"
SENTENCES_AT_ONCE, TOKENS_AT_ONCE = 1 << 14, 1 << 22


@dataclass(frozen=True)
class Preparation:
    mode: str  # `pairs`, `full-sentences` or `reference`
    max_seq_length: int
    max_predictions: int
    masked_lm_prob: float
    short_seq_prob: float
    dupe_factor: int
    seed: int
    rows_per_shard: int
    lower_case: bool
    on_error: OnError
    units: list[list[Span]]

    def write(self, work: Path) -> None:
        write_atomically(work / PLAN, json.dumps(asdict(self)))

    @staticmethod
    def read(work: Path) -> Preparation:
        plan: Preparation = load_json(work / PLAN, Preparation)
        return plan


CONTENT = {"files": [FILE], "histogram": dict[str, Count], "counts": dict[str, int]}  # of a summary


@dataclass(frozen=True)
class Summary:
    """A finished unit: its shards as in a manifest, their length histogram, and counts of its text."""

    files: list[dict[str, Any]]
    histogram: Histogram
    counts: Counter[str]

    def write(self, folder: Path) -> None:
        (folder / SUMMARY).write_text(json.dumps(vars(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Summary:
        fields = load_json(folder / SUMMARY, CONTENT)
        histogram = Counter({int(length): count for length, count in fields["histogram"].items()})
        return Summary(fields["files"], histogram, Counter(fields["counts"]))

    @staticmethod
    def find(folder: Path) -> Summary | None:
        """The summary of a unit, or None where it is damaged or missing, for example after a power failure."""
        try:
            return Summary.read(folder)
        except (OSError, ValueError):
            return None

    def is_whole(self, folder: Path) -> bool:
        paths = [(folder / file["name"], file["bytes"]) for file in self.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def unit_folder(work: Path, number: int) -> Path:
    return work / f"unit-{number:06d}"


def make_unit(work_folder: str, number: int) -> int:
    """Make a unit of the plan in `work_folder`, unless it exists; returns its number. Runs in any process."""
    work = Path(work_folder)
    done = unit_folder(work, number)
    if done.is_dir():
        return number
    plan = Preparation.read(work)
    vocabulary, tokenizer = _words(work_folder, plan.lower_case)
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{done.name}-", dir=work))
        _write_unit(partial, plan, number, vocabulary, tokenizer)
        sync(partial)
        partial.rename(done)
    except OSError as error:
        if not done.is_dir():  # another process may have been faster
            raise UserError("unwritable-file", f"cannot write in {work}: {error.strerror or error}") from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return number


@lru_cache(maxsize=1)
def _words(work_folder: str, lower_case: bool) -> tuple[Vocabulary, AnyTokenizer]:
    """The vocabulary, and a tokenizer whose cache is kept from one unit to the next."""
    vocabulary = Vocabulary.load(Path(work_folder) / VOCABULARY, lower_case=lower_case)
    return vocabulary, tokenizer_of(vocabulary)


def _write_unit(folder: Path, plan: Preparation, number: int, vocabulary: Vocabulary, tokenizer: AnyTokenizer) -> None:
    counts: Counter[str] = Counter()
    spool = folder / "spool"
    spool.mkdir()
    files: list[dict[str, Any]] = []
    histogram: Histogram = Counter()
    for block in _unit_rows(plan, number, vocabulary, tokenizer, counts, spool):
        files.append(write_shard(folder / shard_name(len(files)), block))
        histogram += histogram_of(block)
    shutil.rmtree(spool)
    Summary(files, histogram, counts).write(folder)


def _unit_rows(
    plan: Preparation, number: int, vocabulary: Vocabulary, tokenizer: AnyTokenizer, counts: Counter[str], spool: Path
) -> Iterator[Block]:
    as_reference = plan.mode == "reference"
    with open(spool / "text", "w+b") as file:
        text = tokenize(plan.units[number], tokenizer, counts, file, on_error=plan.on_error, as_reference=as_reference)
    _count_text(text, plan, vocabulary.id_of("[UNK]"), counts)
    if not text.num_documents:
        return
    if as_reference:
        yield from reference_rows(text, vocabulary, spool, plan)
        return
    start, separator = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")
    for tokens, pairs in _sources(text, plan, number, tokenizer, separator):
        for batch in in_batches(pairs, plan.rows_per_shard):
            yield block_of_pairs(tokens, batch, start, separator)


def _sources(
    text: TokenText, plan: Preparation, number: int, tokenizer: AnyTokenizer, separator: int
) -> Iterator[tuple[Values, Iterator[Pair]]]:
    """Tokens, and the ranges of them that make rows; each copy of the text has new draws."""
    if plan.mode == "full-sentences":
        for copy in range(plan.dupe_factor):
            seed = derive(plan.seed, "documents", number, copy)
            yield full_sentences(text, separator, max_seq_length=plan.max_seq_length, seed=seed)
        return
    own = text.num_documents
    if own == 1:
        text = _with_partners(text, plan, number, tokenizer)
    pairs = (
        draw_pairs(
            text,
            max_seq_length=plan.max_seq_length,
            short_seq_prob=plan.short_seq_prob,
            seed=plan.seed,
            num_documents=own,
            first_number=(number << 16 | copy) << 32,
        )
        for copy in range(plan.dupe_factor)
    )
    yield text.tokens, chain.from_iterable(pairs)


def _with_partners(text: TokenText, plan: Preparation, number: int, tokenizer: AnyTokenizer) -> TokenText:
    """A unit's only document, followed by those of the next unit that has any, to draw a random B from."""
    for step in range(1, len(plan.units)):
        with tempfile.TemporaryFile() as file:
            spans = plan.units[(number + step) % len(plan.units)]
            others = tokenize(spans, tokenizer, Counter(), file, on_error="skip")
            if others.num_documents:
                shift = len(text.tokens), len(text.sentences) - 1
                return TokenText(
                    np.concatenate([text.tokens, others.tokens]),
                    text.sentences + array("q", (shift[0] + edge for edge in others.sentences[1:])),
                    text.documents + array("q", (shift[1] + edge for edge in others.documents[1:])),
                )
    return text


def tokenize(
    spans: Iterable[Span],
    tokenizer: AnyTokenizer,
    counts: Counter[str],
    file: IO[bytes],
    *,
    on_error: OnError,
    as_reference: bool = False,
) -> TokenText:
    """The tokens of some spans of text, in `file` instead of memory.

    The end of a span ends a document; with `as_reference`, only a blank line does, and carriage returns are dropped.
    Empty sentences and documents are left out.
    """
    sentences, documents = array("q", [0]), array("q", [0])
    waiting: list[bytes] = []
    position = 0

    def end_document() -> None:
        if len(sentences) - 1 > documents[-1]:
            documents.append(len(sentences) - 1)

    for span in spans:
        for line in read_lines(span, counts, on_error=on_error, as_reference=as_reference):
            if not line or line.isspace():
                end_document()
            elif encoded := tokenizer.encode_raw(
                tokenizer.joint + line if len(sentences) - 1 > documents[-1] else line
            ):
                waiting.append(encoded)
                position += len(encoded) // tokenizer.dtype.itemsize
                sentences.append(position)
                if len(waiting) == SENTENCES_AT_ONCE:
                    file.write(b"".join(waiting))
                    waiting.clear()
        if not as_reference:
            end_document()
    end_document()
    file.write(b"".join(waiting))
    file.flush()
    tokens = np.memmap(file, tokenizer.dtype, "r") if position else np.zeros(0, tokenizer.dtype)
    return TokenText(tokens, sentences, documents)


def _count_text(text: TokenText, plan: Preparation, unknown: int, counts: Counter[str]) -> None:
    counts["documents"] += text.num_documents
    counts["sentences"] += len(text.sentences) - 1
    is_long = np.diff(np.frombuffer(text.sentences, np.int64)) > plan.max_seq_length - SINGLE_SPECIAL_TOKENS
    counts["sentences_longer_than_an_example"] += int(np.count_nonzero(is_long))
    counts["tokens"] += len(text.tokens)
    for first in range(0, len(text.tokens), TOKENS_AT_ONCE):
        counts["unknown_tokens"] += int(np.count_nonzero(text.tokens[first : first + TOKENS_AT_ONCE] == unknown))
