"""Checkpoints: whole or passed over, never half; the last whole one survives whatever happens to the next."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress, Saver, Snapshot
from bertrain.training.start import pretrain, resume
from bertrain.weights.source import read_weights
from tests import helpers
from tests.miniature_tasks import command_line


def snapshot(step: int) -> Snapshot:
    return Snapshot({"w": torch.full((4, 4), float(step))}, {"m": torch.zeros(4)}, Progress(step, 10 * step))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps with checkpoints at 10, 15 and 20."""
    folder = tmp_path_factory.mktemp("trained")
    data = helpers.make_data(folder)
    pretrain(helpers.tiny_settings(checkpoint__every_steps=5, train__deterministic=True), data, folder / "run")
    return folder / "run"


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(trained, tmp_path / "run")


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: flip_a_byte(folder / "model.safetensors"), "model.safetensors is not what was written"),
        (lambda folder: flip_a_byte(folder / "optimizer.safetensors"), "optimizer.safetensors is not what was"),
        (lambda folder: os.truncate(folder / "optimizer.safetensors", 100), "optimizer.safetensors is not what was"),
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: not JSON"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    finished: Path, damage: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, losses = helpers.final_weights(finished), helpers.losses(finished)
    newest = finished / "checkpoints" / "step-00000020"
    damage(newest)  # type: ignore[operator]
    assert resume(finished).step == 20
    captured = capsys.readouterr()
    assert f"warning: passing over the checkpoint {newest}: {said}" in captured.err
    assert "continuing after step 15" in captured.out
    assert helpers.losses(finished) == losses
    assert all(torch.equal(tensor, expected[name]) for name, tensor in helpers.final_weights(finished).items())
    assert checkpoint.find_damage(newest) is None, "the torn one was written anew"


