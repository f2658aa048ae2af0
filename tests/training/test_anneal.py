"""Annealing: a decay from any checkpoint of a run, in a run of its own that is the same to the bit as one decay."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertrain.data.formats.shards import Shards
from bertrain.run.folder import Run
from bertrain.training.anneal import anneal, resolve_annealing
from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.launched import records
from tests.miniature_tasks import command_line

STABLE: dict[str, Any] = {
    "schedule__warmup_steps": 2, "schedule__decay": "constant", "train__max_steps": 6, "checkpoint__every_steps": 1,
    "checkpoint__keep": 9, "optimizer__name": "stableadamw", "train__deterministic": True,
}  # fmt: skip


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def content(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_annealing_is_the_decay_of_one_run_to_the_bit(family: str, tmp_path: Path) -> None:
    data, stable, annealed = helpers.make_data(tmp_path), tmp_path / "stable", tmp_path / "annealed"
    settings = helpers.tiny_settings(**STABLE, **helpers.FAMILIES[family])
    pretrain(settings, data, stable)
    before = content(stable)

    assert anneal(stable, annealed, 4, which="3").step == 7
    assert content(stable) == before, "the first run stays as it is"
    decay = {"schedule__decay": "1-sqrt", "schedule__decay_start": 3, "train__max_steps": 7}
    whole = tmp_path / "whole"
    pretrain(helpers.tiny_settings(**STABLE | decay, **helpers.FAMILIES[family]), data, whole)
    assert_equal(state(annealed, 7), state(whole, 7))
    steps = records(annealed)
    assert [record["step"] for record in steps] == [4, 5, 6, 7]
    base = settings.optimizer.learning_rate
    assert [record["learning_rate"] for record in steps] == pytest.approx(
        [base * (1 - (share / 4) ** 0.5) for share in range(4)]
    )
    for name in ("learning_rate", "loss", "tokens", "samples"):
        assert [record[name] for record in steps] == [record[name] for record in records(whole)[3:]], name
    end = json.loads((annealed / "metrics.jsonl").read_text().splitlines()[-1])
    assert (end["step"], end["samples"]) == (7, 7 * settings.batch.sequences)

    # Killed before and after its first checkpoint, it ends in the same state; the same command continues it.
    for kept in (0, 2):
        repeated = tmp_path / f"repeated-{kept}"
        anneal(stable, repeated, 4, which="3")
        for path in sorted((repeated / "checkpoints").glob("step-*"))[kept:]:
            shutil.rmtree(path)
        resume(repeated) if kept else anneal(stable, repeated, 4)
        assert_equal(state(repeated, 7), state(whole, 7))
        assert [record["step"] for record in records(repeated)] == [4, 5, 6, 7]


def test_the_first_run_may_go_on_and_lose_the_checkpoint(tmp_path: Path) -> None:
    """An annealing that has saved needs the first run no more; one that has not names what is missing."""
    data, stable, annealed = helpers.make_data(tmp_path), tmp_path / "stable", tmp_path / "annealed"
    pretrain(helpers.tiny_settings(**STABLE), data, stable)
    anneal(stable, annealed, 2, which="4")
    done = state(annealed, 6)
    shutil.rmtree(stable / "checkpoints" / "step-00000004")
    shutil.rmtree(annealed / "checkpoints" / "step-00000006")
    anneal(stable, annealed, 2)
    assert_equal(state(annealed, 6), done)
    shutil.rmtree(annealed / "checkpoints")
    with helpers.refused("unknown-checkpoint", "step 4", "1, 2, 3, 5, 6"):
        resume(annealed)


def test_the_command(tmp_path: Path) -> None:
    """On two ranks, with another shape and other data, and what other commands make of the run."""
    data, stable = helpers.make_data(tmp_path), tmp_path / "stable"
    other = helpers.make_data(tmp_path / "other", documents=20)
    pretrain(helpers.tiny_settings(**STABLE), data, stable)
    words = ("anneal", stable, "--run", tmp_path / "annealed", "--steps", 2, "--checkpoint", 5, "--data", other)
    shape = ("--schedule.decay", "linear", "--schedule.floor", "0.5", "--nproc", 2)
    said = helpers.bertrain(*words, *shape).stdout
    assert "going on from" in said
    run = Run.open(tmp_path / "annealed")
    assert run.data == other
    assert (run.settings.train.max_steps, run.settings.schedule.decay_start) == (7, 5)
    base = run.settings.optimizer.learning_rate
    assert [record["learning_rate"] for record in records(run.folder)] == pytest.approx([base, 0.75 * base])
    for command in (("report",), ("logs",), ("watch", "--once"), ("weights", "show")):
        command_line(*command, run.folder)
    assert "[other-run]" in command_line(*words, "--schedule.decay", "cosine", check=False).err


@pytest.mark.parametrize(
    ("changed", "which", "code", "named"),
    [
        ({}, "1", "not-at-base-rate", ["step 1", "base rate"]),  # in the warm-up
        ({"schedule__decay": "linear", "schedule__decay_share": 0.5}, "5", "not-at-base-rate", ["step 5"]),
        ({}, "9", "unknown-checkpoint", ["step 9"]),
    ],
)
def test_what_cannot_be_annealed_is_refused(
    changed: dict[str, Any], which: str, code: str, named: list[str], tmp_path: Path
) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(**STABLE | changed), data, run)
    with helpers.refused(code, *named):
        anneal(run, tmp_path / "annealed", 2, which=which)
    assert not (tmp_path / "annealed").exists()


def test_only_the_shape_of_the_decay_may_change(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(**STABLE)
    pretrain(settings, data, run)
    with helpers.refused("fixed-setting", "optimizer.learning_rate"):
        anneal(run, tmp_path / "annealed", 2, overrides={"optimizer.learning_rate": 1e-3})
    keep = {"train__init_optimizer": "keep", "train__init_progress": "keep"}
    with helpers.refused("missing-init", "train.init_optimizer"):
        pretrain(helpers.tiny_settings(**STABLE | keep), data, tmp_path / "other")
    with helpers.refused("other-model", "train.init_progress"):
        changed = helpers.tiny_settings(**STABLE | keep, model__hidden_dropout=0.3)
        pretrain(changed, data, tmp_path / "other", init=str(run))
    with helpers.refused("conflicting-settings", "train.init_optimizer keep"):
        helpers.tiny_settings(**STABLE, train__init_progress="keep")


def test_a_run_of_a_budget_is_annealed_with_its_own_bins(tmp_path: Path) -> None:
    """Its warm-up, a share of an unknown length, began at its first fit; its bins were found on the machine."""
    data, stable = helpers.make_data(tmp_path), tmp_path / "stable"
    settings = helpers.tiny_settings(**STABLE | {"schedule__warmup_steps": 0, "schedule__warmup_share": 0.5})
    train = replace(settings.train, budget="10m", fits="2:6", max_steps=6)
    settings = replace(settings, train=train, batch=replace(settings.batch, auto=True))
    Run.create(stable, settings, Shards.open(data), "", "")
    resume(stable)
    annealing = resolve_annealing(stable, tmp_path / "annealed", 4, which="6")
    assert not annealing.settings.batch.auto
    assert annealing.settings.batch.token_budget == settings.batch.token_budget
    assert anneal(stable, tmp_path / "annealed", 4, which="6").step == 10
    with helpers.refused("not-at-base-rate", "step 3"):
        resolve_annealing(stable, tmp_path / "early", 4, which="3")
