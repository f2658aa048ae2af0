"""Questions and paragraphs to what the model reads: [CLS] question [SEP] window of the paragraph [SEP].

A paragraph that does not fit is shown in several windows, each `doc_stride` tokens after the one before. A token knows
the characters it was made of, so an answer is always a slice of the paragraph as it was written.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bertrain.data.formats.block import Block, Values, flat_ranges, offsets_of
from bertrain.data.formats.masking import Ints
from bertrain.data.text.tokenizer import build_pipeline
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.squad.files import Collection

TEXTS_AT_ONCE = 1000  # the tokenizer's own objects take a few hundred bytes for each token
SPECIAL_TOKENS = 3  # [CLS] and two [SEP]


@dataclass(frozen=True)
class Texts:
    """Texts as numbers, one after another: those of text i from offsets[i] on, and the characters of each token."""

    tokens: Values
    offsets: Ints
    begins: Ints  # characters of its text; never falling within a text
    ends: Ints

    @property
    def counts(self) -> Ints:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Windows:
    """What the model reads, in a Block, and where it came from. The windows of a question follow one another."""

    block: Block
    question: Ints  # of each window
    context: Ints
    first: Ints  # the token of the paragraph that the window begins with
    counts: Ints  # tokens of the paragraph in the window
    paragraphs: Texts

    @cached_property
    def has_most_context(self) -> np.ndarray:
        """For each token of the Block, whether it belongs to the paragraph, and no window of its question shows more
        around it: on its poorer side, and, where that is equal, in length; the first of equal windows."""
        places = flat_ranges(self.block.segment_b.astype(np.int64) + self.block.offsets[:-1], self.counts)
        window = np.repeat(np.arange(len(self.counts)), self.counts)
        left = flat_ranges(np.zeros_like(self.counts), self.counts)
        right = self.counts[window] - 1 - left
        score = np.minimum(left, right) + 0.01 * self.counts[window]
        # Each token of each question's paragraph has a number, under which the best window so far is kept.
        shown = np.bincount(self.question, minlength=1)
        lengths = np.zeros(len(shown), np.int64)
        lengths[self.question] = self.paragraphs.counts[self.context]
        number = offsets_of(lengths)[self.question[window]] + self.first[window] + left
        best, owner = np.full(lengths.sum(), -1.0), np.full(lengths.sum(), -1)
        rank = (np.arange(len(self.question)) - offsets_of(shown)[self.question])[window]
        for turn in range(shown.max(initial=0)):
            (mine,) = np.nonzero(rank == turn)
            (better,) = np.nonzero(score[mine] > best[number[mine]])
            better = mine[better]
            best[number[better]] = score[better]
            owner[number[better]] = window[better]
        most = np.zeros(len(self.block.tokens), bool)
        most[places[owner[number] == window]] = True
        return most


def tokenize(texts: Sequence[str], vocabulary: Vocabulary) -> Texts:
    """The word pieces of each text and the characters they stand for, as Hugging Face's tokenizers find them."""
    pipeline = build_pipeline(vocabulary)
    counts, tokens, characters = [], [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        some = texts[first : first + TEXTS_AT_ONCE]
        for text, encoding in zip(some, pipeline.encode_batch(some, add_special_tokens=False), strict=True):
            counts.append(len(encoding.ids))
            tokens.append(np.array(encoding.ids, np.int64))
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            if not text.isascii():
                spans[:, 1] = [_with_accents(text, end) for end in spans[:, 1].tolist()]
            characters.append(spans)
    spans = np.concatenate(characters)
    flat = np.concatenate(tokens).astype(vocabulary.dtype)
    return Texts(flat, offsets_of(np.array(counts, np.int64)), spans[:, 0], spans[:, 1])


def _with_accents(text: str, end: int) -> int:
    """Where a token ends once the accents after its last letter, which the tokenizer drops, are counted in."""
    while end < len(text) and unicodedata.category(text[end]) == "Mn":
        end += 1
    return end


def make_windows(
    collection: Collection,
    paragraphs: Texts,
    queries: Texts,
    spans: Ints | None,
    vocabulary: Vocabulary,
    *,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
) -> Windows:
    """Windows of all questions. `spans` [questions, 2] are the first and last token of each answer in its paragraph,
    -1 where there is none; without them no answer is known."""
    context_of = np.array([question.context for question in collection.questions], np.int64)
    query_lengths = np.minimum(queries.counts, max_query_length)
    room = max_seq_length - SPECIAL_TOKENS - query_lengths
    paragraph_lengths = paragraphs.counts[context_of]
    stride = np.minimum(room, doc_stride)
    num_windows = 1 + np.maximum(0, -(-(paragraph_lengths - room) // stride))

    question = np.repeat(np.arange(len(num_windows)), num_windows)
    first = flat_ranges(np.zeros_like(num_windows), num_windows) * stride[question]
    counts = np.minimum(room[question], paragraph_lengths[question] - first)
    query_counts, context = query_lengths[question], context_of[question]
    lengths = query_counts + counts + SPECIAL_TOKENS
    begins, segment_b = offsets_of(lengths)[:-1], query_counts + 2

    separator = vocabulary.id_of("[SEP]")
    tokens = np.full(lengths.sum(), separator, vocabulary.dtype)
    tokens[begins] = vocabulary.id_of("[CLS]")
    tokens[flat_ranges(begins + 1, query_counts)] = queries.tokens[
        flat_ranges(queries.offsets[:-1][question], query_counts)
    ]
    tokens[flat_ranges(begins + segment_b, counts)] = paragraphs.tokens[
        flat_ranges(paragraphs.offsets[:-1][context] + first, counts)
    ]
    answers = None if spans is None else _answers_in_windows(spans[question], first, counts, segment_b)
    block = Block(tokens, lengths, segment_b, np.zeros(len(lengths), np.int64), None, answers)
    return Windows(block, question, context, first, counts, paragraphs)


def _answers_in_windows(spans: Ints, first: Ints, counts: Ints, segment_b: Ints) -> Ints:
    """First and last token of each answer in its window; [CLS] (0, 0) where the window does not show all of it."""
    is_there = (spans[:, 0] >= first) & (spans[:, 1] < first + counts)
    return np.where(is_there[:, None], spans + (segment_b - first)[:, None], 0)


# --- where answers stand -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Located:
    """First and last token of each question's first answer in its paragraph, -1 where it has none, and what was odd."""

    spans: Ints
    is_usable: np.ndarray  # false: it has an answer, which is not in its paragraph
    num_moved: int  # answers that stand elsewhere than their file says


def locate_answers(collection: Collection, paragraphs: Texts) -> Located:
    """Find the first answer of each question among the tokens of its paragraph."""
    characters = np.full((len(collection.questions), 2), -1, np.int64)
    is_usable = np.ones(len(collection.questions), bool)
    num_moved = 0
    for number, question in enumerate(collection.questions):
        if not question.answers:
            continue
        text, start = question.answers[0]
        found = nearest_occurrence(collection.contexts[question.context], text, start)
        num_moved += found not in (start, -1)
        is_usable[number] = found >= 0
        if found >= 0:
            inner = found + len(text) - len(text.lstrip())
            characters[number] = inner, inner + len(text.strip())
    # Paragraphs end to end, so that one search finds all answers.
    lengths = np.array([len(text) for text in collection.contexts], np.int64)
    bases = offsets_of(lengths)[:-1]
    token_bases = np.repeat(bases, paragraphs.counts)
    context = np.array([question.context for question in collection.questions], np.int64)
    base = bases[context]
    first = np.searchsorted(paragraphs.ends + token_bases, characters[:, 0] + base, side="right")
    last = np.searchsorted(paragraphs.begins + token_bases, characters[:, 1] + base, side="left") - 1
    spans = np.stack([first, last], axis=1) - paragraphs.offsets[context][:, None]
    is_usable &= (characters[:, 0] < 0) | (last >= first)  # controls alone are no answer
    has_none = (characters[:, 0] < 0) | ~is_usable
    spans[has_none] = -1
    return Located(spans, is_usable, num_moved)


def nearest_occurrence(context: str, text: str, start: int) -> int:
    """Where `text` stands in `context`: at `start`, or as near to it as possible; -1 if nowhere."""
    if context.startswith(text, start):
        return start
    after = context.find(text, start)
    before = context.rfind(text, 0, min(start + len(text), len(context)))
    if after < 0 or before < 0:
        return max(after, before)
    return before if start - before <= after - start else after
