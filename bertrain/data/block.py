"""The Block: some examples in flat arrays, as every reader gives them and every writer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bertrain.data.masking import Ints


@dataclass(frozen=True)
class Masks:
    """Masks that were drawn once for all: the predictions of some examples, one example after another."""

    counts: Ints  # predictions of each example
    positions: Ints  # where in its example each of them stands, ascending
    labels: Ints  # the words that stood there

    def take(self, chosen: Ints) -> Masks:
        """The masks of the `chosen` examples, in that order."""
        places = _places(self.counts, chosen)
        return Masks(self.counts[chosen], self.positions[places], self.labels[places])


@dataclass(frozen=True)
class Block:
    """Some examples, one after another. Without `masks` the tokens are unmasked, and masks are drawn at load."""

    tokens: Ints
    lengths: Ints
    segment_b: Ints  # where segment B begins; the length, where there is none
    is_random: Ints  # 1 where B was drawn from elsewhere
    masks: Masks | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, chosen: Ints) -> Block:
        """The `chosen` examples, in that order."""
        return Block(
            self.tokens[_places(self.lengths, chosen)],
            self.lengths[chosen],
            self.segment_b[chosen],
            self.is_random[chosen],
            self.masks.take(chosen) if self.masks else None,
        )


def flat_ranges(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... counts[0] of them, then those of the next."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def split(values: npt.NDArray, counts: Ints) -> list[npt.NDArray]:
    """A flat array cut into the parts of each example."""
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


def joined(arrays: Sequence[npt.NDArray]) -> Ints:
    """Arrays of any integer type end to end."""
    return np.concatenate(arrays).astype(np.int64) if len(arrays) else np.zeros(0, dtype=np.int64)


def _places(counts: Ints, chosen: Ints) -> Ints:
    """Where the values of the `chosen` examples lie in a flat array with `counts` values for each example."""
    starts = np.cumsum(counts) - counts
    return flat_ranges(starts[chosen], counts[chosen])


def concatenate(blocks: Sequence[Block]) -> Block:
    """Blocks end to end; all of them with masks, or none."""
    masks = [block.masks for block in blocks if block.masks is not None]
    return Block(
        joined([block.tokens for block in blocks]),
        joined([block.lengths for block in blocks]),
        joined([block.segment_b for block in blocks]),
        joined([block.is_random for block in blocks]),
        Masks(
            joined([one.counts for one in masks]),
            joined([one.positions for one in masks]),
            joined([one.labels for one in masks]),
        )
        if masks
        else None,
    )