def test_all_damaged_begins_again_with_warnings(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = helpers.losses(finished)
    for folder in (finished / "checkpoints").glob("step-*"):
        flip_a_byte(folder / "model.safetensors")
    resume(finished)
    assert capsys.readouterr().err.count("passing over") == 3
    assert helpers.losses(finished) == losses
    assert len(list((finished / "checkpoints").glob("damaged-step-*"))) == 3
    assert len(checkpoint.whole_checkpoints(finished / "checkpoints")) == 3


def test_weights_of_an_older_checkpoint_are_named(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export, fill-mask and --init read a run's weights through this."""
    newest, *older = sorted((finished / "checkpoints").glob("step-*"), reverse=True)
    flip_a_byte(newest / "state.json")
    assert read_weights(finished).origin == str(older[0])
    assert f"warning: passing over the checkpoint {newest}: state.json is not what" in capsys.readouterr().err
    for checkpoint_folder in older:
        flip_a_byte(checkpoint_folder / "model.safetensors")
    with helpers.refused("no-checkpoint", newest, *older):
        read_weights(finished)


def test_a_checkpoint_that_vanishes_before_it_is_read(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on training prunes it just after it was chosen: another is taken, or the error names the rest."""
    find_damage, removed = checkpoint.find_damage, set[str]()

    def check_then_prune(path: Path, *, hashes: bool = True) -> str | None:
        damage = find_damage(path, hashes=hashes)
        if path.name in removed:
            subprocess.run(["rm", "-r", path], check=True)
        return damage

    monkeypatch.setattr(checkpoint, "find_damage", check_then_prune)
    removed.add("step-00000020")
    assert read_weights(finished).global_step == 15
    removed.add("step-00000015")
    with helpers.refused("unknown-checkpoint", "step 15", "there are: 10"):
        read_weights(finished, "15")
    with helpers.refused("removed-checkpoint", finished / "checkpoints" / "step-00000015"):
        checkpoint.read_moments(finished / "checkpoints" / "step-00000015")
    removed.add("step-00000010")
    with helpers.refused("no-checkpoint", finished):
        read_weights(finished)


PRUNES = """
import sys
from dataclasses import replace
from pathlib import Path
from bertrain.run import checkpoint
folder = Path(sys.argv[1])
saved = checkpoint.read_checkpoint(checkpoint.whole_checkpoints(folder)[-1])
for step in range(saved.progress.step + 1, 100_000):
    checkpoint.write_checkpoint(folder, replace(saved, progress=replace(saved.progress, step=step)))
    checkpoint.purge(folder, keep=1)
"""


def test_weights_are_read_while_another_process_prunes(finished: Path) -> None:
    pruning = subprocess.Popen([sys.executable, "-c", PRUNES, finished / "checkpoints"])
    steps = [20]
    try:
        while steps[-1] < 100 and pruning.poll() is None:
            steps.append(read_weights(finished).global_step or 0)
    finally:
        pruning.kill()
        pruning.wait()
    assert steps == sorted(steps)
    assert steps[-1] >= 100


def test_keeps_the_newest(finished: Path) -> None:
    assert [path.name for path in checkpoint.whole_checkpoints(finished / "checkpoints")] == [
        "step-00000010",
        "step-00000015",
        "step-00000020",
    ]


def test_a_failed_write_leaves_nothing_and_keeps_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write_checkpoint(tmp_path, snapshot(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    saver = Saver(tmp_path, keep=2)
    saver.save(snapshot(2))
    saver.wait()
    assert saver.failure is not None
    assert saver.failure.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.find_damage(tmp_path / "step-00000001") is None


def long_run(tmp_path: Path, *more: object, world: int = 1) -> tuple[subprocess.Popen[str], Path]:
    """A run that would take minutes, with its first checkpoint on disk."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    arguments = helpers.tiny_arguments(train__max_steps=100000, checkpoint__every_steps=5, log__every_steps=5)
    process = subprocess.Popen(
        helpers.command("pretrain", "bert-tiny", "--data", data, "--run", run, "--nproc", world, *arguments, *more),
        env=helpers.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process, run


def test_a_full_disk_stops_training_cleanly(tmp_path: Path) -> None:
    """The system refuses to write (a limit on file size stands in for the disk): one sentence, the last one stays."""
    process, run = long_run(tmp_path, "--log.trackers", "tensorboard")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, 40_000))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    sentence = err.strip()
    assert "\n" not in sentence
    assert sentence.startswith(f"bertrain: could not write into {run}")
    newest = checkpoint.whole_checkpoints(run / "checkpoints")[-1]
    assert f"the last valid checkpoint is {newest}" in sentence
    assert checkpoint.find_damage(newest) is None
    assert not list((run / "checkpoints").glob(".step-*"))
    assert len(helpers.losses(run)) >= checkpoint.read_progress(newest).step, "the metrics hold what it holds"


def test_a_saver_that_breaks_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of ours in the background is not lost: it comes out with its traceback."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken writer")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(RuntimeError, match="broken writer"):
        pretrain(helpers.tiny_settings(checkpoint__every_steps=2), helpers.make_data(tmp_path), tmp_path / "run")


def test_resume_takes_settings_that_do_not_shape_the_training(finished: Path) -> None:
    shutil.rmtree(finished / "checkpoints" / "step-00000020")
    resume(finished, [("log.every_steps", "1"), ("train.threads", "2")])
    assert json.loads((finished / "config.json").read_text())["settings"]["log"]["every_steps"] == 1


@pytest.mark.parametrize(
    ("world", "number", "code"),
    [(1, signal.SIGINT, 130), (1, signal.SIGTERM, 75), (1, signal.SIGUSR1, 75), (2, signal.SIGINT, 130)],
)
def test_interrupted_saves_and_says_how_to_resume(
    tmp_path: Path, world: int, number: signal.Signals, code: int
) -> None:
    process, run = long_run(tmp_path, world=world)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    (sentence,) = [line for line in err.splitlines() if line.startswith("bertrain:")]
    newest = checkpoint.whole_checkpoints(run / "checkpoints")[-1]
    step = checkpoint.read_progress(newest).step
    assert f"stopped by {number.name} after step {step}, " in sentence
    assert sentence.endswith(f"`bertrain resume {run}` [stopped-by-signal]")
    assert "Traceback" not in err
    assert len(helpers.losses(run)) == step


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    process, run = long_run(tmp_path)
    try:
        second = command_line("resume", run, check=False)
        assert second.code == 2
        (line,) = second.err.splitlines()
        assert str(run) in line
        assert line.endswith("[run-in-use]")
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_diverges_ends_with_a_hint(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    arguments = helpers.tiny_arguments(
        optimizer__learning_rate=1e30, schedule__warmup_steps=0, train__max_skipped_steps=4, log__every_steps=2
    )
    done = command_line("pretrain", "bert-tiny", "--data", data, "--run", run, *arguments, check=False)
    assert done.code == 2
    assert "in 4 steps in a row, the last of them step 5" in done.err
    assert "[diverged]" in done.err
    assert "lower optimizer.learning_rate" in done.err
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["applied"] for record in records][-4:] == [False] * 4
    assert records[-1]["loss"] is None
    assert "Traceback" not in done.err


def test_other_weights_to_begin_with(
    trained: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = trained.parent / "data"
    settings = helpers.tiny_settings(train__max_steps=1, optimizer__learning_rate=0)
    pretrain(settings, data, tmp_path / "second", init=str(finished))
    assert (
        f"beginning with the weights of {finished / 'checkpoints' / 'step-00000020'}: 38 tensors taken"
        in capsys.readouterr().out
    )
    expected = helpers.final_weights(finished)
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in helpers.final_weights(tmp_path / "second").items()
    )
    with helpers.refused("other-model"):
        pretrain(helpers.tiny_settings(model__hidden_size=16), data, tmp_path / "third", init=str(finished))
    shutil.rmtree(finished / "checkpoints")
    with helpers.refused("no-checkpoint", finished):
        pretrain(settings, data, tmp_path / "fourth", init=str(finished))
    assert not (tmp_path / "third").exists()
    assert not (tmp_path / "fourth").exists()


def test_a_manifest_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """As on a disk with bad sectors; here, a folder stands in its place."""
    (tmp_path / "step-00000001" / checkpoint.MANIFEST).mkdir(parents=True)
    assert checkpoint.find_damage(tmp_path / "step-00000001") == "manifest.json cannot be read (Is a directory)"
