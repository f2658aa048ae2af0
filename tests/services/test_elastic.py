"""A node is lost, and a node comes: two of torchrun's agents here, of one rank each, stand for two machines."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from bertrain.base.files import try_lock
from bertrain.base.formatting import counted
from bertrain.run import checkpoint
from bertrain.training.start import pretrain
from tests import helpers
from tests.launched import PATIENCE_S, Launched, records

pytestmark = pytest.mark.services
ENDLESS = 100000


def agent(folder: Path, name: str, port: int, arguments: list[str], *, is_host: bool) -> Launched:
    rendezvous = f"is_host={is_host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = [
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-endpoint", f"localhost:{port}"),
        *("--rdzv-conf", rendezvous, "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "--", "bertrain", *arguments]
    return Launched(command, folder, name, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def wait_for_ranks(run: Path) -> None:
    """An agent that is aborted leaves its rank, which saves and ends by itself."""
    deadline = time.monotonic() + PATIENCE_S
    with open(run / ".lock", "a") as lock:
        while not try_lock(lock):
            assert time.monotonic() < deadline, "the rank that holds the run has not ended"
            time.sleep(0.1)


def test_with_fewer_and_with_more_nodes_the_losses_are_the_same(tmp_path: Path) -> None:
    data, run, calm = helpers.make_data(tmp_path), tmp_path / "run", tmp_path / "calm"
    settings = {"schedule__decay_steps": ENDLESS, "checkpoint__every_steps": 5, "log__every_steps": 1}
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = helpers.tiny_arguments(train__max_steps=ENDLESS, **settings)
    command = ["pretrain", "bert-tiny", "--data", str(data), "--run", str(run), *arguments]

    def starts_of(world: int) -> int:
        return sum(one.out.count(f", {counted(world, 'rank')} of ") for one in agents)

    def comes_forward() -> None:
        reached = len(records(run))
        first.wait_until(lambda: len(records(run)) > reached + 5, "steps")

    first = agent(tmp_path, "first", port, command, is_host=True)
    second = agent(tmp_path, "second", port, command, is_host=False)
    agents = [first, second]
    try:
        first.wait_until(lambda: starts_of(2) == 1, "both at work")
        comes_forward()
        alone = starts_of(1)
        second.kill()
        first.wait_until(lambda: starts_of(1) > alone, "one going on alone")
        comes_forward()
        agents.append(agent(tmp_path, "third", port, command, is_host=False))
        first.wait_until(lambda: starts_of(2) == 2, "two again")
        comes_forward()
        for one in (first, agents[-1]):
            one.process.send_signal(signal.SIGTERM)
        # torchrun knows no code but 1. Its keep-alive thread aborts it if Python ends during a call to the store.
        assert first.wait() in (1, -signal.SIGABRT)
        wait_for_ranks(run)
    finally:
        for one in agents:
            one.kill()

    losses = helpers.losses(run)
    newest = checkpoint.whole_checkpoints(run / "checkpoints")[-1]
    assert checkpoint.step_of(newest) == len(losses), "the ranks saved before they ended"
    pretrain(helpers.tiny_settings(train__max_steps=len(losses), **settings), data, calm)
    for step, (loss, expected) in enumerate(zip(losses, helpers.losses(calm), strict=True), start=1):
        assert loss == pytest.approx(expected, rel=1e-4), f"step {step}"


def test_a_store_of_ranks_that_are_gone_is_refused(tmp_path: Path) -> None:
    """torchrun restarts with the store it had; without the switch that gives a fresh one, ranks would never meet."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_arguments(train__max_steps=ENDLESS, checkpoint__every_steps=5, log__every_steps=1)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "--", "bertrain"]
    command = ["pretrain", "bert-tiny", "--data", str(data), "--run", str(run), *settings]
    launched = Launched([sys.executable, "-m", "torch.distributed.run", *options, *command], tmp_path)
    try:
        launched.wait_until(lambda: len(records(run)) > 5, "some steps")
        os.kill(launched.ranks()[1], signal.SIGKILL)
        assert launched.wait() == 1
    finally:
        launched.kill()
    assert launched.err.count("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or use bertrain's --nproc") == 1
