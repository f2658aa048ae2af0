"""Bins and layouts: every example once, no bin over capacity, every row in a sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.data.batching import POLICIES, Capacity, capacity_for, rows_at, step_by_sequences, step_by_tokens
from bertrain.data.masking import count_predictions

MAX_LENGTH = 64
lengths_of_a_step = st.lists(st.integers(5, MAX_LENGTH), min_size=1, max_size=200).map(np.array)
budgets = st.integers(MAX_LENGTH, 10 * MAX_LENGTH)


def capacity(budget: int, bin_sequences: int = 0, probability: float = 0.15) -> Capacity:
    return capacity_for(
        budget, bin_sequences=bin_sequences, mean_length=32, max_predictions=10, mask_probability=probability
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    lengths=lengths_of_a_step,
    budget=budgets,
    bin_sequences=st.integers(0, 40),
    probability=st.sampled_from([0.005, 0.15, 0.5]),
)
def test_every_example_lies_in_one_bin_within_capacity(
    policy: str, lengths: np.ndarray, budget: int, bin_sequences: int, probability: float
) -> None:
    predictions = count_predictions(lengths, 10, probability)
    limits = capacity(budget, bin_sequences, probability)
    bins = POLICIES[policy].deal(lengths, predictions, limits, MAX_LENGTH)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    for members in bins:
        assert lengths[members].sum() <= limits.tokens
        assert len(members) <= limits.sequences
        assert predictions[members].sum() <= limits.predictions


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(lengths=lengths_of_a_step, budget=budgets)
def test_layout_gives_every_row_to_a_sequence(policy: str, lengths: np.ndarray, budget: int) -> None:
    predictions = count_predictions(lengths, 10, 0.15)
    chosen = POLICIES[policy]
    for members in chosen.deal(lengths, predictions, capacity(budget), MAX_LENGTH):
        shape = chosen.shape_of(lengths[members], predictions[members], capacity(budget), MAX_LENGTH)
        layout = chosen.lay_out(lengths[members], shape.tokens, MAX_LENGTH)
        boundaries = layout.boundaries
        assert boundaries[0] == 0
        assert boundaries[-1] == shape.tokens
        assert (np.diff(boundaries) > 0).all()
        assert np.diff(boundaries).max() <= MAX_LENGTH
        assert len(boundaries) - 1 <= chosen.num_slots(shape, MAX_LENGTH)
        assert (boundaries[layout.slots] == layout.starts).all()
        assert (np.diff(boundaries)[layout.slots] == lengths[members]).all()


@given(lengths=lengths_of_a_step, budget=budgets)
def test_a_policy_has_at_most_four_shapes(lengths: np.ndarray, budget: int) -> None:
    limits = capacity(budget)
    shapes = {
        POLICIES["budget"].shape_of(lengths[:count], count_predictions(lengths[:count], 10, 0.15), limits, MAX_LENGTH)
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
    bins = POLICIES["budget"].deal(
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
