"""Bins and layouts: every example once, no bin over capacity, every row in a sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.config.choices import StepPacking
from bertrain.config.settings import BatchSettings
from bertrain.data.feed.batching import (
    PACKED_PER_ROW,
    POLICIES,
    STRATA,
    Capacity,
    Policy,
    capacity_for,
    check_groups,
    choose_policy,
    rows_at,
    step_by_sequences,
    step_by_tokens,
)
from bertrain.data.formats.masking import count_predictions
from tests import helpers

MAX_LENGTH = 64
VARIANTS = {name: choose_policy(name) for name in POLICIES} | {
    "exchange in threes": choose_policy("exchange", group_size=3),
    "packed by spfhp": choose_policy("packed", packing="spfhp"),
}
lengths_of_a_step = st.lists(st.integers(5, MAX_LENGTH), min_size=1, max_size=200).map(np.array)
budgets = st.integers(MAX_LENGTH, 10 * MAX_LENGTH)


def capacity(budget: int, bin_sequences: int = 0, probability: float = 0.15) -> Capacity:
    return capacity_for(
        budget, bin_sequences=bin_sequences, mean_length=32, max_predictions=10, mask_probability=probability
    )


@pytest.mark.parametrize("policy", VARIANTS.values(), ids=VARIANTS)
@given(
    lengths=lengths_of_a_step,
    budget=budgets,
    bin_sequences=st.integers(0, 40),
    probability=st.sampled_from([0.005, 0.15, 0.5]),
)
def test_every_example_lies_in_one_bin_within_capacity(
    policy: Policy, lengths: np.ndarray, budget: int, bin_sequences: int, probability: float
) -> None:
    predictions = count_predictions(lengths, 10, probability)
    limits = capacity(budget, bin_sequences, probability)
    bins = policy.deal(lengths, predictions, limits, MAX_LENGTH)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    for members in bins:
        assert lengths[members].sum() <= limits.tokens
        assert len(members) <= limits.sequences
        assert predictions[members].sum() <= limits.predictions
        assert len(members) > 0
    again = policy.deal(lengths.copy(), predictions.copy(), limits, MAX_LENGTH)
    assert [members.tolist() for members in again] == [members.tolist() for members in bins]


@pytest.mark.parametrize("policy", VARIANTS.values(), ids=VARIANTS)
@given(lengths=lengths_of_a_step, budget=budgets)
def test_layout_gives_every_row_to_a_sequence(policy: Policy, lengths: np.ndarray, budget: int) -> None:
    predictions = count_predictions(lengths, 10, 0.15)
    for members in policy.deal(lengths, predictions, capacity(budget), MAX_LENGTH):
        shape = policy.shape_of(lengths[members], predictions[members], capacity(budget), MAX_LENGTH)
        layout = policy.lay_out(lengths[members], shape.tokens, MAX_LENGTH)
        boundaries = layout.boundaries
        assert boundaries[0] == 0
        assert boundaries[-1] == shape.tokens
        assert (np.diff(boundaries) > 0).all()
        assert np.diff(boundaries).max() <= MAX_LENGTH
        assert len(boundaries) - 1 <= policy.num_slots(shape, MAX_LENGTH)
        assert (boundaries[layout.slots] == layout.starts).all()
        assert (np.diff(boundaries)[layout.slots] == lengths[members]).all()


@given(lengths=lengths_of_a_step, budget=budgets, group_size=st.integers(0, 5))
def test_exchange_deals_sorted_stretches_in_snake_order(lengths: np.ndarray, budget: int, group_size: int) -> None:
    """Against a plain twin: the same deal, card by card."""
    predictions = count_predictions(lengths, 10, 0.15)
    limits = capacity(budget)
    policy = choose_policy("exchange", group_size=group_size)
    bins = [set(members.tolist()) for members in policy.deal(lengths, predictions, limits, MAX_LENGTH)]
    for num_bins in range(group_size or 1, len(lengths) + 6, group_size or 1):
        size = group_size or num_bins
        hands: list[list[int]] = [[] for _ in range(num_bins)]
        groups = num_bins // size
        for group in range(groups):
            stretch = [index for index in range(len(lengths)) if index * groups // len(lengths) == group]
            stretch.sort(key=lambda index: -lengths[index])
            there_and_back = [*range(size), *reversed(range(size))]
            for turn, index in enumerate(stretch):
                hands[group * size + there_and_back[turn % (2 * size)]].append(index)
        if all(limits.holds(lengths[hand].sum(), len(hand), predictions[hand].sum()) for hand in hands if hand):
            break
    assert bins == [set(hand) for hand in hands if hand]


@given(lengths=lengths_of_a_step, budget=budgets)
def test_bins_have_an_even_share_of_each_quarter_of_the_lengths(lengths: np.ndarray, budget: int) -> None:
    bins = choose_policy("bins").deal(lengths, count_predictions(lengths, 10, 0.15), capacity(budget), MAX_LENGTH)
    for stratum in range(STRATA):
        shortest, longest = stratum * MAX_LENGTH // STRATA + 1, (stratum + 1) * MAX_LENGTH // STRATA
        shares = [int(((lengths[members] >= shortest) & (lengths[members] <= longest)).sum()) for members in bins]
        assert max(shares) - min(shares) <= 1
    assert max(map(len, bins)) - min(map(len, bins)) <= 1


@given(lengths=lengths_of_a_step, budget=budgets, packing=st.sampled_from(["lpfhp", "spfhp"]))
def test_packed_bins_hold_whole_rows(lengths: np.ndarray, budget: int, packing: StepPacking) -> None:
    limits = capacity(budget)
    most = min(PACKED_PER_ROW, limits.sequences)
    indices, offsets = helpers.packed_rows(lengths, row_length=MAX_LENGTH, algorithm=packing, max_per_row=most)
    rows = [set(row.tolist()) for row in np.split(indices, offsets[1:-1])]
    policy = choose_policy("packed", packing=packing)
    for members in policy.deal(lengths, count_predictions(lengths, 10, 0.15), limits, MAX_LENGTH):
        inside = [row for row in rows if row <= set(members.tolist())]
        assert set().union(*inside) == set(members.tolist())
        assert len(inside) <= budget // MAX_LENGTH


def test_groups_divide_the_ranks() -> None:
    for group_size, ranks in ((0, 7), (1, 5), (4, 8), (8, 8)):
        check_groups(group_size, ranks)
    for group_size, ranks in ((3, 8), (8, 4), (2, 1)):
        with helpers.refused("bad-group-size", f"--batch.group_size {group_size}", ranks):
            check_groups(group_size, ranks)


def test_every_policy_can_be_set() -> None:
    from typing import get_args, get_type_hints

    assert set(get_args(get_type_hints(BatchSettings)["policy"])) == set(POLICIES)


@given(lengths=lengths_of_a_step, budget=budgets)
def test_a_policy_has_at_most_four_shapes(lengths: np.ndarray, budget: int) -> None:
    limits = capacity(budget)
    shapes = {
        choose_policy("budget").shape_of(
            lengths[:count], count_predictions(lengths[:count], 10, 0.15), limits, MAX_LENGTH
        )
        for count in range(1, len(lengths) + 1)
        if limits.holds(int(lengths[:count].sum()), count, int(count_predictions(lengths[:count], 10, 0.15).sum()))
    }
    assert len(shapes) <= 4


@given(num_rows=st.integers(1, 300), sequences=st.integers(1, 400), seed=st.integers(0, 1000))
def test_steps_by_sequences_cover_every_epoch_once(num_rows: int, sequences: int, seed: int) -> None:
    seen: dict[int, list[int]] = {}
    position = 0
    while position < 3 * num_rows:
        epochs, rows = step_by_sequences(position, sequences, num_rows, seed)
        for epoch, row in zip(epochs.tolist(), rows.tolist(), strict=True):
            seen.setdefault(epoch, []).append(row)
        position += sequences
    for epoch in range(3):
        assert sorted(seen[epoch]) == list(range(num_rows))


@given(lengths=lengths_of_a_step.map(lambda values: values.astype(np.int32)), tokens=st.integers(MAX_LENGTH, 2000))
def test_steps_by_tokens_cover_every_epoch_once_and_stay_within(lengths: np.ndarray, tokens: int) -> None:
    seen: list[int] = []
    position = 0
    while position < 2 * len(lengths):
        epochs, rows = step_by_tokens(position, tokens, lengths, float(lengths.mean()), seed=3)
        assert lengths[rows].sum() <= tokens
        _, after = rows_at([position + len(rows)], len(lengths), 3)
        assert lengths[rows].sum() + lengths[after[0]] > tokens, "one more example would have fitted"
        seen += (epochs * len(lengths) + rows).tolist()
        position += len(rows)
    assert sorted(seen)[: 2 * len(lengths)] == list(range(2 * len(lengths)))


def test_orders_of_epochs_differ() -> None:
    _, first = rows_at(np.arange(1000), 1000, seed=1)
    _, second = rows_at(np.arange(1000, 2000), 1000, seed=1)
    assert (first == second).sum() < 10


def test_longest_first_evens_out_tokens_and_attention() -> None:
    """What the design promises of the budget policy, on lengths like Wikipedia's: a quarter of them full."""
    draw = np.random.default_rng(0)
    lengths = np.where(draw.random(6000) < 0.25, 512, draw.integers(5, 512, 6000))
    budget = 24576
    count = int(np.searchsorted(np.cumsum(lengths), 48 * budget * 0.998))
    lengths = lengths[:count]
    bins = choose_policy("budget").deal(
        lengths,
        count_predictions(lengths, 76, 0.15),
        capacity_for(budget, bin_sequences=0, mean_length=lengths.mean(), max_predictions=76, mask_probability=0.15),
        512,
    )
    assert len(bins) == 48
    tokens = np.array([lengths[members].sum() for members in bins])
    attention = np.array([(lengths[members] ** 2).sum() for members in bins])
    assert tokens.mean() / budget > 0.997
    assert attention.max() / attention.mean() < 1.005
