"""Killed at any moment and resumed, a deterministic run ends bitwise equal to an undisturbed one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bertrain.training.start import pretrain
from tests import helpers
from tests.launched import PATIENCE_S, Launched, descendants, records
from tests.miniature_tasks import command_line

STEPS = 40
SETTINGS = {
    "train__max_steps": STEPS,
    "checkpoint__every_steps": 2,
    "log__every_steps": 3,
    "model__intermediate_size": 256,
}


HOLD = """
import os, sys, time
accesses = int(os.environ["HOLD_AT_ACCESS"])

def hold(event, arguments):
    global accesses
    if event in ("open", "os.rename") and ".partial" in str(arguments[0]) and "checkpoints" in str(arguments[0]):
        accesses -= 1
        if accesses == 0:
            open(os.environ["HELD"], "w").close()
            time.sleep(1000)

sys.addaudithook(hold)
"""
"""Python imports this as `sitecustomize`. It blocks the writer of checkpoints at the chosen access to a file of a
checkpoint that is not in place yet, and creates the file HELD: a process killed then dies inside a save."""
ACCESSES = 12
"""Such accesses in one save, at least."""


def kill(processes: list[int]) -> None:
    """Kill at once, the ranks before their launcher, and before the others the one that writes."""
    for process in [*processes[1:], processes[0]]:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], pause: float) -> bool:
    """Poll until `condition()` holds or the process ends; says which."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause)
    return False


def assert_bitwise_equal(run: Path, calm: Path) -> None:
    assert helpers.losses(run) == helpers.losses(calm)
    assert_same_weights(run, calm)


def assert_same_weights(run: Path, calm: Path) -> None:
    weights, expected = helpers.final_weights(run), helpers.final_weights(calm)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert not list((run / "checkpoints").glob(".step-*"))


long = pytest.mark.long


