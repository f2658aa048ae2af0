"""Checks of a machine with other busy processes, and of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bertrain.launch import facts as look
from bertrain.launch.job import JobSpec, Task, make_job, place, write_job
from bertrain.launch.scripts import job_script
from tests import helpers
from tests.miniature_tasks import command_line


def test_a_busy_process_of_others_is_found() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        name = f"({busy.pid}, "
        deadline = time.monotonic() + 60
        while not any(name in text for text in look.foreign_processes(set())):
            assert time.monotonic() < deadline
        assert not any(name in text for text in look.foreign_processes({busy.pid}))
        assert {os.getpid(), os.getppid(), busy.pid} <= look.own_processes()
    finally:
        busy.kill()
        busy.wait()


def test_a_job_is_looked_at_by_hand(tmp_path: Path) -> None:
    """On this machine: what is found, in a process of its own, and data that is not there."""
    settings = helpers.tiny_settings(train__binding="auto")
    whole, nothing = helpers.make_data(tmp_path), tmp_path / "nothing"
    judged = helpers.tiny_settings(evaluate__data=nothing)
    for name, data, given in (("whole", whole, settings), ("without", nothing, settings), ("unjudged", whole, judged)):
        task = Task(command=("pretrain",), folder=str(tmp_path / "run"))
        folders = [data, *([given.evaluate.data] if given.evaluate.data else [])]
        made = make_job(place("local", JobSpec(procs_per_node=1)), [task], data=folders, folder=tmp_path / name)
        write_job(made, given, job_script(made))
    found = json.loads(helpers.bertrain("launch", "preflight", tmp_path / "whole", "--json").stdout)
    assert found["refusals"] == []
    (mine,) = found["facts"]
    assert mine["memory_free"] > 0
    assert mine["binding"].startswith("cpus ")
    for name in ("without", "unjudged"):
        refused = command_line("launch", "preflight", tmp_path / name, check=False)
        assert refused.code == 2
        assert "refused: node 0" in refused.out
        assert refused.err.count("[preflight-failed]") == 1
        assert str(nothing) in refused.err
        assert "Traceback" not in refused.err
