"""What each rank computes: against the batches it is really given, and against PyTorch's own count of operations."""

from __future__ import annotations

import csv
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from bertrain.config.model_size import multiply_adds
from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import resolve
from bertrain.data.feed.balance import (
    Balance,
    better_budget,
    describe_balance,
    imbalance,
    mean_idle_share,
    per_rank,
)
from bertrain.data.feed.batching import POLICIES
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.shards import Shards
from bertrain.data.formats.source import DataSource
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.attention import RaggedPlan
from tests import helpers


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards.open(helpers.make_data(tmp_path_factory.mktemp("data")))


def balance_of(*work: int, num_bins: int = 0) -> Balance:
    return Balance(num_bins or sum(one > 0 for one in work), [], [], list(work))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_rank_knows_what_all_of_them_compute(shards: Shards, policy: str, world: int) -> None:
    settings = helpers.tiny_settings(batch__policy=policy)
    steps = [Loader(shards, settings, rank=rank, world=world).step(3, 72) for rank in range(world)]
    told = steps[0].balance
    assert all(step.balance == told for step in steps)
    assert told.num_bins == sum(len(step.bins) for step in steps)
    for rank, step in enumerate(steps):
        assert told.tokens[rank] == sum(len(batch.input_ids) for batch in step.bins)
        assert told.attention[rank] == sum(length**2 for batch in step.bins for length in batch.sequence_lengths)
    assert (world == 7) == (min(told.work) == 0), "six bins or so: with seven ranks, one has none"


def test_work_is_what_the_model_multiplies(shards: Shards) -> None:
    """Counted by PyTorch, which sees next sentences too, and the padding of sequences that attend in one group."""
    settings = helpers.tiny_settings(batch__sequences=6)
    model, width = helpers.build_model(settings.model).eval(), settings.model.hidden_size
    step = Loader(shards, settings).step(0, 0)
    counted = 0
    for batch in step.bins:
        with FlopCounterMode(display=False) as counter:  # with gradients: it does not know the CPU's own attention
            model(batch)
        next_sentences = len(batch.nsp_labels) * (width * width + 2 * width)
        padded = sum(group.count * group.length**2 for group in RaggedPlan.of(batch).groups)
        padding = padded - sum(length**2 for length in batch.sequence_lengths)
        counted += counter.get_total_flops() // 2 - next_sentences - settings.model.num_layers * 2 * width * padding
    assert step.balance.work == [counted]


def test_work_of_bert_base_by_hand() -> None:
    """Its 85 million weights in layers, once for each token; 24 million of the head for each prediction."""
    model = helpers.tiny_settings(
        model__hidden_size=768, model__num_layers=12, model__num_heads=12, model__intermediate_size=3072
    ).model
    tokens, none = np.array([1]), np.array([0])
    assert multiply_adds(model, tokens, none, none).tolist() == [84_934_656]
    assert multiply_adds(model, none, tokens, none).tolist() == [12 * 2 * 768]
    assert multiply_adds(model, none, none, tokens).tolist() == [768 * (768 + helpers.vocab_size())]


def test_bins_go_round_the_ranks() -> None:
    assert per_rank([1, 2, 4, 8, 16], 2).tolist() == [21, 10]
    assert per_rank([[1, 10], [2, 20], [4, 40]], 2).tolist() == [[5, 50], [2, 20]]
    assert per_rank([3], 3).tolist() == [3, 0, 0]
    assert imbalance([6, 3, 3]) == 1.5


@pytest.mark.parametrize(
    ("work", "idle"), [((5,), 0.0), ((5, 5), 0.0), ((4, 4, 4, 0), 0.25), ((6, 3), 0.25), ((8, 0, 0, 0), 0.75)]
)
def test_the_idle_share_by_hand(work: tuple[int, ...], idle: float) -> None:
    assert balance_of(*work).idle_share == pytest.approx(idle)


def test_what_is_said() -> None:
    even, uneven = [balance_of(4, 4, 4, 4)], [balance_of(4, 4, 4, 0)]
    assert describe_balance(even) == "4 bins on 4 ranks: 0.0% of the ranks' time is idle (estimated from lengths)"
    told = "3 bins on 4 ranks: 25.0% of the ranks' time is idle (estimated from lengths)"
    assert describe_balance(uneven) == f"{told}; 3 ranks would be as fast"
    assert describe_balance(uneven, (384, even)) == f"{told}; --batch.token_budget 384 makes 4 bins, 0.0% idle"
    varying = [balance_of(8, 4, num_bins=3), balance_of(8, 8, num_bins=4)]
    assert describe_balance(varying).startswith("3 to 4 bins on 2 ranks: 12.5% of")
    assert describe_balance(varying).endswith("lengths)"), "there is no way out to offer"


