"""Steps, bins and layouts: who computes what, decided from lengths alone.

A **step** is the next part of the endless order of examples, measured in sequences or in tokens, never by memory or
ranks. A **bin** is what one device computes at once (a micro-batch): whole examples within fixed capacities. Every
rank derives the same bins without communication; rank r of N takes the bins r, r + N, .... A **layout** places a bin's
examples in one dimension, in which every token belongs to a sequence: padding sequences fill the rest.

Everything here is a pure function of small arrays of integers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import AgreedError
from bertrain.base.seeds import derive, permute
from bertrain.base.units import parse_shares
from bertrain.config.choices import PACKING, PolicyName, StepPacking
from bertrain.config.settings import Settings
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.packing import plan_packing

SHORTEST_EXAMPLE = 5  # [CLS] a [SEP] b [SEP]
STRATA = 4  # of lengths, in the policy `bins`
PACKED_PER_ROW = 12  # examples, in the policy `packed`: as published
SHAPES = 4  # a bin's shape is the smallest that holds it of 1/4, 2/4, 3/4 and all of its capacity


@dataclass(frozen=True)
class Capacity:
    """The maximum content of a bin: whichever limit is reached first closes it."""

    tokens: int
    sequences: int
    predictions: int

    def holds(self, tokens: int, sequences: int, predictions: int) -> bool:
        return tokens <= self.tokens and sequences <= self.sequences and predictions <= self.predictions


def capacity_for(
    token_budget: int,
    *,
    bin_sequences: int,
    mean_length: float,
    max_predictions: int,
    mask_probability: float,
) -> Capacity:
    """Capacities of a bin of `token_budget` tokens.

    Without `bin_sequences`, a bin may hold 1.5 times the average number of examples. The predictions follow: rounding
    gives an example at most half a prediction more than its share of tokens, and a short example has one in any case.
    So no bin within the capacities of tokens and sequences can exceed that of predictions.
    """
    sequences = bin_sequences or max(1, int(1.5 * token_budget / mean_length) + 1)
    excess = max(0.5, 1 - SHORTEST_EXAMPLE * mask_probability)
    share = int(mask_probability * token_budget + excess * sequences) + 1
    return Capacity(token_budget, sequences, min(share, sequences * max_predictions))


def bin_capacity(settings: Settings, mean_length: float, token_budget: int = 0) -> Capacity:
    """Capacities of a bin by these settings, or of another token budget, for data of this mean length."""
    batch, data = settings.batch, settings.data
    return capacity_for(
        token_budget or batch.token_budget,
        bin_sequences=batch.bin_sequences,
        mean_length=data.max_seq_length if batch.policy == "padded" else mean_length,
        max_predictions=data.max_predictions,
        mask_probability=data.mask_probability,
    )


def rows_at(positions: npt.ArrayLike, num_rows: int, seed: int) -> tuple[Ints, Ints]:
    """Epoch and row of each position in the endless order: every row once per epoch, each epoch in a new order."""
    positions = np.asarray(positions, dtype=np.int64)
    epochs = positions // num_rows
    rows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        rows[of_epoch] = permute(positions[of_epoch] % num_rows, num_rows, derive(seed, "order", int(epoch)))
    return epochs, rows


def step_by_sequences(position: int, sequences: int, num_rows: int, seed: int) -> tuple[Ints, Ints]:
    """Epochs and rows of the step that begins at `position` and holds `sequences` examples."""
    return rows_at(np.arange(position, position + sequences), num_rows, seed)


def strata_of(lengths: npt.NDArray[np.int32], settings: Settings) -> list[Ints]:
    """The rows of each stratum: even parts of the lengths, as many as batch.shares has numbers; none without any."""
    longest, shares = settings.data.max_seq_length, parse_shares(settings.batch.shares)
    if not shares:
        return []
    number = np.minimum((lengths - 1) * len(shares) // longest, len(shares) - 1)
    strata = [np.flatnonzero(number == one) for one in range(len(shares))]
    for one, (share, rows) in enumerate(zip(shares, strata, strict=True), start=1):
        if share and not len(rows):
            wrong = f"batch.shares gives stratum {one} the share {share}, but no example is in it"
            raise AgreedError("empty-stratum", f"{wrong}; set that share to 0")
    return strata


def step_by_shares(
    position: int, sequences: int, strata: Sequence[Ints], shares: Sequence[int], seed: int
) -> tuple[Ints, Ints]:
    """Epochs and rows of a step that consists of parts with `shares[i]` examples of each stratum.

    Every stratum has its own endless order, so examples of rare lengths may repeat more often than others.
    """
    first, count = position // sum(shares), sequences // sum(shares)
    found = []
    for number, (members, share) in enumerate(zip(strata, shares, strict=True)):
        if share:
            positions = np.arange(first * share, (first + count) * share)
            epochs, places = rows_at(positions, len(members), derive(seed, "stratum", number))
            found.append((epochs.reshape(count, share), members[places].reshape(count, share)))
    epochs, rows = (np.concatenate(columns, axis=1).ravel() for columns in zip(*found, strict=True))
    return epochs, rows


def step_by_tokens(
    position: int, tokens: int, lengths: npt.NDArray[np.int32], mean_length: float, seed: int
) -> tuple[Ints, Ints]:
    """Epochs and rows of the step that begins at `position`: as many whole examples as `tokens` can hold."""
    guess = max(1, int(1.2 * tokens / mean_length))
    while True:
        epochs, rows = rows_at(np.arange(position, position + guess), len(lengths), seed)
        filled = np.cumsum(lengths[rows])
        if filled[-1] > tokens:
            count = max(1, int(np.searchsorted(filled, tokens, side="right")))
            return epochs[:count], rows[:count]
        guess *= 2


def step_rows(
    position: int,
    settings: Settings,
    lengths: npt.NDArray[np.int32],
    mean_length: float,
    strata: Sequence[Ints],
    *,
    size: int = 0,
) -> tuple[Ints, Ints]:
    """Epochs and rows of the step that begins at `position`, by the settings; `strata` are those of batch.shares.

    `size`: its sequences or tokens, if smaller than a full step (step_size.py).
    """
    batch, seed = settings.batch, settings.train.seed
    if strata:
        return step_by_shares(position, batch.sequences, strata, parse_shares(batch.shares), seed)
    if batch.sequences:
        return step_by_sequences(position, size or batch.sequences, len(lengths), seed)
    return step_by_tokens(position, size or batch.tokens, lengths, mean_length, seed)


def deal_budget(lengths: Ints, predictions: Ints, capacity: Capacity, max_seq_length: int) -> list[Ints]:
    """Longest first into the emptiest bin: full bins with similar costs of tokens *and* attention.

    Returns the indices of each bin's examples, longest first. Starts with the fewest bins that could hold the
    tokens and the examples; an example that does not fit into the emptiest bin opens another.
    """
    least = max(-(-int(lengths.sum()) // capacity.tokens), -(-len(lengths) // capacity.sequences))
    bins: list[list[int]] = [[] for _ in range(least)]
    free = [[0, number, 0] for number in range(least)]  # tokens, bin, predictions: a heap, emptiest first
    for index in np.argsort(-lengths, kind="stable").tolist():
        length, wanted = int(lengths[index]), int(predictions[index])
        while free and len(bins[free[0][1]]) == capacity.sequences:
            heapq.heappop(free)
        if not free or free[0][0] + length > capacity.tokens or free[0][2] + wanted > capacity.predictions:
            heapq.heappush(free, [0, len(bins), 0])
            bins.append([])
        tokens, number, predicted = free[0]
        bins[number].append(index)
        heapq.heapreplace(free, [tokens + length, number, predicted + wanted])
    return [np.array(bin, dtype=np.int64) for bin in bins if bin]


def deal_padded(lengths: Ints, predictions: Ints, capacity: Capacity, max_seq_length: int) -> list[Ints]:
    """The usual padded batch: examples in their order, one per row of max_seq_length."""
    rows = min(capacity.tokens // max_seq_length, capacity.sequences)
    return [np.arange(first, min(first + rows, len(lengths))) for first in range(0, len(lengths), rows)]


def deal_bins(lengths: Ints, predictions: Ints, capacity: Capacity, max_seq_length: int) -> list[Ints]:
    """Deal the examples of each quarter of the lengths round-robin: every bin has equally many of them, up to one."""
    by_stratum = np.argsort((lengths - 1) * STRATA // max_seq_length, kind="stable")

    def owners(num_bins: int) -> Ints:
        owner = np.empty_like(lengths)
        owner[by_stratum] = np.arange(len(lengths)) % num_bins
        return owner

    return _deal_to_fewest(owners, 1, 1, lengths, predictions, capacity)


def deal_exchange(
    lengths: Ints, predictions: Ints, capacity: Capacity, max_seq_length: int, *, group_size: int
) -> list[Ints]:
    """Sorted by length, and dealt in snake order over a group of bins; each group gets a contiguous part of the step.

    Ranks take bins round-robin, so a group of bins is a group of adjacent ranks. `group_size` 0: one group of all bins.
    """

    def owners(num_bins: int) -> Ints:
        size = group_size or num_bins
        num_groups = num_bins // size
        group = np.arange(len(lengths)) * num_groups // len(lengths)
        order = np.lexsort((-lengths, group))
        first_of_group = np.searchsorted(group, np.arange(num_groups))
        owner = np.empty_like(lengths)
        owner[order] = group * size + _snake(np.arange(len(lengths)) - first_of_group[group], size)
        return owner

    return _deal_to_fewest(owners, 1, group_size or 1, lengths, predictions, capacity)


def deal_packed(
    lengths: Ints, predictions: Ints, capacity: Capacity, max_seq_length: int, *, packing: StepPacking
) -> list[Ints]:
    """Rows of max_seq_length, packed as other systems pack them, and whole rows to a bin.

    Rows with many sequences and rows with few are dealt in snake order, or some bins would be all short sequences.
    The free space of all rows is at the end of the bin, so the bin's layout does not show the rows.
    """
    most = min(PACKED_PER_ROW, capacity.sequences)
    packed = plan_packing(lengths, row_length=max_seq_length, algorithm=packing, max_per_row=most)
    indices, offsets = packed.rows(0, len(packed))
    sizes = np.diff(offsets)
    by_size = np.argsort(-sizes, kind="stable")

    def owners(num_bins: int) -> Ints:
        bin_of_row = np.empty_like(sizes)
        bin_of_row[by_size] = _snake(np.arange(len(sizes)), num_bins)
        owner = np.empty_like(lengths)
        owner[indices] = np.repeat(bin_of_row, sizes)
        return owner

    least = -(-len(sizes) // (capacity.tokens // max_seq_length))
    return _deal_to_fewest(owners, least, 1, lengths, predictions, capacity)


def _snake(turns: Ints, size: int) -> Ints:
    """Snake order over `size` positions: 0 .. size - 1, then back."""
    round_number, place = np.divmod(turns, size)
    return np.where(round_number % 2, size - 1 - place, place)


def _deal_to_fewest(
    owners: Callable[[int], Ints], least: int, step: int, lengths: Ints, predictions: Ints, capacity: Capacity
) -> list[Ints]:
    """The bins of `owners`, which gives each example's bin, for the fewest bins that stay within their capacity.

    There are at least `least` of them, and a multiple of `step`.
    """
    least = max(least, -(-int(lengths.sum()) // capacity.tokens), -(-len(lengths) // capacity.sequences))
    num_bins = -(-least // step) * step
    while True:
        owner = owners(num_bins)
        if (
            np.bincount(owner, lengths).max() <= capacity.tokens
            and np.bincount(owner).max() <= capacity.sequences
            and np.bincount(owner, predictions).max() <= capacity.predictions
        ):
            by_bin = np.argsort(owner, kind="stable")
            bins = np.split(by_bin, np.cumsum(np.bincount(owner))[:-1])
            return [members for members in bins if len(members)]
        num_bins += step


@dataclass(frozen=True)
class Layout:
    """Positions of a bin's examples: `starts` of each example, `boundaries` of every sequence, padding included."""

    starts: Ints
    boundaries: Ints
    slots: Ints  # the sequence of each example: example i is between boundaries[slots[i]] and boundaries[slots[i] + 1]


