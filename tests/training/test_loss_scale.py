"""fp16's loss scale: halved by an overflow, doubled after 2,000 steps without one, saved, no reason to end a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.optim.verdict import Verdict
from bertrain.ranks.parallel import Ranks
from bertrain.run import loss_scale
from bertrain.run.loss_scale import SCALE, START
from bertrain.training.start import pretrain, resume
from bertrain.training.state import TrainState
from tests import helpers

CPU = torch.device("cpu")
emulated_fp16 = pytest.fixture(autouse=True)(helpers.allow_emulated_fp16)


@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("clipping", ["global", "local", "bucket"])
def test_clipping_undoes_the_scale(limit: float, clipping: str) -> None:
    settings = helpers.tiny_settings(train__precision="fp16", optimizer__clip_norm=limit, optimizer__clipping=clipping)
    results = []
    for scale in (1.0, 1024.0):
        state = TrainState.build(settings, Ranks(0, 1, CPU))
        state.exchange.loss_scale.fill_(scale)
        state.arena.gradients.normal_(generator=torch.Generator().manual_seed(0)).mul_(scale)
        state.exchange.begin()
        state.exchange.finish()
        norm, factor = state.exchange.norm_and_factor()
        results.append((norm, state.arena.gradients * factor))
    torch.testing.assert_close(results[0], results[1])


def test_an_overflow_changes_nothing_but_the_scale(tmp_path: Path) -> None:
    """A scale that fp16 cannot hold: its largest number is 65,504."""
    settings = helpers.tiny_settings(train__precision="fp16")
    state = TrainState.build(settings, Ranks(0, 1, CPU))
    engine = state.engine
    step = Loader(Shards.open(helpers.make_data(tmp_path)), settings).step(0, 0)
    engine.restore({name: tensor * 2**16 for name, tensor in engine.state().items()})
    trained = [state.arena.values, *state.optimizer.buffers.values()]
    before = [tensor.clone() for tensor in trained]

    def verdict() -> Verdict:
        engine.begin(step)
        for batch in step.bins:
            engine.add_bin(batch, step, is_last=False)
        return Verdict.unpack(engine.update(1e-3))

    norm, applied, scale = verdict()
    assert (applied, scale) == (0.0, START * 2**16)
    assert not torch.isfinite(torch.tensor(norm))
    assert all(map(torch.equal, trained, before))
    assert torch.isfinite(engine.sums).all(), "the loss itself is not scaled"
    skipped = 1
    while not verdict().applied:
        skipped += 1
    assert engine.state()[SCALE] == START * 2 ** (16 - skipped)
    assert not torch.equal(trained[0], before[0])


def step_records(run: Path) -> list[dict[str, object]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


@helpers.needs_short_floats
def test_overflows_do_not_end_a_run_and_the_scale_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if many steps had doubled it: more overflows in a row than steps may be skipped."""
    monkeypatch.setattr(loss_scale, "START", 2.0**32)
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    common = {"train__precision": "fp16", "train__max_skipped_steps": 2, "log__every_steps": 1}
    pretrain(helpers.tiny_settings(train__max_steps=16, checkpoint__every_steps=8, **common), data, run)
    records = step_records(run)
    overflows = [record["applied"] for record in records].index(True)
    assert overflows > 3
    assert [record["loss_scale"] for record in records[: overflows + 1]] == [
        2.0**32 / 2**n for n in range(overflows + 1)
    ]
    calm = helpers.losses(run)
    (run / "checkpoints" / "step-00000016" / "manifest.json").unlink()
    resume(run)
    assert helpers.losses(run) == calm
    assert [record["loss_scale"] for record in step_records(run)] == [record["loss_scale"] for record in records]


@helpers.needs_short_floats
def test_what_a_smaller_scale_does_not_mend_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "START", 4.0)
    data = helpers.make_data(tmp_path)
    settings = helpers.tiny_settings(
        train__precision="fp16", train__max_skipped_steps=3, optimizer__learning_rate=1e30, log__every_steps=1
    )
    with helpers.refused("diverged", "3 steps"):
        pretrain(settings, data, tmp_path / "run")
    scales = [record["loss_scale"] for record in step_records(tmp_path / "run") if not record["applied"]]
    assert scales[:2] == [4.0, 2.0]
    assert scales[-3:] == [1.0, 1.0, 1.0]
