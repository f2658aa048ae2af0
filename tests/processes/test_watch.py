"""`bertrain watch` follows a run to its end."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests import helpers
from tests.launched import Launched


def test_it_follows_a_run_to_its_end(tmp_path: Path) -> None:
    """A real run, killed and started again, watched from another process all the while."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_arguments(train__max_steps=30, checkpoint__every_steps=5, log__every_steps=5)
    command = helpers.command("pretrain", "bert-tiny", "--data", data, "--run", run, *settings)
    training = Launched(command, tmp_path)
    watching = None
    try:
        training.wait_until(lambda: len(list((run / "checkpoints").glob("step-*"))) > 0, "a checkpoint")
        watching = Launched(helpers.command("watch", run, "--json", "--every", 0.3), tmp_path, "watching")
        watching.wait_until(lambda: watching is not None and bool(watching.out), "a look")
        training.process.kill()
        training.process.wait()
        training = Launched(command, tmp_path, "again")
        assert training.wait() == 0
        assert watching.wait() == 0, "it ends with the run"
    finally:
        training.kill()
        if watching is not None:
            watching.kill()
    looks = [json.loads(line) for line in watching.out.splitlines()]
    assert (looks[-1]["state"], looks[-1]["step"], looks[-1]["starts"]) == ("ended", 30, 2)
    assert all(math.isfinite(seen["step"]) for seen in looks)
    assert {seen["state"] for seen in looks} <= {"running", "ended"}