def lay_out_budget(lengths: Ints, num_tokens: int, max_seq_length: int) -> Layout:
    """Examples one after another; the tail is padding."""
    ends = np.cumsum(lengths)
    boundaries = np.concatenate([[0], ends, _padding_ends(int(ends[-1]), num_tokens, max_seq_length)])
    return Layout(ends - lengths, boundaries, np.arange(len(lengths)))


def lay_out_padded(lengths: Ints, num_tokens: int, max_seq_length: int) -> Layout:
    """Each example at a multiple of max_seq_length, followed by a padding sequence up to the next."""
    starts = np.arange(len(lengths)) * max_seq_length
    used = len(lengths) * max_seq_length
    both = np.stack([starts + lengths, starts + max_seq_length], axis=1).ravel()
    boundaries = np.unique(np.concatenate([[0], both, _padding_ends(used, num_tokens, max_seq_length)]))
    return Layout(starts, boundaries, np.searchsorted(boundaries, starts))


def _padding_ends(used: int, num_tokens: int, max_seq_length: int) -> Ints:
    """Ends of the padding sequences that fill `used` .. `num_tokens`, each of at most max_seq_length."""
    if used == num_tokens:
        return np.zeros(0, dtype=np.int64)
    return np.append(np.arange(used + max_seq_length, num_tokens, max_seq_length), num_tokens)


