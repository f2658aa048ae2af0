"""The Block: examples in flat arrays, which every reader returns and every writer takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bertrain.base.seeds import Words
from bertrain.data.formats.masking import Ints, MaskingRules, mask_tokens

Item = TypeVar("Item")

Values = npt.NDArray[Any]  # integers of any type: narrow on disk, 64 bits wide in computation

EXAMPLES_AT_ONCE = 4096  # gathered together: the indices of their tokens take some 16 MB


@dataclass(frozen=True)
class Masks:
    """Static masks: the predictions of some examples, one example after another.

    The task `tag` predicts at positions too: there nothing is masked, and labels are the classes of words.
    """

    counts: Ints  # predictions of each example
    positions: Values  # of each prediction in its example, ascending
    labels: Values  # the original tokens at these positions, or the classes of the words that begin there

    @cached_property
    def offsets(self) -> Ints:
        """The predictions of example i are positions[offsets[i] : offsets[i + 1]]."""
        return offsets_of(self.counts)

    def take(self, chosen: Ints) -> Masks:
        return Masks(
            self.counts[chosen],
            take_ragged(self.positions, self.offsets, chosen),
            take_ragged(self.labels, self.offsets, chosen),
        )


@dataclass(frozen=True)
class Block:
    """Some examples, one after another. Without `masks` the tokens are unmasked, and masks are drawn at load time."""

    tokens: Values
    lengths: Ints
    segment_b: Values  # where segment B begins; the length where there is none
    is_random: Values  # 1 where B is from another document
    masks: Masks | None = None
    answers: Values | None = None
    """Labels for fine-tuning, a row for each example: [class], [number], [first, last] token of an answer, or a 0 or 1
    for each of several labels."""
    answer_weights: Values | None = None
    """Factors of each example's loss, one or as many as answers; None: all are 1."""
    texts_per_example: int = 1
    """Consecutive rows of the data that are the texts of one example; they may be in different bins of a step."""

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> Ints:
        """The tokens of example i are tokens[offsets[i] : offsets[i + 1]]."""
        return offsets_of(self.lengths)

    @property
    def largest_word(self) -> int:
        words = [self.tokens] if self.masks is None else [self.tokens, self.masks.labels]
        return max(int(values.max(initial=-1)) for values in words)

    def take(self, chosen: Ints) -> Block:
        return Block(
            take_ragged(self.tokens, self.offsets, chosen),
            self.lengths[chosen],
            self.segment_b[chosen],
            self.is_random[chosen],
            self.masks.take(chosen) if self.masks else None,
            None if self.answers is None else self.answers[chosen],
            None if self.answer_weights is None else self.answer_weights[chosen],
            self.texts_per_example,
        )


def draw_masks(block: Block, rows: Ints, keys: Words, rules: MaskingRules) -> Block:
    """The unmasked examples of `block`, masked; for `rows` and `keys` see `mask_tokens`."""
    starts = block.offsets[:-1]
    masked, chosen, labels = mask_tokens(block.tokens, starts, block.lengths, rows, keys, rules)
    example = np.searchsorted(starts, chosen, side="right") - 1
    masks = Masks(np.bincount(example, minlength=len(block)), chosen - starts[example], labels)
    return replace(block, tokens=masked, masks=masks)


def concatenate(blocks: Sequence[Block]) -> Block:
    """Blocks end to end; all of them with masks, or none, and the same for answers and their weights."""
    masks = [block.masks for block in blocks if block.masks is not None]
    tokens, lengths, segment_b, is_random = _columns(blocks, "tokens", "lengths", "segment_b", "is_random")
    joined_masks = Masks(*_columns(masks, "counts", "positions", "labels")) if masks else None
    answers = _all_or_none([block.answers for block in blocks])
    weights = _all_or_none([block.answer_weights for block in blocks])
    (texts,) = {block.texts_per_example for block in blocks} or {1}
    return Block(tokens, lengths, segment_b, is_random, joined_masks, answers, weights, texts)


def _all_or_none(parts: list[Values | None]) -> Values | None:
    there = [part for part in parts if part is not None]
    if len(there) not in (0, len(parts)):
        raise ValueError("some of the blocks have answers or weights, and others have none")
    return np.concatenate(there) if there else None


def _columns(parts: Sequence[Block] | Sequence[Masks], *names: str) -> list[Values]:
    return [_end_to_end([getattr(part, name) for part in parts]) for name in names]


def offsets_of(counts: Ints) -> Ints:
    """Where each list begins in a flat array, and the end of the last."""
    return np.concatenate([[0], np.cumsum(counts)])


def flat_ranges(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... counts[0] of them, then those of the next."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def take_ragged(values: Values, offsets: Ints, chosen: Ints) -> Values:
    """values[offsets[i] : offsets[i + 1]] of each of the `chosen`, one after another."""
    new_offsets = offsets_of(offsets[chosen + 1] - offsets[chosen])
    out = np.empty(new_offsets[-1], values.dtype)
    for first in range(0, len(chosen), EXAMPLES_AT_ONCE):
        some = chosen[first : first + EXAMPLES_AT_ONCE]
        target = slice(new_offsets[first], new_offsets[first + len(some)])
        out[target] = values[flat_ranges(offsets[some], offsets[some + 1] - offsets[some])]
    return out


def join_segments(start: int, separator: int, *segments: tuple[Values, Ints, Ints], separators: int = 1) -> Block:
    """Unmasked examples [CLS] A [SEP], or [CLS] A [SEP] B [SEP], of one or two segments.

    A segment is a flat array, and where each example's part of it begins and how long it is; -1: it has no such part.
    Between A and B stand as many [SEP] as `separators`.
    """
    more = (separators - 1) * (len(segments) - 1)
    lengths = 1 + more + np.sum([counts + 1 for _, _, counts in segments], axis=0)
    offsets = offsets_of(lengths)
    tokens = np.full(offsets[-1], separator, dtype=segments[0][0].dtype)
    tokens[offsets[:-1]] = start
    place = offsets[:-1] + 1
    for values, begins, counts in segments:
        for first in range(0, len(lengths), EXAMPLES_AT_ONCE):
            some = slice(first, first + EXAMPLES_AT_ONCE)
            kept = np.maximum(counts[some], 0)
            tokens[flat_ranges(place[some], kept)] = values[flat_ranges(begins[some], kept)]
        place = place + counts + 1 + more
    return Block(tokens, lengths, segments[0][2] + 2 + more, np.zeros(len(lengths), dtype=np.bool_))


def split(values: Values, counts: Ints) -> list[Values]:
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


def joined(arrays: Sequence[Values]) -> Ints:
    """Arrays of any integer type end to end, 64 bits wide."""
    return _end_to_end(arrays).astype(np.int64)


def _end_to_end(arrays: Sequence[Values]) -> Values:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0, dtype=np.int64)


def in_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` items each; the last may be shorter."""
    waiting = iter(items)
    while batch := list(islice(waiting, size)):
        yield batch
