"""Killed at any moment and resumed, a deterministic run ends bitwise equal to an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests import helpers

STEPS = 40
SETTINGS = {
    "train__max_steps": STEPS,
    "checkpoint__every_steps": 2,
    "log__every_steps": 3,
    "model__intermediate_size": 256,
}


def descendants(process: int) -> list[int]:
    """A process and all below it, from /proc: torchrun's ranks are in sessions of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found


def kill(processes: list[int]) -> None:
    """Kill at once, the ranks before their launcher."""
    for process in reversed(processes):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def steps_written(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def wait_until(condition: object, process: subprocess.Popen[bytes], pause: float) -> bool:
    """Poll until `condition()` holds or the process ends; says which."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(pause)
    return False


@pytest.mark.parametrize(("world", "kills"), [(1, 4), (2, 3), (4, 3)])
def test_killed_and_resumed_is_bitwise_undisturbed(tmp_path: Path, world: int, kills: int) -> None:
    seed = random.randrange(2**32)
    print(f"moments of death drawn with seed {seed}")
    draw = random.Random(seed)
    data = helpers.make_data(tmp_path)
    ranks = ["--nproc", world]
    # One rank has the two threads of the default on two cores; four ranks of one thread each are enough for them.
    arguments = helpers.tiny_arguments(**SETTINGS, train__threads=2 if world == 1 else 1)

    def start(run: Path) -> list[str]:
        pretrain = ["pretrain", "bert-tiny", "--data", data, "--run", run, *ranks, "--deterministic", *arguments]
        return helpers.command(*(["resume", run, *ranks] if (run / "config.json").is_file() else pretrain))

    def to_the_end(run: Path) -> str:
        done = subprocess.run(start(run), env=helpers.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    to_the_end(tmp_path / "calm")

    run, killed_while_saving = tmp_path / "disturbed", 0
    for number in range(kills):
        process = subprocess.Popen(
            start(run), env=helpers.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        target = steps_written(run) // 3 * 3 + draw.randint(1, max(1, STEPS // (kills + 1)))
        wait_until(lambda target=target: steps_written(run) >= target, process, 0.002)
        condemned = descendants(process.pid)
        if number % 2:  # every second time: in the middle of a save
            wait_until(lambda: any((run / "checkpoints").glob(".step-*")), process, 0.0)
        else:
            time.sleep(draw.random() * 0.1)
        kill(condemned)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        killed_while_saving += any((run / "checkpoints").glob(".step-*"))
    to_the_end(run)
    assert f"after step {STEPS}" in to_the_end(run), "the second time finds the run complete, and leaves it so"
    print(f"{killed_while_saving} of {kills} died while saving")
    assert killed_while_saving >= 1

    assert helpers.losses(run) == helpers.losses(tmp_path / "calm")
    weights, expected = helpers.final_weights(run), helpers.final_weights(tmp_path / "calm")
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert not list((run / "checkpoints").glob(".step-*"))
