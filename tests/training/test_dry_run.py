"""`pretrain --dry-run` says of a run what it will be; on a CPU it computes one bin for that."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from bertrain.data.feed.balance import better_budget, describe_balance
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.planning.memory import GIB, PROCESS
from bertrain.training.announce import dry_run
from tests import helpers
from tests.miniature_tasks import command_line


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards.open(helpers.make_data(tmp_path_factory.mktemp("data")))


def test_the_time_on_a_cpu_is_predicted_from_one_bin(shards: Shards) -> None:
    settings, threads = helpers.tiny_settings(train__max_steps=2), torch.get_num_threads()
    shown = dry_run(settings, shards.folder)
    assert "time by `bertrain plan` for 1 rank on this CPU: " in shown
    assert "for 2 steps" in shown
    assert "rough estimate" not in shown
    assert torch.get_num_threads() == threads
    shared = dry_run(settings, shards.folder, world=1000)
    assert "no prediction" in shared, "ranks that share cores"
    assert "rough estimate" in shared


def test_a_better_budget_is_named(shards: Shards) -> None:
    settings = helpers.tiny_settings(batch__token_budget=520)
    loader = Loader(shards, settings, world=4)
    better = better_budget(partial(loader.balances, loader.sizes_ahead(0)), 520, 64)
    assert better is not None
    budget, promised = better
    told = " ".join(dry_run(settings, shards.folder, world=4).split())  # its lines are wrapped
    assert f"; --batch.token_budget {budget} makes 4 bins" in told
    told = dry_run(helpers.tiny_settings(batch__token_budget=budget), shards.folder, world=4)
    assert f"balance: {describe_balance(promised)}" in told.splitlines()
    assert "balance:" not in dry_run(settings, shards.folder, world=1)


def test_the_slice_is_named(shards: Shards) -> None:
    told = dry_run(helpers.tiny_settings(data__slice="0:0.5", train__max_steps=30), shards.folder)
    half = len(shards) // 2
    tokens = int(shards.lengths[:half].sum())
    assert f"data: {half} of {len(shards)} examples (data.slice 0:0.5), {tokens:,} tokens" in told
    assert f"about {30 * 24 / half:.1f} epochs" in told


def test_memory_and_what_auto_means_are_shown(shards: Shards) -> None:
    settings = helpers.tiny_settings(train__precision="auto", batch__auto=True, batch__token_budget=64)
    shown = dry_run(settings, shards.folder)
    assert "train.precision auto: " in shown
    assert "batch.auto: bins of up to " in shown
    assert "memory on each rank: about " in shown
    assert f"the process {PROCESS / GIB:.2f}" in shown


def test_what_may_end_the_run_is_named_and_what_it_would_refuse_is_refused(shards: Shards, tmp_path: Path) -> None:
    told = dry_run(helpers.tiny_settings(train__max_samples=48), shards.folder)
    assert "steps: 20, about 4.9 epochs; fewer if train.max_samples 48 comes first" in told
    with helpers.refused("missing-data", "nowhere"):
        dry_run(helpers.tiny_settings(evaluate__data=tmp_path / "nowhere"), shards.folder)


def test_it_sees_what_is_in_the_run_folder(shards: Shards, tmp_path: Path) -> None:
    command = ("pretrain", "bert-tiny", "--data", shards.folder, "--run", tmp_path / "run", *helpers.tiny_arguments())
    assert command_line(*command, "--dry-run").code == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("of somebody")
    said = command_line(*command, "--dry-run", check=False)
    assert (said.code, "[occupied-folder]" in said.err) == (2, True), said.err


def test_the_time_of_a_run_whose_steps_have_shares(shards: Shards) -> None:
    assert "time by `bertrain plan`" in dry_run(helpers.tiny_settings(batch__shares="1 1"), shards.folder)
