"""Steps as the trainer gets them: the same examples and masks whatever the ranks, budget and policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertrain.config.settings import Settings
from bertrain.data.feed.batching import POLICIES
from bertrain.data.feed.loader import Loader, training_examples
from bertrain.data.formats.shards import Shards
from bertrain.model.batch import Batch
from bertrain.model.bert import Bert
from bertrain.model.heads import pretraining_sums
from tests import helpers


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards.open(helpers.make_data(tmp_path_factory.mktemp("loader")))


def content(batch: Batch) -> list[tuple]:
    """Each real sequence of a bin as (tokens, segments, masked positions, labels, next-sentence label)."""
    found = []
    valid = batch.mlm_labels >= 0
    positions, labels = batch.mlm_positions[valid], batch.mlm_labels[valid]
    for slot in torch.nonzero(batch.nsp_labels >= 0).flatten().tolist():
        start, stop = int(batch.cu_seqlens[slot]), int(batch.cu_seqlens[slot + 1])
        here = (positions >= start) & (positions < stop)
        assert batch.cls_positions[slot] == start
        assert batch.position_ids[start:stop].tolist() == list(range(stop - start))
        found.append(
            (
                tuple(batch.input_ids[start:stop].tolist()),
                tuple(batch.segment_ids[start:stop].tolist()),
                tuple((positions[here] - start).tolist()),
                tuple(labels[here].tolist()),
                int(batch.nsp_labels[slot]),
            )
        )
    return found


def step_content(shards: Shards, settings: Settings, number: int, position: int, world: int) -> list[tuple]:
    steps = [Loader(shards, settings, rank=rank, world=world).step(number, position) for rank in range(world)]
    assert len({(step.num_tokens, step.num_sequences, step.num_predictions, step.num_bins) for step in steps}) == 1
    assert sum(len(step.bins) for step in steps) == steps[0].num_bins
    found = [sequence for step in steps for batch in step.bins for sequence in content(batch)]
    assert len(found) == steps[0].num_sequences
    assert sum(len(tokens) for tokens, *_ in found) == steps[0].num_tokens
    assert sum(len(labels) for *_, labels, _ in found) == steps[0].num_predictions
    return sorted(found)


def test_same_step_for_any_ranks_budget_and_policy(shards: Shards) -> None:
    reference = helpers.tiny_settings()
    for number in (0, 7):
        expected = step_content(shards, reference, number, number * 24, world=1)
        for world in (1, 2, 3, 4, 7):
            for budget in (64, 200, 1024):
                for policy in POLICIES:
                    settings = helpers.tiny_settings(batch__token_budget=budget, batch__policy=policy)
                    assert step_content(shards, settings, number, number * 24, world) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_bins_and_their_dropout_are_the_same_on_any_ranks(shards: Shards, policy: str) -> None:
    settings = helpers.tiny_settings(batch__policy=policy, batch__token_budget=200)
    alone = Loader(shards, settings).step(3, 72).bins
    for world in (2, 3, 5):
        own = [Loader(shards, settings, rank=rank, world=world).step(3, 72).bins for rank in range(world)]
        for number, batch in enumerate(alone):
            other = own[number % world][number // world]
            assert other.dropout_seed == batch.dropout_seed
            assert torch.equal(other.input_ids, batch.input_ids)
        assert sum(map(len, own)) == len(alone)


def test_masks_are_new_in_each_epoch_and_the_same_in_each_evaluation(shards: Shards) -> None:
    settings = helpers.tiny_settings(batch__sequences=len(shards))
    first = step_content(shards, settings, 0, 0, 1)
    second = step_content(shards, settings, 1, len(shards), 1)
    assert len({sequence[0] for sequence in first} & {sequence[0] for sequence in second}) < len(shards) // 2
    other_seed = helpers.tiny_settings(train__seed=99)
    evaluations = [
        sorted(sequence for batch in Loader(shards, config).evaluation(0) for sequence in content(batch))
        for config in (settings, other_seed)
    ]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == len(shards)


def test_evaluation_takes_evenly_strided_examples_once(shards: Shards) -> None:
    settings = helpers.tiny_settings()
    found = [
        sequence
        for rank in range(3)
        for batch in Loader(shards, settings, rank=rank, world=3).evaluation(20)
        for sequence in content(batch)
    ]
    assert len(found) == 20


def test_steps_ahead_are_the_steps(shards: Shards) -> None:
    loader = Loader(shards, helpers.tiny_settings(batch__sequences=0, batch__tokens=900))
    position = 0
    for number, ready in enumerate(loader.steps(0, 0, 9)):
        direct = loader.step(number, position)
        assert ready.first_position == position
        assert [content(batch) for batch in ready.bins] == [content(batch) for batch in direct.bins]
        assert [batch.dropout_seed for batch in ready.bins] == [batch.dropout_seed for batch in direct.bins]
        position = direct.next_position


def test_dropout_is_drawn_anew_in_each_step_and_bin(shards: Shards) -> None:
    def seeds(seed: int) -> list[int]:
        loader = Loader(shards, helpers.tiny_settings(batch__token_budget=128, train__seed=seed))
        return [batch.dropout_seed for number in range(5) for batch in loader.step(number, 24 * number).bins]

    assert len(seeds(1)) > 20
    assert len(set(seeds(1) + seeds(2))) == len(seeds(1)) + len(seeds(2))


def test_every_batch_is_valid(shards: Shards) -> None:
    for policy in POLICIES:
        loader = Loader(shards, helpers.tiny_settings(batch__policy=policy, batch__token_budget=300))
        shapes = set()
        for number in range(20):
            for batch in loader.step(number, 24 * number).bins:
                total = len(batch.input_ids)
                cu_seqlens = batch.cu_seqlens.numpy()
                assert cu_seqlens[0] == 0
                assert cu_seqlens[-1] == total
                assert (np.diff(cu_seqlens) >= 0).all()
                assert np.diff(cu_seqlens).max() <= batch.max_seqlen
                assert sum(batch.sequence_lengths) == total
                assert int(batch.cls_positions.max()) < total
                assert int((batch.mlm_labels >= 0).sum()) == batch.num_predictions
                assert int((batch.nsp_labels >= 0).sum()) == batch.num_sequences
                assert torch.equal(batch.is_real, batch.nsp_labels >= 0)
                shapes.add((total, len(batch.nsp_labels), len(batch.mlm_labels)))
        assert len(shapes) <= 4


def gradients(model: Bert, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    outputs = model(batch)
    sums = pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch)
    (sums.mlm_loss + sums.sequence_loss).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("policy", POLICIES)
def test_padding_has_no_influence_even_on_poisoned_memory(
    shards: Shards, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same examples beside other padding, every fresh tensor filled with NaN before it is written."""
    import dataclasses

    settings = helpers.tiny_settings(
        model__hidden_dropout=0,
        model__attention_dropout=0,
        batch__policy=policy,
        batch__sequences=3,
        batch__token_budget=400,
    )
    batch = Loader(shards, settings).step(0, 0).bins[0]
    model = helpers.build_model(settings.model).train()
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    try:
        expected = gradients(model, batch)
        is_padding = torch.ones(len(batch.input_ids), dtype=torch.bool)
        for slot in torch.nonzero(batch.nsp_labels >= 0).flatten().tolist():
            is_padding[int(batch.cu_seqlens[slot]) : int(batch.cu_seqlens[slot + 1])] = False
        assert int(is_padding.sum()) > 0
        other_ids = torch.where(
            is_padding, torch.randint(5, settings.model.vocab_size, is_padding.shape), batch.input_ids
        )
        other_segments = torch.where(is_padding, 1 - batch.segment_ids, batch.segment_ids)
        changed = dataclasses.replace(batch, input_ids=other_ids, segment_ids=other_segments)
        actual = gradients(model, changed)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, gradient in expected.items():
        assert torch.isfinite(gradient).all(), name
        assert torch.equal(gradient, actual[name]), name


