"""Watching: what a look says of a run, whatever state its files are in, and that it only looks."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from bertrain.reports import watch as module
from bertrain.reports.watch import describe, look, loss_curve, sparkline, watch
from bertrain.training.start import pretrain
from tests import helpers

SECONDS = {"data": 0.1, "forward_backward": 0.3, "reduction": 0.05, "optimizer": 0.05}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch")
    data = helpers.make_data(folder)
    settings = helpers.tiny_settings(train__max_steps=8, evaluate__data=data, evaluate__max_examples=12)
    pretrain(settings, data, folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = {"kind": "step", "step": number, "samples": 10 * number, "tokens": 100, "loss": 8.0 / number}
    return (
        record
        | {"accuracy": 0.5, "learning_rate": 0.1, "applied": True, "skipped": False, "seconds": SECONDS}
        | changes
    )


def write(run: Path, *records: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def log(run: Path, *events: str) -> None:
    entries = [{"time": time.time(), "level": "info", "event": event, "text": f"it is {event}"} for event in events]
    (run / "logs" / "rank-0.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_a_look_worked_out_by_hand(run: Path) -> None:
    write(run, step(1), step(2), {"kind": "evaluation", "step": 2, "f1": 0.75}, step(3, loss=None), step(4, tokens=300))
    seen = look(run)
    assert (seen["state"], seen["step"], seen["max_steps"], seen["samples"]) == ("running", 4, 8, 40)
    assert seen["tokens_per_s"] == pytest.approx(600 / 2.0)
    assert seen["seconds_per_step"] == pytest.approx(0.5)
    assert seen["seconds_left"] == pytest.approx(4 * 0.5)
    assert seen["phases"] == pytest.approx({"data": 0.2, "forward_backward": 0.6, "reduction": 0.1, "optimizer": 0.1})
    assert seen["metrics"] == pytest.approx({"loss": (8 + 4 + 2) / 3, "accuracy": 0.5})
    assert seen["loss_curve"] == [8.0, 4.0, None, 2.0]
    assert (seen["evaluation"]["f1"], seen["checkpoint"], seen["starts"]) == (0.75, 8, 1)
    lines = dict(describe(seen))
    assert lines["step"] == f"{'█' * 15}{'░' * 15}  4 of 8, 50.0%, 2 s left"
    assert lines["rate"] == "300 tokens/s  500.0 ms per step"
    assert lines["now"] == "loss 4.6667  accuracy 50.00%  learning rate 1.00e-01"
    assert lines["evaluation"] == "step 2: f1 0.7500"
    assert lines["loss"].startswith("█▃ ▁")


def test_the_states_of_a_run(trained: Path, run: Path) -> None:
    assert (look(trained)["state"], look(trained)["why"]) == ("ended", "all 8 steps are done")
    write(run, step(1))
    for events, state in (
        (("start", "steps"), "running"),
        (("start", "steps", "stop"), "stopped"),
        (("start", "steps", "failure"), "failed"),
        (("start", "hang"), "failed"),
        (("start", "stop", "start"), "running"),
        (("start", "stop", "start", "said"), "running"),
    ):
        log(run, *events)
        assert look(run)["state"] == state
    an_hour_ago = time.time() - 3600
    for path in (run / "metrics.jsonl", run / "logs" / "rank-0.jsonl"):
        os.utime(path, (an_hour_ago, an_hour_ago))
    assert look(run)["state"] == "silent"
    assert "1 h 0 min" in look(run)["why"]


def test_it_looks_at_whatever_is_there(run: Path) -> None:
    shutil.rmtree(run / "logs")
    for name in ("metrics.jsonl", "environment.json"):
        (run / name).unlink()
    seen = look(run)
    assert (seen["step"], seen["last_word_s"], seen["loss_curve"], seen["ranks"]) == (0, None, [], [])
    assert dict(describe(seen))["step"].endswith("0 of 8, 0.0%")
    write(run, step(1), step(2, seconds={"data": None}), step(3, tokens=2**60))
    assert dict(describe(look(run)))["step"].endswith("1 of 8, 12.5%, 3.5 s left")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\0\0\n[]\n{"kind": 5, "step": 2}\n{"kind": "step", "st')
    assert look(run)["step"] == 1
    (run / "config.json").unlink()
    with helpers.refused("no-run"):
        look(run)


def test_ranks_and_power_are_shown(run: Path) -> None:
    ranks = [
        {"rank": rank, "host": "here", "tokens": 5.0, "seconds": SECONDS | {"data": rank / 100}} for rank in range(12)
    ]
    write(run, step(1), {"kind": "ranks", "step": 1, "ranks": ranks})
    (run / "telemetry.csv").write_text("time,power_w,memory_used_bytes\n1,650,2000000000\n2,655,\n")
    lines = describe(look(run))
    assert ("rank 0", "655 W  memory used 2 GB") in lines
    shown = [label for label, text in lines if label.startswith("rank") and "waiting" in text]
    assert shown == [f"rank {rank}" for rank in range(4, 12)], "those that take longest"
    assert ("rank 11", "410.0 ms own work  50.0 ms waiting  here") in lines
    assert ("", "and 4 faster ranks") in lines


def test_a_long_file_is_read_in_places(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve of ten thousand steps is found without reading them all."""
    monkeypatch.setattr(module, "PLACE_BYTES", 1000)
    write(run, *(step(number, loss=10.0 - number / 1000) for number in range(1, 10_001)))
    curve = loss_curve(run / "metrics.jsonl")
    assert len(curve) == module.NUM_PLACES
    for place, loss in enumerate(curve):
        assert loss == pytest.approx(10 - place * 10 / module.NUM_PLACES, abs=0.1)


def test_a_line_of_all_ranks_may_be_long(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAIL_BYTES", 1000)
    ranks = [{"rank": rank, "host": "here", "tokens": 5.0, "seconds": SECONDS} for rank in range(100)]
    write(run, *(step(number) for number in range(1, 60)), {"kind": "ranks", "step": 59, "ranks": ranks})
    seen = look(run)
    assert (seen["step"], len(seen["ranks"])) == (59, 100)


def test_a_curve_in_one_line() -> None:
    assert sparkline([0.0, 7.0, None, 3.5, 1.0]) == "▁█ ▅▂"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == sparkline([None]) == ""


def test_watching_writes_nothing_and_is_json_for_scripts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, step(1, accuracy=None, loss=None), step(2, accuracy=None, loss=None))
    before = {path: path.stat() for path in run.rglob("*")}
    watch(run, once=True, as_json=True)
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert told["run"] == str(run)
    watch(run, once=True)
    assert "running" in capsys.readouterr().out
    after = {path: path.stat() for path in run.rglob("*")}
    assert {path: (was.st_mtime_ns, was.st_size) for path, was in before.items()} == {
        path: (now.st_mtime_ns, now.st_size) for path, now in after.items()
    }
