"""Data that brings its own masks, in any layout: the same steps and losses whatever the ranks, budget and policy."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.config.settings import Settings
from bertrain.data.feed.batching import POLICIES, Capacity, step_by_sequences
from bertrain.data.feed.loader import Loader, capacity_for_static_masks
from bertrain.data.formats.convert import convert
from bertrain.data.formats.source import DataSource, open_data
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary
from tests import helpers
from tests.quick.test_loader import content, step_content

LAYOUTS = ("arrow", "hdf5-varlength", "tfrecord")


def write_layouts(folder: Path) -> dict[str, Path]:
    """The same rows with the same masks in each layout, in several files."""
    unmasked = helpers.make_data(folder / "unmasked")
    convert(unmasked, folder / "hdf5-fixed", to="hdf5-fixed", shards=3, max_predictions=9)
    for layout in LAYOUTS:
        convert(folder / "hdf5-fixed", folder / layout, to=layout, shards=5)
    return {layout: folder / layout for layout in LAYOUTS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_layouts(tmp_path_factory.mktemp("static"))


@pytest.fixture(scope="module")
def data(folders: dict[str, Path]) -> DataSource:
    return open_data(folders["arrow"])


def expected_content(data: DataSource, settings: Settings, position: int) -> list[tuple]:
    """The step's rows as they lie on disk."""
    _, rows = step_by_sequences(position, settings.batch.sequences, len(data), settings.train.seed)
    found = []
    for row in helpers.examples_of(data.read(rows)):
        segments = tuple(int(place >= row["segment_b"]) for place in range(len(row["tokens"])))
        found.append((tuple(row["tokens"]), segments, tuple(row["positions"]), tuple(row["labels"]), row["is_random"]))
    return sorted(found)


def test_same_step_for_any_ranks_budget_and_policy(data: DataSource) -> None:
    for number in (0, 7):
        expected = expected_content(data, helpers.tiny_settings(), number * 24)
        for world in (1, 2, 5):
            for budget in (64, 1024):
                for policy in ("budget", "padded"):
                    settings = helpers.tiny_settings(batch__token_budget=budget, batch__policy=policy)
                    assert step_content(data, settings, number, number * 24, world) == expected


def test_masks_are_the_same_in_each_epoch_and_evaluation(data: DataSource) -> None:
    settings = helpers.tiny_settings(batch__sequences=len(data))
    assert step_content(data, settings, 0, 0, 1) == step_content(data, settings, 1, len(data), 1)
    evaluated = [sequence for batch in Loader(data, settings).evaluation(0) for sequence in content(batch)]
    assert sorted(evaluated) == step_content(data, settings, 0, 0, 1)


def test_positions_ascend_in_each_bin(data: DataSource) -> None:
    for policy in ("budget", "padded"):
        for batch in Loader(data, helpers.tiny_settings(batch__policy=policy)).step(0, 0).bins:
            positions = batch.mlm_positions[batch.mlm_labels >= 0]
            assert (positions.diff() > 0).all()
            assert len(positions) == batch.num_predictions


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=30), st.data())
def test_a_bin_always_has_room_for_its_masks(sizes: list[tuple[int, int]], choice: st.DataObject) -> None:
    lengths = np.array([length for length, _ in sizes], dtype=np.int32)
    predictions = np.array([min(length, wanted) for length, wanted in sizes], dtype=np.int32)
    capacity = Capacity(
        tokens=choice.draw(st.integers(40, 200)), sequences=choice.draw(st.integers(1, 20)), predictions=0
    )
    room = capacity_for_static_masks(lengths, predictions, capacity)
    rows = choice.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=capacity.sequences))
    while lengths[rows].sum() > capacity.tokens:
        rows.pop()
    assert predictions[rows].sum() <= room
    if lengths.max() <= capacity.tokens:
        assert predictions.max() <= room, "a row that fits no bin would be dealt for ever"


def test_masks_of_any_number_train(tmp_path: Path) -> None:
    """Rows with no prediction, and rows with all of them: no bin overflows, none is lost."""
    words = Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(60))), lower_case=True)
    draw = np.random.default_rng(1)
    made = []
    for number in range(120):
        length = int(draw.integers(3, 64))
        positions = list(range(1, length - 1)) if number % 3 else []
        made.append(helpers.example([2, *[7] * (length - 2), 3], 2, False, positions, [9] * len(positions)))
    helpers.write_examples(tmp_path / "data", made, words, rows_per_shard=50)
    data = open_data(tmp_path / "data")
    for policy, budget in itertools.product(POLICIES, (64, 200)):
        settings = helpers.tiny_settings(
            model__vocab_size=65, batch__sequences=120, batch__policy=policy, batch__token_budget=budget
        )
        step = Loader(data, settings).step(0, 0)
        assert step.num_predictions == sum(batch.num_predictions for batch in step.bins)
        assert step.num_predictions == sum(int(one.masks.counts.sum()) for one in made if one.masks)
