"""`bertrain watch --web`: the report of a run or of a folder of runs, as it is now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.reports.history import read
from bertrain.reports.report import page
from bertrain.serving.live import LiveReports
from bertrain.training.start import pretrain
from tests import helpers
from tests.miniature_tasks import command_line
from tests.served import started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    data = helpers.make_data(folder)
    for name in ("one", "group/two"):
        pretrain(helpers.tiny_settings(train__max_steps=4, log__level="quiet"), data, folder / "runs" / name)
    return folder / "runs"


def sections_of(text: str, first: str) -> str:
    """A report from its section `first` on, without the footer and what follows it."""
    return text[text.index(f'<section id="{first}"') : text.index("</main>")]


def test_the_page_is_the_report(runs: Path) -> None:
    with started("watch", runs / "one", "--web") as server:
        status, content = server.request("/")
        assert status == 200
        assert sections_of(content, "curves") == sections_of(page([read(runs / "one", "one")]), "curves")
        assert server.request("/compare")[0] == 404
        code, err = server.stop()
        assert code == 0
        assert "Traceback" not in err


def test_a_folder_is_a_list_with_a_page_for_each(runs: Path, tmp_path: Path) -> None:
    with started("watch", runs, "--web") as server:
        listed = server.request("/")[1]
        assert all(f'href="/runs/{name}/"' in listed for name in ("one", "group/two"))
        assert listed.count("4 of 4") == 2
        assert "step" in server.request("/runs/group/two/")[1]
        assert "Against one" in server.request("/compare")[1] or "Against group/two" in server.request("/compare")[1]
        assert server.request("/runs/none/")[0] == 404
        assert server.request("/runs/../one/")[0] == 404


def test_a_page_is_drawn_anew_only_when_something_was_written(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = LiveReports(runs, 1.0)
    monkeypatch.setattr("bertrain.serving.live.REST", 0)
    first = reports.page("runs/one")
    assert reports.page("runs/one") is first
    lines = (runs / "one" / "metrics.jsonl").read_text().splitlines()
    step = next(json.loads(line) for line in lines if json.loads(line)["kind"] == "step")
    with open(runs / "one" / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps(step | {"step": 5}) + "\n")
    second = reports.page("runs/one")
    assert second is not None
    assert second != first
    assert reports.page("runs/one") is second


def test_a_run_that_is_killed_does_not_run_on(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no file."""
    states = iter(["running", "silent"])
    monkeypatch.setattr("bertrain.serving.live.look", lambda run: {"state": next(states), "why": "", "step": 1})
    monkeypatch.setattr("bertrain.serving.live.step_text", lambda seen, bar_width: "1")
    monkeypatch.setattr("bertrain.serving.live.REST", 0)
    reports = LiveReports(runs, 1.0)
    pages = [reports.page("runs/one") or "" for _ in range(2)]
    assert ["running; step 1" in page for page in pages] == [True, False]
    assert "silent; step 1" in pages[1]


def test_a_run_without_steps_says_so(runs: Path, tmp_path: Path) -> None:
    for name in ("config.json", "vocab.txt"):
        if (runs / "one" / name).is_file():
            (tmp_path / name).write_bytes((runs / "one" / name).read_bytes())
    (tmp_path / "checkpoints").mkdir()
    assert "no metrics yet" in (LiveReports(tmp_path, 1.0).page("") or "")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--web", "--once"], "conflicting-options"),
        (["--web", "--json"], "conflicting-options"),
        (["--port", "0"], "option-without-effect"),
        (["--host", "::1"], "option-without-effect"),
    ],
)
def test_options_that_do_not_go_together_are_refused(runs: Path, words: list[str], code: str) -> None:
    ended = command_line("watch", runs / "one", *words, check=False)
    assert ended.code == 2
    assert f"[{code}]" in ended.err


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    ended = command_line("watch", tmp_path, "--web", "--port", 0, check=False)
    assert ended.code == 2
    assert "Traceback" not in ended.err