def test_the_amount_of_padding_has_no_influence(shards: Shards) -> None:
    found = []
    for budget in (200, 2000):
        settings = helpers.tiny_settings(
            model__hidden_dropout=0, model__attention_dropout=0, batch__sequences=3, batch__token_budget=budget
        )
        (batch,) = Loader(shards, settings).step(0, 0).bins
        found.append((len(batch.input_ids), gradients(helpers.build_model(settings.model).train(), batch)))
    (few, expected), (many, actual) = found
    assert many >= 2 * few
    total = sum(float(gradient.norm() ** 2) for gradient in expected.values()) ** 0.5
    for name, gradient in expected.items():
        assert float((gradient - actual[name]).norm()) <= 1e-6 * total, name


def test_whole_word_masking_reaches_the_batch(tmp_path: Path) -> None:
    data = Shards.open(helpers.make_data(tmp_path))
    plain, whole = (step_content(data, helpers.tiny_settings(data__whole_word=flag), 0, 0, 1) for flag in (False, True))
    assert plain != whole
    assert sum(len(labels) for *_, labels, _ in plain) == sum(len(labels) for *_, labels, _ in whole)


@pytest.mark.parametrize("measure", [{"batch__sequences": 7}, {"batch__sequences": 0, "batch__tokens": 300}])
def test_slices_that_meet_have_all_rows_and_none_in_common(shards: Shards, measure: dict[str, int]) -> None:
    seen: dict[str, list[tuple]] = {}
    for part in ("0:0.29", "0.29:1"):
        loader = Loader(shards, helpers.tiny_settings(data__slice=part, **measure))
        position, number, found = 0, 0, []
        while position < len(shards):  # more than an epoch of either part
            step = loader.step(number, position)
            found += [tokens for batch in step.bins for tokens in unmasked(batch)]
            position, number = step.next_position, number + 1
        seen[part] = found
    rows = [tuple(shards.read(np.array([row])).tokens.tolist()) for row in range(len(shards))]
    cut = 29 * len(shards) // 100
    assert set(seen["0:0.29"]) == set(rows[:cut])
    assert set(seen["0.29:1"]) == set(rows[cut:])


def unmasked(batch: Batch) -> list[tuple]:
    """The real sequences of a bin as they were before masking."""
    tokens = batch.input_ids.clone()
    valid = batch.mlm_labels >= 0
    tokens[batch.mlm_positions[valid]] = batch.mlm_labels[valid]
    slots = torch.nonzero(batch.nsp_labels >= 0).flatten().tolist()
    return [tuple(tokens[int(batch.cu_seqlens[slot]) : int(batch.cu_seqlens[slot + 1])].tolist()) for slot in slots]


def test_a_slice_without_a_row_is_refused(shards: Shards) -> None:
    with helpers.refused("empty-slice", "--data.slice 0:0.001", shards.folder):
        training_examples(shards, helpers.tiny_settings(data__slice="0:0.001"))


def test_evaluation_is_not_sliced(shards: Shards) -> None:
    loader = Loader(shards, helpers.tiny_settings(data__slice="0:0.001"))
    assert sum(batch.num_sequences for batch in loader.evaluation(0)) == len(shards)
