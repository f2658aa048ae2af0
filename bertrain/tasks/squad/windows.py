"""Encode questions and paragraphs: [CLS] question [SEP] window of the paragraph [SEP].

A paragraph that does not fit is cut into overlapping windows, `doc_stride` tokens apart. Each token keeps the range of
characters it stands for, so that an answer is a slice of the original paragraph.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from bertrain.config.settings import Settings
from bertrain.data.formats.block import Block, Values, flat_ranges, join_segments, offsets_of
from bertrain.data.formats.masking import Ints
from bertrain.data.text.tokenizer import build_pipeline, tokenizer_of
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.squad.files import Collection
from bertrain.tasks.windows import WindowRanges, cut_windows, has_most_context, overlapping_stride

CHUNK_TEXTS = 1000  # tokenized together: the tokenizer's objects take a few hundred bytes per token
pipeline_of = lru_cache(maxsize=8)(build_pipeline)


@dataclass(frozen=True)
class TokenizedTexts:
    """Tokens of several texts, concatenated: text i is tokens[offsets[i] : offsets[i + 1]]."""

    tokens: Values
    offsets: Ints
    begins: Ints  # first character of each token in its text; ascending within a text
    ends: Ints  # one past its last character

    @property
    def counts(self) -> Ints:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Windows:
    """The encoded windows and their origin. The windows of a question are adjacent."""

    block: Block
    question: Ints  # index of each window's question
    context: Ints  # index of its paragraph
    first: Ints  # index of its first paragraph token
    counts: Ints  # number of its paragraph tokens
    paragraphs: TokenizedTexts

    @cached_property
    def has_most_context(self) -> np.ndarray:
        """Whether each token of the Block is a paragraph token in the window that gives it the most context."""
        positions = flat_ranges(self.block.segment_b.astype(np.int64) + self.block.offsets[:-1], self.counts)
        lengths = np.zeros(self.question.max(initial=-1) + 1, np.int64)
        lengths[self.question] = self.paragraphs.counts[self.context]
        has_most = np.zeros(len(self.block.tokens), bool)
        has_most[positions] = has_most_context(WindowRanges(self.question, self.first, self.counts), lengths)
        return has_most


def tokenize(texts: Sequence[str], vocabulary: Vocabulary) -> TokenizedTexts:
    """Tokenize each text, with the range of characters of each token."""
    pipeline = pipeline_of(vocabulary)
    counts, tokens, characters = [], [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
    for first in range(0, len(texts), CHUNK_TEXTS):
        chunk = texts[first : first + CHUNK_TEXTS]
        for text, encoding in zip(chunk, pipeline.encode_batch(chunk, add_special_tokens=False), strict=True):
            counts.append(len(encoding.ids))
            tokens.append(np.array(encoding.ids, np.int64))
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            # Byte-level tokens have the space before a word.
            spaces = [end - begin > 1 and text[begin].isspace() for begin, end in spans.tolist()]
            spans[:, 0] += np.array(spaces, np.int64)
            if not text.isascii():
                spans[:, 1] = [_include_accents(text, end) for end in spans[:, 1].tolist()]
            characters.append(spans)
    spans = np.concatenate(characters)
    flat = np.concatenate(tokens).astype(vocabulary.dtype)
    return TokenizedTexts(flat, offsets_of(np.array(counts, np.int64)), spans[:, 0], spans[:, 1])


def _include_accents(text: str, end: int) -> int:
    """The end of a token including the accents after its last letter, which the tokenizer drops."""
    while end < len(text) and unicodedata.category(text[end]) == "Mn":
        end += 1
    return end


def make_windows(
    collection: Collection,
    paragraphs: TokenizedTexts,
    queries: TokenizedTexts,
    spans: Ints | None,
    vocabulary: Vocabulary,
    settings: Settings,
) -> Windows:
    """Windows of all questions. `spans` [questions, 2] are the first and last token of each answer in its paragraph,
    -1 for an unanswerable question; None for unlabeled questions."""
    context_of = np.array([question.context for question in collection.questions], np.int64)
    separators = tokenizer_of(vocabulary).separators
    max_content = settings.data.max_seq_length - 2 - separators  # without [CLS] and all [SEP]
    query_lengths = np.minimum(queries.counts, min(settings.task.max_query_length, max_content - 1))
    max_counts = max_content - query_lengths
    paragraph_lengths = paragraphs.counts[context_of]
    stride = overlapping_stride(settings.task.doc_stride, settings.data.max_seq_length)
    # A long question leaves short windows. A quarter of each is also in the next: few answers are cut in two.
    stride = np.minimum(stride, np.maximum(1, max_counts - max_counts // 4))
    question, first, counts = cut_windows(paragraph_lengths, max_counts, stride)
    query_counts, context = query_lengths[question], context_of[question]
    block = join_segments(
        vocabulary.id_of("[CLS]"),
        vocabulary.id_of("[SEP]"),
        (queries.tokens, queries.offsets[:-1][question], query_counts),
        (paragraphs.tokens, paragraphs.offsets[:-1][context] + first, counts),
        separators=separators,
    )
    if spans is not None:  # where the window does not contain the answer, (0, 0), the [CLS]
        begin, end = spans[question].T
        is_inside = (begin >= first) & (end < first + counts)
        answers = np.where(is_inside[:, None], spans[question] + (block.segment_b - first)[:, None], 0)
        block = replace(block, answers=answers)
    return Windows(block, question, context, first, counts, paragraphs)


@dataclass(frozen=True)
class AnswerSpans:
    """First and last token of each question's first answer in its paragraph; -1 without one."""

    spans: Ints
    is_usable: np.ndarray  # false where the answer is not in its paragraph
    num_moved: int  # answers found elsewhere than at their answer_start


def locate_answers(collection: Collection, paragraphs: TokenizedTexts) -> AnswerSpans:
    characters = np.full((len(collection.questions), 2), -1, np.int64)
    is_usable = np.ones(len(collection.questions), bool)
    num_moved = 0
    for number, question in enumerate(collection.questions):
        if not question.answers:
            continue
        text, start = question.answers[0]
        found = find_nearest(collection.contexts[question.context], text, start)
        num_moved += found not in (start, -1)
        is_usable[number] = found >= 0
        if found >= 0:
            inner = found + len(text) - len(text.lstrip())
            characters[number] = inner, inner + len(text.strip())
    # Concatenate the paragraphs, so that one search finds the tokens of all answers.
    lengths = np.array([len(text) for text in collection.contexts], np.int64)
    bases = offsets_of(lengths)[:-1]
    token_bases = np.repeat(bases, paragraphs.counts)
    context = np.array([question.context for question in collection.questions], np.int64)
    base = bases[context]
    first = np.searchsorted(paragraphs.ends + token_bases, characters[:, 0] + base, side="right")
    last = np.searchsorted(paragraphs.begins + token_bases, characters[:, 1] + base, side="left") - 1
    spans = np.stack([first, last], axis=1) - paragraphs.offsets[context][:, None]
    has_none = characters[:, 0] < 0
    is_usable &= has_none | (last >= first)  # an answer of control characters has no token
    spans[has_none | ~is_usable] = -1
    return AnswerSpans(spans, is_usable, num_moved)


def find_nearest(context: str, text: str, start: int) -> int:
    """The index of `text` in `context` nearest to `start`; -1 if it is not there."""
    if context.startswith(text, start):
        return start
    after = context.find(text, start)
    before = context.rfind(text, 0, min(start + len(text), len(context)))
    if after < 0 or before < 0:
        return max(after, before)
    return before if start - before <= after - start else after
