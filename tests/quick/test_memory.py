"""The estimate of memory: its terms, what fits by it, and what is said where nothing does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from bertrain.base.errors import UserError
from bertrain.base.formatting import GIB
from bertrain.base.machine import cgroup_memory
from bertrain.config.model_size import count_parameters
from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import resolve
from bertrain.config.settings import ModelSettings, Settings
from bertrain.data.formats.shards import Shards
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert
from bertrain.model.initialization import uninitialized
from bertrain.optim import muon, rules
from bertrain.optim.registry import OPTIMIZERS, build_optimizer
from bertrain.planning.memory import BinSize, estimate
from bertrain.planning.memory_fit import Place, largest_budget, refuse_too_little, with_budget
from bertrain.training import resolve_auto
from tests import helpers
from tests.live_memory import LiveMemory


@pytest.mark.parametrize("recipe", recipe_names())
def test_parameters_are_counted_without_building_them(recipe: str) -> None:
    settings = resolve(recipe).model
    for model in [settings] + [replace(settings, nsp=False)] * settings.nsp:
        assert_counted(model)


@pytest.mark.parametrize("head", get_args(get_type_hints(ModelSettings)["head"]))
@pytest.mark.parametrize("family", ["bert", "modern"])
def test_parameters_of_every_head_are_counted(family: str, head: str) -> None:
    assert_counted(replace(helpers.tiny_settings(model__family=family).model, head=head, num_labels=5))


def assert_counted(model: ModelSettings) -> None:
    parameters = dict(uninitialized(model).named_parameters())
    matrices = sum(p.numel() for name, p in parameters.items() if name.startswith("layers") and p.ndim > 1)
    assert count_parameters(model) == (sum(p.numel() for p in parameters.values()), matrices)


def test_a_sharded_optimizer_is_counted_by_its_share() -> None:
    settings, size = resolve("bert-base-phase1", [("optimizer.sharded", "true")]), BinSize(4096, 700, 128)
    one, four = (estimate(settings, size, ranks=ranks, engine="fused", on_gpu=True) for ranks in (1, 4))
    assert four.always["moments"] == one.always["moments"] // 4
    assert four.always["weights"] == one.always["weights"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rules_state_is_counted(name: str) -> None:
    """As many bytes as its buffers take; what pads the arena is left out."""
    settings, size = helpers.tiny_settings(optimizer__name=name), BinSize(256, 40, 64)
    model = Bert(settings.model)
    buffers = build_optimizer(Arena(model), settings.optimizer).state().values()
    told = estimate(settings, size, ranks=1, engine="plain", on_gpu=False)
    assert told.always["moments"] == sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    assert told.always["a checkpoint being written"] == told.always["moments"] + told.always["weights"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_every_rule_needs_on_the_way_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "WINDOW", 1024)  # small beside a model that is small itself
    monkeypatch.setattr(muon, "WINDOW", 1024)  # a single matrix
    sizes = {"model__hidden_size": 128, "model__intermediate_size": 512, "model__num_layers": 32}
    settings = helpers.tiny_settings(**sizes, optimizer__name=name)
    arena = Arena(Bert(settings.model))
    optimizer = build_optimizer(arena, settings.optimizer)
    arena.gradients.normal_()
    with LiveMemory() as live:
        optimizer.step(1e-3, torch.tensor(0.5), torch.tensor(1.0))
    assert 1.0 <= live.peak / (optimizer.TEMPORARY_BYTES * len(arena.values)) <= 1.05


# --- what fits, and what is said --------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards.open(helpers.make_data(tmp_path_factory.mktemp("data")))


def place(shards: Shards, gib: float, ranks: int = 1) -> Place:
    return Place(shards, ranks, engine="plain", on_gpu=False, bytes=int(gib * GIB), label="free")


def large_settings(**overrides: object) -> Settings:
    return helpers.tiny_settings(
        model__hidden_size=256, model__num_layers=8, model__num_heads=4, model__intermediate_size=1024,
        **({"batch__token_budget": 65536} | overrides),
    )  # fmt: skip


def test_the_largest_budget_fits_and_the_next_does_not(shards: Shards) -> None:
    settings, there = large_settings(), place(shards, 1.0)
    budget = largest_budget(settings, there, 1 << 20)
    assert budget % 64 == 0
    assert there.holds(with_budget(settings, budget))
    assert not there.holds(with_budget(settings, budget + 64))
    assert largest_budget(settings, there, 640) == 640
    assert largest_budget(settings, place(shards, 0.1), 1 << 20) == 0


def test_a_run_that_does_not_fit_is_told_each_way_that_would(shards: Shards) -> None:
    settings = large_settings()
    needs = {
        what: place(shards, 0).needs(large_settings(train__activation_checkpointing=what)).total / GIB
        for what in ("none", "selective", "full")
    }
    refuse_too_little(settings, place(shards, 1.01 * needs["none"]), is_begun=False)
    with helpers.refused("out-of-memory", f"{needs['none']:.1f} GiB") as said:
        refuse_too_little(settings, place(shards, 1.01 * needs["selective"]), is_begun=False)
    budget = largest_budget(settings, place(shards, 1.01 * needs["selective"]), 65536)
    assert "activations of a bin" in str(said.value)
    assert str(said.value).endswith(
        f"set --batch.token_budget {budget}, or --train.activation_checkpointing selective, or "
        "--train.activation_checkpointing full"
    )
    with pytest.raises(UserError, match=r"set --train.activation_checkpointing full$"):
        refuse_too_little(settings, place(shards, 1.01 * needs["full"]), is_begun=True)
    with pytest.raises(UserError, match=r"a smaller model"):
        refuse_too_little(settings, place(shards, 0.2), is_begun=False)


def test_what_does_not_suffice_alone_is_told_together(shards: Shards) -> None:
    settings = large_settings(batch__token_budget=64)
    sharded = replace(settings, optimizer=replace(settings.optimizer, sharded=True))
    sparing = replace(sharded, train=replace(sharded.train, activation_checkpointing="full"))
    there = place(shards, 0, ranks=8)
    enough = replace(there, bytes=there.needs(sparing).total)
    if any(enough.holds(other) for other in (sharded, replace(sparing, optimizer=settings.optimizer))):
        pytest.fail("the case must need both")
    with pytest.raises(UserError, match=r"set --train.activation_checkpointing full --optimizer.sharded true$"):
        refuse_too_little(settings, enough, is_begun=True)


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    def limit(folder: Path, most: str, used: int, inactive: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")

    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    assert cgroup_memory(tmp_path / "none", own) is None
    root = tmp_path / "root"
    limit(root / "outer/inner", "max", 10, 0)
    assert cgroup_memory(root, own) is None
    limit(root / "outer", "1000", 700, 50)
    assert cgroup_memory(root, own) == 350
    limit(root / "outer/inner", "500", 400, 0)
    assert cgroup_memory(root, own) == 100
    limit(root / "outer/inner", "300", 400, 0)
    assert cgroup_memory(root, own) == 0


def test_the_budget_is_limited_by_memory(shards: Shards) -> None:
    settings = large_settings(batch__sequences=100000, batch__auto=True)
    there = place(shards, 4.0)
    budget = resolve_auto.estimate_token_budget(settings, there)
    assert 0 < budget < resolve_auto.share_of_a_step(settings, there)
    assert 0.85 <= there.needs(with_budget(settings, budget)).total / there.bytes <= resolve_auto.FILLED
    assert resolve_auto.estimate_token_budget(settings, replace(there, bytes=2 * there.bytes)) > 2 * budget
