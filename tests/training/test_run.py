"""A run as a user finds it afterwards: metrics, TensorBoard, evaluations, the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bertrain.base import isa
from bertrain.base.console import PHASES
from bertrain.model.sums import packed_sums
from bertrain.run.metrics import averages
from bertrain.training.evaluate import evaluate
from bertrain.training.start import pretrain, resume
from tests import helpers


def records(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def test_without_next_sentence_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(model__nsp=False, train__max_steps=3, evaluate__data=data), data, run)
    for record in [*records(run, "step"), *records(run, "evaluation")]:
        assert record["loss"] == record["mlm_loss"]
        assert "nsp_loss" not in record
    assert "next sentence" not in capsys.readouterr().out
    assert not any("next_sentence" in name for name in helpers.final_weights(run))


def test_evaluates_every_so_many_samples_and_at_the_end(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(evaluate__data=data, evaluate__every_samples=100, evaluate__max_examples=30)
    pretrain(settings, data, run)
    crossed = [step for step in range(1, 21) if step * 24 // 100 > (step - 1) * 24 // 100]
    evaluations = records(run, "evaluation")
    assert [record["step"] for record in evaluations] == sorted({*crossed, 20})
    assert all(record["samples"] == 24 * record["step"] for record in evaluations)
    assert evaluations[-1]["mlm_loss"] == evaluate(run, data, max_examples=30)["mlm_loss"]
    assert evaluate(run, max_examples=30) == evaluate(run, data, max_examples=30)


def test_evaluation_leaves_the_training_alone(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    pretrain(helpers.tiny_settings(train__max_steps=6), data, tmp_path / "without")
    pretrain(
        helpers.tiny_settings(train__max_steps=6, evaluate__data=data, evaluate__every_samples=24),
        data,
        tmp_path / "with",
    )
    assert helpers.losses(tmp_path / "without") == helpers.losses(tmp_path / "with")


def test_every_step_stands_in_the_metrics_and_on_the_board_once(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(log__trackers="tensorboard", log__every_steps=7, checkpoint__every_steps=8)
    pretrain(settings, data, run)
    losses = helpers.losses(run)
    for folder in sorted((run / "checkpoints").glob("step-*"))[1:]:
        (folder / "manifest.json").unlink()
    resume(run)
    assert len(helpers.losses(run)) == len(losses) == 20
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("step/loss")] == list(range(1, 21))
    assert [event.value for event in board.Scalars("step/loss")] == pytest.approx(losses, rel=1e-6)


def test_the_board_has_what_the_metrics_have(tmp_path: Path) -> None:
    """Accuracies, phases, evaluations; and telemetry, which here lies in the folder when the run goes on."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(
        train__max_steps=4, train__max_samples=48, log__trackers="tensorboard", log__every_steps=2, evaluate__data=data
    )
    pretrain(settings, data, run)
    (run / "telemetry.csv").write_text("time,power_w\n1,600\n2,650\n")
    resume(run, [("train.max_samples", "0")])
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    for name in ("mlm_accuracy", "gradient_norm", "padding_share", "tokens_per_s"):
        written = [record[name] for record in records(run, "step")]
        assert [event.value for event in board.Scalars(f"step/{name}")] == pytest.approx(written, rel=1e-6)
    for phase in PHASES:
        written = [record["seconds"][phase] for record in records(run, "step")]
        assert [event.value for event in board.Scalars(f"step/seconds/{phase}")] == pytest.approx(written, rel=1e-6)
    assert [event.step for event in board.Scalars("evaluation/mlm_accuracy")] == [2, 4]
    assert [(event.step, event.value) for event in board.Scalars("telemetry/rank 0/power_w")] == [
        (3, 650.0),
        (4, 650.0),
    ]


def test_metrics_add_up(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(train__max_steps=5), data, run)
    steps = records(run, "step")
    for record in steps:
        seconds = sum(record["seconds"].values())
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / seconds)
        assert record["loss"] == pytest.approx(record["mlm_loss"] + record["nsp_loss"])
        assert 24 * 5 <= record["tokens"] <= 24 * 64, "padding is never counted"
        assert record["applied"] is True
        # Bins come in quarters of the budget of 256 tokens.
        computed = record["tokens"] / (1 - record["padding_share"])
        assert computed == pytest.approx(64 * round(computed / 64))
        assert computed >= record["tokens"]
    state = json.loads((run / "checkpoints" / "step-00000005" / "state.json").read_text())
    assert state["tokens"] == sum(record["tokens"] for record in steps)
    assert state["samples"] == 5 * 24
    assert state["updates"] == 5


def test_the_run_folder_is_the_whole_truth(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(train__max_steps=2)
    pretrain(settings, data, run)
    resume(run)
    config = json.loads((run / "config.json").read_text())
    assert config["settings"] == settings.to_dict()
    assert config["data"]["folder"] == str(data)
    environment = json.loads((run / "environment.json").read_text())
    assert len(environment) == 2
    assert {"torch", "python", "cores", "ranks", "device"} <= environment[0].keys()
    assert (run / "vocab.txt").read_text() == (data / "vocab.txt").read_text()


@pytest.mark.parametrize(("level", "expected"), [("quiet", 0), ("normal", 1), ("verbose", 3)])
def test_quiet_and_verbose(tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, expected: int) -> None:
    settings = helpers.tiny_settings(train__max_steps=3, schedule__warmup_steps=0, log__level=level)
    pretrain(settings, helpers.make_data(tmp_path), tmp_path / "run")
    captured = capsys.readouterr()
    assert captured.out.count("step 3/3") + captured.out.count("gradient norm") == expected
    assert captured.err == ""


def test_the_bar_shows_what_the_lines_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = helpers.tiny_settings(log__style="bar", evaluate__data=helpers.make_data(tmp_path))
    pretrain(settings, tmp_path / "data", tmp_path / "run")
    shown = capsys.readouterr().out
    assert "20/20" in shown
    assert "evaluation at step 20" in shown


@pytest.mark.parametrize("of_there", [{"precision": "tf32"}, {"precision": "fp8", "kernels": "fused"}, {"isa": "amx"}])
def test_a_run_of_another_machine_predicts_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, of_there: dict[str, str]
) -> None:
    """Trained on a GPU in FP8, say, and used on a CPU."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    pretrain(helpers.tiny_settings(train__max_steps=2), data, run)
    expected = evaluate(run, data)
    capsys.readouterr()
    config = json.loads((run / "config.json").read_text())
    config["settings"]["train"] |= of_there
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset({"avx2"}))
    assert evaluate(run, data)["mlm_loss"] == pytest.approx(expected["mlm_loss"], rel=1e-5)
    assert "; predicting in fp32" in helpers.unwrapped(capsys.readouterr().err)


def test_an_evaluation_without_a_word_to_predict_has_no_loss() -> None:
    settings = helpers.tiny_settings()
    found = averages(packed_sums(device=torch.device("cpu")), 0, 4, settings.model)
    assert found["mlm_loss"] == found["mlm_accuracy"] == 0
