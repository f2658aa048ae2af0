"""Training is the same on any number of ranks, with any budget and policy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from bertrain.data.feed.batching import POLICIES
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.training.start import pretrain
from tests import helpers
from tests.launched import records
from tests.miniature_tasks import command_line

TOLERANCE = 1e-5
# With seed 1 LAMB turns the rounding of one value into 1e-5 of the largest; with 2, 3 and 4 nothing exceeds 4e-7.
SEED = 2
LAMB = {"optimizer__name": "lamb", "batch__token_budget": 520, "train__seed": SEED}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("data"))


def assert_same_training(run: Path, reference: Path) -> None:
    for step, (one, other) in enumerate(zip(helpers.losses(run), helpers.losses(reference), strict=True), start=1):
        assert abs(one - other) <= TOLERANCE * abs(other), f"loss of step {step}"
    weights, expected = helpers.final_weights(run), helpers.final_weights(reference)
    assert weights.keys() == expected.keys()
    # By distance over the whole and by tensor, in units of the tensor's size: a bias near zero has no relative error.
    everything = torch.cat([expected[name].flatten() for name in expected])
    difference = torch.cat([(weights[name] - expected[name]).flatten() for name in expected])
    assert difference.norm() <= TOLERANCE * everything.norm()
    for name, tensor in weights.items():
        scale = max(float(expected[name].abs().max()), 1e-2)
        assert float((tensor - expected[name]).abs().max()) <= TOLERANCE * scale, name


@pytest.fixture(scope="module")
def alone(data: Path) -> Callable[[str], Path]:
    """The run of one rank of a family, which the runs of several are compared with."""

    @cache
    def run(family: str) -> Path:
        pretrain(helpers.tiny_settings(**LAMB, **helpers.FAMILIES[family]), data, data.parent / family)
        return data.parent / family

    return run


def test_replaced_words_across_ranks(data: Path, tmp_path: Path) -> None:
    """The generator draws the same words for a bin on whatever rank."""
    pretrain(helpers.tiny_settings(train__max_steps=5), data, tmp_path / "generator")
    given = {"model__rtd": 50, "data__generator": tmp_path / "generator", "train__max_steps": 8}
    given |= {"batch__token_budget": 520, "train__seed": SEED}
    pretrain(helpers.tiny_settings(**given), data, tmp_path / "1")
    arguments = "--nproc", 2, *helpers.tiny_arguments(**given)
    helpers.bertrain("pretrain", "bert-tiny", "--data", data, "--run", tmp_path / "2", *arguments)
    assert_same_training(tmp_path / "2", tmp_path / "1")
    rtd = [[step["rtd_loss"] for step in records(tmp_path / name)] for name in ("1", "2")]
    assert rtd[0] == pytest.approx(rtd[1], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "world"),
    [
        ("bert", 2), ("bert", 4), ("modern", 3),
        *(pytest.param(*other, marks=pytest.mark.long) for other in (("bert", 3), ("modern", 2), ("modern", 4))),
    ],
)  # fmt: skip
def test_across_ranks_with_dropout(
    data: Path, alone: Callable[[str], Path], tmp_path: Path, family: str, world: int
) -> None:
    """Real processes, dropout on; with three bins to a step, the fourth of four ranks has none."""
    assert Loader(Shards.open(data), helpers.tiny_settings(**LAMB)).step(0, 0).num_bins == 3
    run, arguments = tmp_path / "run", helpers.tiny_arguments(**LAMB, **helpers.FAMILIES[family])
    command_line("pretrain", "bert-tiny", "--data", data, "--run", run, "--nproc", world, *arguments)
    assert len(helpers.losses(run)) == 20
    assert_same_training(run, alone(family))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_compiled_engine_across_ranks_with_dropout(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Traced, and without the backend that takes minutes to compile C++; the long test has that, too."""
    choose = f"import functools, torch\ntorch.compile = functools.partial(torch.compile, backend={backend!r})\n"
    (tmp_path / "sitecustomize.py").write_text(choose)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    common = {
        "batch__token_budget": 520, "train__max_steps": 4, "train__seed": SEED, "model__num_layers": 1,
        "train__kernels": "compiled",
    }  # fmt: skip
    without = {"model__hidden_dropout": 0, "model__attention_dropout": 0, "train__kernels": "plain"}
    for name, world, given in (("1", 1, common), ("2", 2, common), ("without", 1, common | without)):
        done = command_line(
            "pretrain", "bert-tiny", "--data", data, "--run", tmp_path / name, "--nproc", world,
            *helpers.tiny_arguments(**given),
        )  # fmt: skip
        said = done.err + capfd.readouterr().err
        assert "torch.compile" not in said, "neither failed nor compiled again"
    assert_same_training(tmp_path / "2", tmp_path / "1")
    with_dropout, exact = helpers.losses(tmp_path / "1")[0], helpers.losses(tmp_path / "without")[0]
    assert abs(with_dropout - exact) > TOLERANCE * exact