@pytest.mark.parametrize(
    ("world", "kills", "family"),
    [
        (2, 2, "bert"),
        *(pytest.param(*larger, marks=long)
          for larger in ((2, 3, "bert"), (1, 4, "bert"), (4, 3, "bert"), (1, 3, "modern"), (2, 2, "modern"))),
    ],
)  # fmt: skip
def test_killed_and_resumed_is_bitwise_undisturbed(tmp_path: Path, world: int, kills: int, family: str) -> None:
    seed = random.randrange(2**32)
    print(f"moments of death drawn with seed {seed}")
    draw = random.Random(seed)
    data = helpers.make_data(tmp_path)
    ranks = ["--nproc", world]
    # One rank has the two threads of the default on two cores; four ranks of one thread each are enough for them.
    exchanged = "bf16" if world == 2 else "fp32"
    arguments = helpers.tiny_arguments(
        **SETTINGS,
        **helpers.FAMILIES[family],
        train__threads=2 if world == 1 else 1,
        train__exchange_precision=exchanged,
    )

    (tmp_path / "sitecustomize.py").write_text(HOLD)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    def start(run: Path) -> list[str]:
        pretrain = ["pretrain", "bert-tiny", "--data", data, "--run", run, *ranks, "--deterministic", *arguments]
        return helpers.command(*(["resume", run, *ranks] if (run / "config.json").is_file() else pretrain))

    def to_the_end(run: Path) -> str:
        done = subprocess.run(start(run), env=helpers.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    command_line(*start(tmp_path / "calm")[3:])

    run = tmp_path / "disturbed"
    for number in range(kills):
        held, environment = tmp_path / f"held-{number}", helpers.environment()
        if number:  # every time but the first: in the middle of a save, of the first or of one of the next
            moment = {"HOLD_AT_ACCESS": str(draw.randint(1, ACCESSES * STEPS // 2 // (kills + 1))), "HELD": str(held)}
            environment |= moment | {"PYTHONPATH": path}
        process = subprocess.Popen(start(run), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        target = len(records(run)) // 3 * 3 + draw.randint(1, max(1, STEPS // (kills + 1)))
        assert wait_until(held.is_file if number else lambda target=target: len(records(run)) >= target, process, 0.002)
        condemned = descendants(process.pid)
        time.sleep(draw.random() * 0.1)
        kill(condemned)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        assert not number or any((run / "checkpoints").glob(".step-*")), "it died while saving"
    to_the_end(run)
    if world <= 2:
        assert f"after step {STEPS}" in to_the_end(run), "the second time finds the run complete, and leaves it so"
    assert_bitwise_equal(run, tmp_path / "calm")


@pytest.mark.parametrize(("world", "family"), [pytest.param(2, "bert", marks=long), (1, "modern")])
def test_a_killed_annealing_ends_as_an_undisturbed_one(tmp_path: Path, world: int, family: str) -> None:
    """Within a ramp, with StableAdamW; killed before and after its first checkpoint, continued by the same command."""
    ramp = {"batch__sequences": 0, "batch__tokens": 900, "batch__ramp_from": 100, "batch__ramp_tokens": 9000}
    others = {"optimizer__name": "stableadamw", "schedule__warmup_steps": 1, "schedule__decay": "constant"}
    short = {"train__max_steps": 4, "train__deterministic": True, "train__threads": 1}
    settings = helpers.tiny_settings(**SETTINGS | ramp | others | short, **helpers.FAMILIES[family])
    stable, run, calm = (tmp_path / name for name in ("stable", "disturbed", "calm"))
    pretrain(settings, helpers.make_data(tmp_path), stable)

    def words(folder: Path) -> list[object]:
        more = ["--checkpoint.every_steps", 6, "--nproc", world, "--log.every_steps", 1]
        return ["anneal", stable, "--run", folder, "--steps", 16, *more]

    command_line(*words(calm))
    for target in (1, 6):
        command = helpers.command(*words(run))
        process = subprocess.Popen(command, env=helpers.environment(), stdout=subprocess.DEVNULL)
        assert wait_until(lambda target=target: len(records(run)) >= target, process, 0.002)
        kill(descendants(process.pid))
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    command_line(*words(run))
    steps, expected = ([(step["step"], step["tokens"], step["loss"]) for step in records(one)] for one in (run, calm))
    assert steps == expected
    assert [number for number, *_ in steps] == list(range(5, 21))
    assert steps[-1][1] > 2 * steps[0][1]
    assert_same_weights(run, calm)


def kill_random_ranks(folder: Path, kills: int, steps: int) -> None:
    """One command on two ranks that loses a random one of them so many times, against the same undisturbed."""
    seed = random.randrange(2**32)
    print(f"ranks and moments of death drawn with seed {seed}")
    draw = random.Random(seed)
    data, run, calm = helpers.make_data(folder), folder / "disturbed", folder / "calm"
    settings = SETTINGS | {"train__max_steps": steps, "log__every_steps": 1}

    def command(run: Path, *more: object) -> list[str]:
        arguments = ["--data", data, "--run", run, "--nproc", 2, "--deterministic", *helpers.tiny_arguments(**settings)]
        return helpers.command("pretrain", "bert-tiny", *arguments, *more)

    command_line(*command(calm)[3:])
    launched = Launched(command(run, "--restarts", kills), folder)
    try:
        for number in range(kills):
            done = len(records(run))
            target = done + draw.randint(1, max(1, (steps - done) // (kills - number + 1)))
            launched.wait_until(lambda target=target: len(records(run)) >= target, f"step {target}", pause=0.002)
            rank = draw.randrange(2)
            os.kill(launched.ranks()[rank], signal.SIGKILL)
            launched.wait_until(
                lambda number=number: launched.err.count("training continued at step") > number, "going on", pause=0.002
            )
            told = launched.err.splitlines()
            assert f"bertrain: rank {rank} was killed by SIGKILL; starting all ranks again" in "\n".join(told), told
        assert launched.wait() == 0, launched.err
    finally:
        launched.kill()
    print("seconds until training went on:", re.findall(r"([\d.]+) s after", launched.err))
    assert launched.err.count("starting all ranks again") == kills
    assert "Traceback" not in launched.err
    assert_bitwise_equal(run, calm)


def test_a_random_rank_is_killed_and_the_run_goes_on_by_itself(tmp_path: Path) -> None:
    kill_random_ranks(tmp_path, kills=1, steps=20)


def test_a_rank_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    """It never comes to a step, so there is no new checkpoint between one restart and the next."""
    data = helpers.make_data(tmp_path)
    die = "import os, signal\nos.environ.get('RANK') == '1' and os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "sitecustomize.py").write_text(die)
    arguments = ["--data", data, "--run", tmp_path / "run", "--nproc", 2, "--restarts", 2, *helpers.tiny_arguments()]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    launched = Launched(helpers.command("pretrain", "bert-tiny", *arguments), tmp_path, PYTHONPATH=path)
    try:
        assert launched.wait() == 1
    finally:
        launched.kill()
    death = "bertrain: rank 1 was killed by SIGKILL; "
    assert launched.err.splitlines() == [
        f"{death}starting all ranks again (1 of 2 without a new checkpoint)",
        f"{death}starting all ranks again (2 of 2 without a new checkpoint)",
        f"{death}gave up after 2 restarts without a new checkpoint (--restarts)",
    ]