def test_a_better_budget_is_found_and_true(shards: Shards) -> None:
    """Three bins on four ranks: what is proposed, when it is done, is as was told."""
    settings = helpers.tiny_settings(batch__token_budget=520)
    loader = Loader(shards, settings, world=4)
    assert loader.step(0, 0).num_bins == 3
    steps = loader.sizes_ahead(0)
    better = better_budget(partial(loader.balances, steps), 520, 64)
    assert better is not None
    budget, promised = better
    then = Loader(shards, helpers.tiny_settings(batch__token_budget=budget), world=4)
    assert [then.step(k, 24 * k).balance for k in range(len(promised))] == promised
    assert mean_idle_share(promised) < 0.05 < 0.2 < mean_idle_share(loader.balances(steps, 520))


def test_no_budget_helps_where_there_are_more_ranks_than_examples(shards: Shards) -> None:
    loader = Loader(shards, helpers.tiny_settings(batch__sequences=3), world=32)
    assert better_budget(partial(loader.balances, loader.sizes_ahead(0)), 64, 64) is None


OWN_RANKS = {"mlperf-reference-448": 8, "intel-large-phase1": 2, "intel-large-phase2": 2, "gpu-variability-4x16": 4} | {
    name: int(found[1]) * int(found[2])
    for name in recipe_names()
    if (found := re.search(r"-(\d+)x(\d+)x\d+", name)) and not name.startswith("contest")
}
"""The ranks that each system ran a recipe on."""


class Lengths(DataSource):
    """Data of which only the lengths are known: drawn from those of Wikipedia."""

    predictions, folder, vocabulary = None, Path("wikipedia"), Vocabulary.load()

    def __init__(self, longest: int) -> None:
        with open(Path(__file__).parents[2] / "benchmarks" / f"wikipedia-{longest}.csv") as file:
            counts = np.array([int(entry["sequences"]) for entry in csv.DictReader(file)], dtype=np.float64)
        chosen = np.random.default_rng(0).choice(len(counts), 100_000, p=counts / counts.sum())
        self.lengths = (chosen + 1).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, rows: Ints) -> Any:
        return SimpleNamespace(segment_b=np.ones(len(rows), dtype=np.int32))


@pytest.mark.parametrize(("recipe", "world"), OWN_RANKS.items())
def test_no_recipe_leaves_its_own_ranks_idle(recipe: str, world: int) -> None:
    settings = resolve(recipe)
    loader: Any = Loader(Lengths(settings.data.max_seq_length), settings, world=world)
    steps = loader.sizes_ahead(0)[:2]
    balances = loader.balances(steps, settings.batch.token_budget)
    assert mean_idle_share(balances) < 0.03
    real = sum(int(lengths.sum()) for lengths, _ in steps)
    computed = sum(world * max(balance.tokens) for balance in balances)
    assert real / computed > 0.85, "bins have much room left, which is computed too"


def test_every_part_of_a_step_has_its_shares_of_the_lengths() -> None:
    """As Samsung fills the 16 examples of a GPU; every stratum is read once before any of it is read again."""
    data = Lengths(512)
    settings = resolve("mlperf-samsung-128x8x16", {"batch.sequences": "64"})
    loader: Any = Loader(data, settings, world=4)
    seen = []
    for position in range(0, 6400, 64):
        _, rows = loader._rows(position)
        strata = ((data.lengths[rows] - 1) // 128).reshape(4, 16)
        assert (np.sort(strata) == [0] * 6 + [1] * 3 + [2] * 2 + [3] * 5).all()
        seen.append(rows)
    assert len(np.unique(np.concatenate(seen))) == 6400
    again: Any = Loader(data, settings, world=1)
    assert (again._rows(640)[1] == seen[10]).all(), "on any number of ranks, from any position"
    with helpers.refused("conflicting-settings", "multiple"):
        resolve("mlperf-samsung-128x8x16", {"batch.sequences": "50"})
    with helpers.refused("invalid-shares"):
        resolve("mlperf-samsung-128x8x16", {"batch.shares": "6 -3"})