@pytest.mark.parametrize("family", ["bert", pytest.param("modern", marks=pytest.mark.long)])
def test_growing_steps_across_ranks(data: Path, tmp_path: Path, family: str) -> None:
    """A ramp in tokens, sharded StableAdamW, a decay of 1 - sqrt at the end, and a bias from the data."""
    ramp = {"batch__sequences": 0, "batch__tokens": 900, "batch__ramp_from": 100, "batch__ramp_tokens": 5000}
    others = {"optimizer__name": "stableadamw", "schedule__decay": "1-sqrt", "schedule__decay_share": 0.3}
    others |= {"model__initial_bias": "frequencies"}
    common = ramp | others | {"train__seed": SEED, "train__max_steps": 16} | helpers.FAMILIES[family]
    for world in (1, 3):
        arguments = helpers.tiny_arguments(**common, optimizer__sharded=world > 1)
        command_line(
            "pretrain", "bert-tiny", "--data", data, "--run", tmp_path / str(world), "--nproc", world, *arguments
        )
    tokens = [step["tokens"] for step in records(tmp_path / "1")]
    assert tokens[0] <= 100
    assert 400 < tokens[-1] <= 900
    assert tokens == [step["tokens"] for step in records(tmp_path / "3")]
    assert_same_training(tmp_path / "3", tmp_path / "1")


@pytest.mark.parametrize("family", ["bert", pytest.param("modern", marks=pytest.mark.long)])
def test_across_budgets_and_policies_without_dropout(data: Path, tmp_path: Path, family: str) -> None:
    no_dropout = helpers.FAMILIES[family] | {"model__hidden_dropout": 0, "model__attention_dropout": 0}
    no_dropout |= {"train__max_steps": 10, "train__seed": SEED}
    pretrain(helpers.tiny_settings(**no_dropout), data, tmp_path / "reference")
    changes: list[dict[str, object]] = [
        *({"batch__policy": policy, "batch__token_budget": 200} for policy in POLICIES),
        *({"batch__token_budget": budget} for budget in (64, 1024)),
        {"batch__policy": "packed", "batch__packing": "spfhp"},
        {"batch__policy": "exchange", "batch__group_size": 1},
    ]
    for number, change in enumerate(changes):
        pretrain(helpers.tiny_settings(**change, **no_dropout), data, tmp_path / str(number))
        assert_same_training(tmp_path / str(number), tmp_path / "reference")


def test_groups_that_do_not_divide_the_ranks_are_refused(data: Path, tmp_path: Path) -> None:
    groups_of_two = {"batch__policy": "exchange", "batch__group_size": 2}
    with helpers.refused("bad-group-size", "--batch.group_size 2", "1"):
        pretrain(helpers.tiny_settings(**groups_of_two), data, tmp_path / "run")
    command = ("pretrain", "bert-tiny", "--data", data, "--run", tmp_path / "run", "--nproc", 3)
    refused = command_line(*command, *helpers.tiny_arguments(**groups_of_two), check=False)
    assert refused.code == 2
    assert "3" in refused.err
    assert refused.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_dropout_is_on_where_it_is_said_to_be(data: Path, tmp_path: Path) -> None:
    """Guards the two tests above: dropout changes the losses."""
    pretrain(helpers.tiny_settings(train__max_steps=2), data, tmp_path / "on")
    pretrain(
        helpers.tiny_settings(train__max_steps=2, model__hidden_dropout=0, model__attention_dropout=0),
        data,
        tmp_path / "off",
    )
    assert helpers.losses(tmp_path / "on") != helpers.losses(tmp_path / "off")


def test_the_metrics_say_what_each_rank_computes(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As the loader knows it, on both ranks; and the run says at its start how idle they will be."""
    settings = {"batch__token_budget": 520, "train__max_steps": 3, "log__every_steps": 1, "log__level": "verbose"}
    run = tmp_path / "run"
    command_line(
        "pretrain", "bert-tiny", "--data", data, "--run", run, "--nproc", 2, *helpers.tiny_arguments(**settings)
    )
    said = capfd.readouterr().out
    assert said.count("balance: 3 bins on 2 ranks: 25.") == 1
    loader = Loader(Shards.open(data), helpers.tiny_settings(**settings), world=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 3
    for number, step in enumerate(steps):
        balance = loader.step(number, 24 * number).balance
        assert (step["rank_tokens"], step["rank_attention"]) == (balance.tokens, balance.attention)
        assert step["idle_share"] == pytest.approx(balance.idle_share)
        assert f"; ranks idle {balance.idle_share:.1%}" in said
