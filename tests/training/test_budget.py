"""A budget is fitted again and again, and a run with the same fits is the same run to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.resolve import resolve, to_toml
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.training.agenda import Agenda
from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.launched import records

BUDGETED: dict[str, Any] = {
    "batch__sequences": 8, "evaluate__max_examples": 16, "schedule__warmup_steps": 0, "schedule__warmup_share": 0.1,
    "train__deterministic": True, "train__budget": "60s", "checkpoint__every_steps": 5,
    "checkpoint__keep": 99, "log__every_steps": 5,
}  # fmt: skip


class Clock:
    """Time passes with each look at it, and later faster: the machine becomes slower."""

    def __init__(self, pace: float = 0.1, slower_after: float = 20.0) -> None:
        self.time, self._pace, self._slower_after = 0.0, pace, slower_after

    def __call__(self) -> float:
        self.time += self._pace if self.time < self._slower_after else 3 * self._pace
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setitem(Agenda.__init__.__kwdefaults__, "now", clock)
    return clock


def weights(run: Path, step: int) -> list[bytes]:
    """The weights and moments of a checkpoint."""
    folder = run / "checkpoints" / checkpoint.checkpoint_name(step)
    return [(folder / name).read_bytes() for name in (checkpoint.MODEL, checkpoint.OPTIMIZER)]


def test_a_run_with_the_same_fits_is_the_same_run(clock: Clock, tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    last = pretrain(helpers.tiny_settings(**BUDGETED), data, run).step
    settings = Run.open(run).settings
    fits = settings.train.fits.split(",")
    assert len(fits) > 3, "the machine became slower"
    assert fits[-1] == f"{last}:{last}", "the end is recorded, so that it never moves again"
    rates = [record["learning_rate"] for record in records(run)]
    assert rates[-1] < 0.1 * max(rates)

    # Its settings as a recipe, without the budget, repeat it; no clock is asked.
    recipe = tmp_path / "repeat.toml"
    recipe.write_text(to_toml(replace(settings, train=replace(settings.train, budget=""))))
    clock._pace = 50.0
    assert pretrain(resolve(str(recipe)), data, tmp_path / "again").step == last
    assert [record["learning_rate"] for record in records(tmp_path / "again")] == rates
    assert weights(tmp_path / "again", last) == weights(run, last)

    # Killed before some of its fits, it replays them.
    early = checkpoint.whole_checkpoints(run / "checkpoints")[0]
    assert checkpoint.step_of(early) < int(fits[2].partition(":")[0])
    expected = weights(run, last)
    for later in checkpoint.whole_checkpoints(run / "checkpoints")[1:]:
        shutil.rmtree(later)
    clock._pace = 0.001
    assert resume(run).step == last
    assert weights(run, last) == expected
    assert Run.open(run).settings == settings


def test_an_older_run_with_a_budget_goes_on(clock: Clock, tmp_path: Path) -> None:
    """An older version measured once, and kept the length in `measured` and in `train.max_steps`."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(**BUDGETED, train__max_samples=80), data, run)
    for path in (run / "config.json", *run.glob("checkpoints/*/state.json")):
        content = json.loads(path.read_text())
        del content["settings"]["train"]["fits"]
        content["settings"]["train"]["max_steps"] = 40
        if path.name == "config.json":
            content["measured"] = {"measured_until": 6, "max_steps": 40}
        path.write_text(json.dumps(content))
    for manifest in run.glob("checkpoints/*/manifest.json"):
        state = manifest.with_name(checkpoint.STATE)
        written = json.loads(manifest.read_text())
        written[checkpoint.STATE] = dict(zip(("bytes", "sha256"), checkpoint.file_digest(state), strict=True))
        manifest.write_text(json.dumps(written))
    assert resume(run, [("train.max_samples", "96")]).step == 12
    again = helpers.tiny_settings(**BUDGETED, train__max_samples=104)
    assert pretrain(again, data, run).step == 13, "the first command continues it too"
    assert Run.open(run).settings.train.fits.startswith("6:40")


def test_evaluations_are_planned_once_and_a_resumed_run_keeps_the_plan(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    evaluating = {"evaluate__data": data, "evaluate__every_samples": 8}
    asked = helpers.tiny_settings(**BUDGETED, **evaluating, train__max_samples=8 * 24)
    pretrain(asked, data, run)
    plan = Run.open(run).evaluation
    assert plan["evaluation_interval"] > 8
    assert "instead of every 8" in capsys.readouterr().out
    assert len(records(run, "evaluation")) < 10
    resume(run, [("train.max_samples", "216")])
    assert Run.open(run).evaluation["evaluation_interval"] >= plan["evaluation_interval"]
    (end,) = records(run, "end")
    assert 0 < end["evaluation_seconds"] < end["loop_seconds"]
    assert end["saving_seconds"] > 0
    changed = resume(run, [("train.max_samples", "216"), ("evaluate.every_samples", "0")])
    assert changed.step == 27
    assert Run.open(run).evaluation == {}, "another wish replaces the plan"
