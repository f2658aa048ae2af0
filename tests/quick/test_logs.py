"""Logs of ranks: written so that nothing is lost that can be kept, and nothing that fails stops a run."""

from __future__ import annotations

import json
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bertrain.base import logs as module
from bertrain.base.console import Console, warn
from bertrain.base.errors import AgreedError, RequeueError, UserError
from bertrain.base.logs import describe, keep_log, logs, newest_entries, note
from tests import helpers


def put(run: Path, rank: int, *entries: dict[str, Any], name: str = "") -> Path:
    (run / "logs").mkdir(parents=True, exist_ok=True)
    path = run / "logs" / (name or f"rank-{rank}.jsonl")
    with open(path, "a") as file:
        for entry in entries:
            file.write(json.dumps({"time": 1.0, "level": "info", "event": "said", "text": "x"} | entry) + "\n")
    return path


def texts(entries: Any) -> list[str]:
    return [entry["text"] for entry in entries]


# --- writing ---------------------------------------------------------------------------------------


def test_whatever_is_said_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note("error", "lost", "no log is kept yet")
    before = time.time()
    with keep_log(tmp_path, 3, 8):
        Console("quiet").say("quiet on the console")
        Console("normal", is_speaker=False).say("another rank says it")
        warn("mind the \u00e4 step")
        note("info", "steps", "step 5", step=5)
    note("error", "lost", "no log is kept any more")
    entries = list(logs(tmp_path))
    assert [(entry["event"], entry["level"], entry["text"]) for entry in entries] == [
        ("start", "info", f"rank 3 of 8 starts on host {entries[0]['host']}"),
        ("said", "info", "quiet on the console"),
        ("warning", "warning", "mind the \u00e4 step"),
        ("steps", "info", "step 5"),
        ("end", "info", "rank 3 is done"),
    ]
    assert entries[3]["step"] == 5
    assert all(entry["rank"] == 3 and before <= entry["time"] <= time.time() for entry in entries)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "warning: mind the \u00e4 step\n")


@pytest.mark.parametrize(
    ("error", "level", "event"),
    [
        (RequeueError("stopped-by-signal", "saved"), "warning", "stop"),
        (AgreedError("out-of-memory", "no room"), "error", "stop"),
        (ValueError("ours"), "error", "failure"),
        (KeyboardInterrupt(), "warning", "stop"),
    ],
)
def test_how_a_rank_ended_is_kept(tmp_path: Path, error: BaseException, level: str, event: str) -> None:
    with pytest.raises(type(error)), keep_log(tmp_path, 0, 1):
        raise error
    last = newest_entries(tmp_path, 0)[-1]
    assert (last["level"], last["event"]) == (level, event)
    assert str(error) in last["text"]
    assert ("traceback" in last) == (event == "failure")


def test_two_files_are_the_most_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 20_000)
    with keep_log(tmp_path, 0, 1):
        for number in range(1000):
            note("info", "said", f"{number:06d}")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert set(sizes) == {"rank-0.jsonl", "rank-0.jsonl.1"}
    assert max(sizes.values()) <= 20_000
    kept = [text for text in texts(logs(tmp_path)) if text.isdigit()]
    assert kept == [f"{number:06d}" for number in range(1000 - len(kept), 1000)], "the newest, none of them missing"
    assert len(kept) > 150


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log is a link to a device that is always full; then there is room again."""
    (tmp_path / "logs").mkdir()
    link = tmp_path / "logs" / "rank-0.jsonl"
    link.symlink_to("/dev/full")
    with keep_log(tmp_path, 0, 1):
        note("info", "said", "first")
        note("info", "said", "second")
        link.unlink()
        note("info", "said", "third")
        note("info", "said", "fourth")
    first, second, _ = logs(tmp_path)
    assert (first["text"], first["lost_before"]) == ("third", 3)
    assert "(and 3 lines before it were lost)" in describe(first)
    assert "lost_before" not in second
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: cannot write {link}: [Errno 28] No space left on device; the run continues"


def test_no_memory_for_a_line_does_not_hide_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise MemoryError

    with helpers.refused("out-of-memory"), keep_log(tmp_path, 0, 1):
        monkeypatch.setattr(module.LOGGER, "makeRecord", fail)
        raise UserError("out-of-memory", "use less")


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("in the way")
    with keep_log(tmp_path, 0, 1):
        note("info", "said", "nothing")
    assert "the run continues" in capsys.readouterr().err


# --- reading ---------------------------------------------------------------------------------------


def test_ranks_are_told_by_time_and_chosen(tmp_path: Path) -> None:
    put(tmp_path, 0, {"time": 10, "text": "a"}, {"time": 30, "text": "c", "level": "warning"})
    put(tmp_path, 0, {"time": 1, "text": "older"}, name="rank-0.jsonl.1")
    put(tmp_path, 11, {"time": 20, "text": "b", "level": "error"}, {"time": 5, "text": "set back"}, {"time": 40})
    assert texts(logs(tmp_path)) == ["older", "a", "b", "set back", "c", "x"]
    assert texts(logs(tmp_path, rank=11)) == ["b", "set back", "x"]
    assert texts(logs(tmp_path, level="warning")) == ["b", "c"]
    assert texts(logs(tmp_path, level="error", rank=0)) == []


def test_only_the_last_stretch_of_time(tmp_path: Path) -> None:
    now = time.time()
    put(tmp_path, 0, {"time": now - 3700, "text": "old"}, {"time": now - 3500, "text": "new"})
    assert texts(logs(tmp_path, since="1h")) == ["new"]
    assert texts(logs(tmp_path, since="2h")) == ["old", "new"]


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    path = put(tmp_path, 0, {"text": "a"})
    with open(path, "ab") as file:
        file.write(b'{"time": 2, "le\n\0\0\0\n[1]\n{"time": "soon", "level": "info", "text": "t"}\n')
    put(tmp_path, 0, {"text": "b"})
    with open(path, "ab") as file:
        file.write(b'{"time": 3')
    assert texts(logs(tmp_path)) == texts(newest_entries(tmp_path, 0)) == ["a", "b"]


def test_following_over_a_change_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that come while it is read, one of them in two pieces; a file that takes the other's place; a new rank."""
    monkeypatch.setattr(module, "POLL_S", 0.02)
    path = put(tmp_path, 0, {"text": "0"})
    followed = logs(tmp_path, follow=True)
    assert texts(islice(followed, 1)) == ["0"]

    def write() -> None:
        put(tmp_path, 0, {"text": "1"})
        whole = json.dumps({"time": 1.0, "level": "info", "text": "2"}) + "\n"
        for piece in (whole[:10], whole[10:]):
            with open(path, "a") as file:
                file.write(piece)
            time.sleep(0.1)
        put(tmp_path, 0, {"text": "3"})
        path.rename(f"{path}.1")
        time.sleep(0.1)
        put(tmp_path, 0, {"text": "4"})
        time.sleep(0.1)
        put(tmp_path, 7, {"text": "5"})

    writer = threading.Thread(target=write)
    writer.start()
    assert texts(islice(followed, 5)) == ["1", "2", "3", "4", "5"]
    writer.join()


def test_what_a_user_can_get_wrong(tmp_path: Path) -> None:
    with helpers.refused("missing-log", tmp_path):
        logs(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with helpers.refused("missing-log", tmp_path):
        logs(tmp_path)
    put(tmp_path, 0, {})
    put(tmp_path, 2, {})
    with helpers.refused("missing-log", "rank 1", "0, 2"):
        logs(tmp_path, rank=1)
    with helpers.refused("invalid-duration", "--since", "soon"):
        logs(tmp_path, since="soon")
