"""How a run ends and goes back: limits, the target, the best, steps left out, nothing saved at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bertrain.config.settings import Settings
from bertrain.reports.report import report
from bertrain.run import checkpoint
from bertrain.run.spikes import MIN_STEPS, WINDOW
from bertrain.training.evaluate import evaluate
from bertrain.training.start import pretrain, resume
from bertrain.weights.source import read_weights
from tests import helpers


def small(**overrides: object) -> Settings:
    """Eight steps of eight examples."""
    return helpers.tiny_settings(**{"batch__sequences": 8, "train__max_steps": 8} | overrides)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def steps_kept(run: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.whole_checkpoints(run / "checkpoints")]


def test_a_limit_of_samples_ends_the_run_and_can_be_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = small(train__max_samples=35, evaluate__data=data, evaluate__max_examples=24)
    assert pretrain(settings, data, run).step == 5
    assert "the end, after step 5 (40 samples): train.max_samples 35 is reached" in capsys.readouterr().out
    assert [record["step"] for record in records(run, "evaluation")] == [5]
    assert steps_kept(run) == [5]
    assert resume(run).step == 5, "it is over"
    assert resume(run, [("train.max_samples", "0")]).step == 8
    (end,) = records(run, "end")
    assert end.pop("loop_seconds") > sum(sum(step["seconds"].values()) for step in records(run, "step")[5:])
    assert end.pop("evaluation_seconds") > end.pop("saving_seconds") > 0
    assert end == {"kind": "end", "step": 8, "samples": 64, "reason": "all 8 steps are done"}
    calm = tmp_path / "calm"
    pretrain(small(), data, calm)
    assert helpers.losses(run) == helpers.losses(calm), "limits do not shape the training"


def test_time_is_counted_over_all_starts(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(small(train__max_samples=16), data, run)
    (state,) = (run / "checkpoints").glob("step-*/state.json")
    seconds = json.loads(state.read_text())["seconds"]
    assert seconds > 0
    resume(run, [("train.max_samples", "0"), ("train.max_time", f"{seconds:.9f}s")])
    assert records(run, "end")[0]["reason"] == f"train.max_time {seconds:.9f}s is over"
    assert steps_kept(run)[-1] <= 3, "what was used up before counts"


def test_a_target_ends_the_run_and_the_best_is_kept(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    evaluating = {"evaluate__data": data, "evaluate__every_samples": 8, "evaluate__max_examples": 60}
    rates = {"optimizer__learning_rate": 0.05, "train__max_steps": 12, "checkpoint__keep": 2}
    settings = small(**evaluating, **rates, checkpoint__keep_best=True, checkpoint__every_steps=1)
    pretrain(settings, data, run)
    accuracies = {record["step"]: record["mlm_accuracy"] for record in records(run, "evaluation")}
    best = max(accuracies, key=lambda step: accuracies[step])
    assert best < 11, "else the test shows nothing; a rate this large makes the end worse than the middle"
    assert steps_kept(run) == [best, 11, 12]
    assert json.loads((run / "checkpoints" / "best.json").read_text()) == {
        "step": best,
        "figure": accuracies[best],
    }
    assert evaluate(run, data, which="best", max_examples=60)["mlm_accuracy"] == accuracies[best]
    assert evaluate(run, data, which="11", max_examples=60)["mlm_accuracy"] == accuracies[11]
    assert evaluate(run, data, max_examples=60)["step"] == 12
    assert read_weights(run, "best").origin.endswith(f"step-{best:08d}")
    with helpers.refused("unknown-checkpoint", "step 1", f"{best}, 11, 12"):
        read_weights(run, "1")
    with helpers.refused("unknown-checkpoint", "'last'"):
        evaluate(run, data, which="last")

    aimed = tmp_path / "aimed"
    target = sorted(accuracies.values())[len(accuracies) // 2]
    reached = next(step for step, accuracy in accuracies.items() if accuracy >= target)
    settings = small(**evaluating, **rates, evaluate__target_accuracy=target)
    assert pretrain(settings, data, aimed).step == reached
    assert records(aimed, "end")[0]["reason"] == f"evaluate.target_accuracy {target:g} is reached"
    assert steps_kept(aimed) == [reached]
    assert resume(aimed).step == reached, "it is over"

    # A kill between a checkpoint and the word that it is the best: the checkpoint itself knows.
    stated = (run / "checkpoints" / "best.json").read_text()
    (run / "checkpoints" / "best.json").write_text('{"step": 11, "figure": 0.0}')
    resume(run)
    assert (run / "checkpoints" / "best.json").read_text() == stated


def test_held_out_batches_are_kept_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertrain.data.feed.loader import Loader

    data, calls = helpers.make_data(tmp_path), []
    made = Loader.evaluation
    monkeypatch.setattr(Loader, "evaluation", lambda self, most: calls.append(most) or made(self, most))
    settings = small(train__max_steps=4, evaluate__data=data, evaluate__every_samples=8)
    pretrain(settings, data, tmp_path / "kept")
    assert len(calls) == 1
    monkeypatch.setattr("bertrain.training.evaluate.KEPT_BYTES", 10_000)
    pretrain(settings, data, tmp_path / "made anew")
    assert len(calls) == 1 + 4
    kept, anew = (
        [{**line, "seconds": 0} for line in records(tmp_path / name, "evaluation")] for name in ("kept", "made anew")
    )
    assert kept == anew


def test_nothing_is_saved_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(small(checkpoint__enabled=False, checkpoint__every_steps=1, train__max_steps=3), data, run)
    assert not (run / "checkpoints").exists()
    assert "checkpoint.enabled is false: nothing will be saved" in capsys.readouterr().err
    with helpers.refused("conflicting-settings", "checkpoint.keep_best", "checkpoint.enabled"):
        small(checkpoint__enabled=False, checkpoint__keep_best=True, evaluate__data=data)


# --- going back, and leaving steps out ------------------------------------------------------------------


def test_steps_left_out_consume_their_examples_and_change_nothing(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = small(checkpoint__every_steps=1, checkpoint__keep=8, train__skip_steps="3-4")
    pretrain(settings, data, run)
    steps = records(run, "step")
    assert [record["step"] for record in steps if record["skipped"]] == [3, 4]
    assert [(record["loss"], record["tokens"], record["applied"]) for record in steps[2:4]] == [(None, 0, False)] * 2
    assert [record["samples"] for record in steps] == [8 * step for step in range(1, 9)]
    assert {record["not_finite"] for record in steps} == {0}
    of = [read_weights(run, str(step)).tensors for step in range(1, 6)]
    assert all(torch.equal(of[1][name], tensor) for name, tensor in of[3].items())
    assert not all(torch.equal(of[1][name], tensor) for name, tensor in of[4].items())
    state = checkpoint.read_progress(run / "checkpoints" / "step-00000008")
    assert (state.updates, state.samples) == (6, 64)
    assert state.tokens == sum(record["tokens"] for record in steps)
    page = report([run]).read_text()
    assert "2 of 8 steps were skipped by train.skip_steps: 3, 4" in page
    assert "not finite" not in page


def test_going_back_puts_later_checkpoints_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(small(checkpoint__every_steps=2, checkpoint__keep=4), data, run)
    calm, later = helpers.losses(run), helpers.final_weights(run)
    resume(run, from_step=4)
    assert "continuing after step 4" in capsys.readouterr().out
    assert helpers.losses(run) == calm, "the same steps again"
    resume(run, [("train.skip_steps", "6")], from_step=4)
    assert helpers.losses(run)[:5] == calm[:5]
    assert helpers.losses(run)[6:] != calm[6:]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [
        "aside-1-step-00000006", "aside-1-step-00000008", "aside-2-step-00000006", "aside-2-step-00000008",
        "step-00000002", "step-00000004", "step-00000006", "step-00000008",
    ]  # fmt: skip
    aside = helpers.load_weights(run / "checkpoints" / "aside-1-step-00000008")
    assert all(torch.equal(aside[name], tensor) for name, tensor in later.items())
    with helpers.refused("unknown-checkpoint", "step 7", "2, 4, 6, 8"):
        resume(run, from_step=7)
    resume(run, [("train.skip_steps", "")], from_step=0)
    assert helpers.losses(run) == calm, "from the beginning"


def test_a_restart_by_the_launcher_does_not_go_back_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(small(checkpoint__every_steps=4), data, run)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    resume(run, from_step=4)
    assert not list((run / "checkpoints").glob("aside-*"))


def test_a_spike_is_flagged_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(small(train__max_steps=22, optimizer__learning_rate=0, checkpoint__every_steps=21), data, run)
    shutil.rmtree(run / "checkpoints" / "step-00000022")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    quiet = [json.loads(line) for line in lines[:21]]
    for record in quiet:
        record["loss"] = 1.0 + 0.001 * (record["step"] % 3)  # as if the model had been far better before
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in quiet))
    capsys.readouterr()
    resume(run)
    assert [record["step"] for record in records(run, "step") if record["spike"]] == [22]
    said = capsys.readouterr().err
    assert said.startswith("warning: loss spike at step 22: ")
    assert f"`bertrain resume {run} --from-step STEP --skip-steps 22`" in said


def test_a_resumed_run_knows_the_loss_of_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it, it would compare its loss with that of the first steps after the resume."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = small(train__max_steps=MIN_STEPS + WINDOW, train__max_samples=8 * MIN_STEPS, optimizer__learning_rate=0)
    pretrain(settings, data, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record | {"loss": 1.0}) + "\n" for record in lines))
    capsys.readouterr()
    resume(run, [("train.max_samples", "0")])
    assert "far above its start for 64 steps" in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused_by_its_settings(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    pretrain(small(train__max_steps=2), data, tmp_path / "one")
    settings = small(train__max_steps=2, optimizer__name="lamb", model__hidden_size=16)
    pretrain(settings, data, tmp_path / "two")
    shutil.copytree(
        tmp_path / "one" / "checkpoints" / "step-00000002", tmp_path / "two" / "checkpoints" / "step-00000009"
    )
    with helpers.refused(
        "foreign-checkpoint", "step-00000009", "model.hidden_size (16 here, 32 there), optimizer.name"
    ):
        resume(tmp_path / "two")