@dataclass(frozen=True)
class Policy:
    """A way to deal a step into bins, and to lay a bin out."""

    deal: Callable[[Ints, Ints, Capacity, int], list[Ints]]
    lay_out: Callable[[Ints, int, int], Layout]
    pads_each: bool  # whether an example takes max_seq_length tokens of its bin, whatever its length

    def shape_of(self, lengths: Ints, predictions: Ints, capacity: Capacity, max_seq_length: int) -> Capacity:
        """The smallest of the bin shapes that holds these examples."""
        tokens = len(lengths) * max_seq_length if self.pads_each else int(lengths.sum())
        whole = capacity.tokens, capacity.sequences, capacity.predictions
        for numerator in range(1, SHAPES + 1):
            shape = Capacity(*(-(-size * numerator // SHAPES) for size in whole))  # rounded up
            if shape.holds(tokens, len(lengths), int(predictions.sum())):
                return shape
        raise AssertionError(f"a bin of {tokens} tokens was dealt beyond {capacity}")

    def measure(
        self, bins: Sequence[Ints], lengths: Ints, predictions: Ints, capacity: Capacity, max_seq_length: int
    ) -> list[tuple[int, int, int, int]]:
        """Of each bin, padding included: tokens, pairs of them that attend to each other, predictions, sequences.

        A bin holds indices into the lengths and predictions of a step.
        """
        found = []
        for members in bins:
            own = lengths[members]
            shape = self.shape_of(own, predictions[members], capacity, max_seq_length)
            boundaries = self.lay_out(own, shape.tokens, max_seq_length).boundaries
            pairs = int(np.square(np.diff(boundaries)).sum())
            found.append((shape.tokens, pairs, shape.predictions, shape.sequences))
        return found

    def num_slots(self, shape: Capacity, max_seq_length: int) -> int:
        """Maximum sequences, padding included, in a bin of this shape: the fixed length of cu_seqlens, minus one."""
        padding = -(-shape.tokens // max_seq_length) + 1
        return shape.sequences * (2 if self.pads_each else 1) + padding


POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def choose_policy(name: PolicyName, *, group_size: int = 0, packing: StepPacking = PACKING) -> Policy:
    """The policy of this name; `group_size` is exchange's, `packing` is packed's."""
    if name == "padded":
        return Policy(deal_padded, lay_out_padded, pads_each=True)
    deals: dict[str, Callable[[Ints, Ints, Capacity, int], list[Ints]]] = {
        "budget": deal_budget,
        "bins": deal_bins,
        "exchange": partial(deal_exchange, group_size=group_size),
        "packed": partial(deal_packed, packing=packing),
    }
    return Policy(deals[name], lay_out_budget, pads_each=False)


def check_groups(group_size: int, ranks: int) -> None:
    if group_size and ranks % group_size:
        wrong = f"--batch.group_size {group_size} does not divide the {ranks} ranks"
        raise AgreedError("bad-group-size", f"{wrong}; use a divisor, or 0 for one group of all ranks")
