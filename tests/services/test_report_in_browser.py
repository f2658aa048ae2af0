"""The report in a real Chromium, headless and with scripts off: it shows, fits the window, and asks for nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bertrain.profiling.profile_report import profile_report
from bertrain.reports.report import report
from bertrain.training.start import pretrain
from tests import helpers
from tests.services.browser import Browser, background, inked, needs_chromium

H200 = Path(__file__).parents[1] / "data" / "profile-h200"

pytestmark = [pytest.mark.services, needs_chromium]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of one run, of two, and of a profile; the runs' names are long and have no place to break.

    The second run has all there is to show: sixteen ranks, telemetry of eight GPUs, a step that is not finite, a
    warning, a torn line.
    """
    folder = tmp_path_factory.mktemp("runs")
    data = helpers.make_data(folder)
    runs = [folder / f"{'a-run-with-a-long-name' * 4}{number}" for number in range(2)]
    for number, run in enumerate(runs):
        settings = helpers.tiny_settings(
            train__max_steps=4, train__seed=number, evaluate__data=data, evaluate__every_samples=24
        )
        pretrain(settings, data, run)
    embellish(runs[1])
    of_runs = {"one": report(runs[:1]), "all": report(runs[1:]), "two": report(runs, out=folder / "two.html")}
    return of_runs | {"profile": profile_report([H200], out=folder / "profile.html")[0]}


def embellish(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    step = json.loads(lines[0])
    ranks = [
        {"rank": rank, "host": f"host-{rank // 8}", "tokens": 500.0, "seconds": step["seconds"]} for rank in range(16)
    ]
    lines.append(json.dumps({"kind": "ranks", "step": 4, "ranks": ranks}))
    lines += [json.dumps(step | {"step": 5, "loss": None, "applied": False}), lines[0][:50], ""]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    header = "time,sm_clock_mhz,power_w,temperature_c,gpu_utilisation,throttle_reasons,energy_j"
    for rank in range(8):
        rows = [
            f"{second},{1700 + second % 7 - rank},{600 + 10 * rank},{60 + rank},0.9,4,{600 * second}"
            for second in range(100)
        ]
        name = f"telemetry-{rank}.csv" if rank else "telemetry.csv"
        (run / name).write_text("\n".join([header, *rows, ""]))
    with open(run / "logs" / "rank-0.jsonl", "a") as log:
        text = "rank 3 on host host-0 takes 1.7 times as long over a token as the ranks' median"
        log.write(json.dumps({"time": 1.7e9, "level": "warning", "event": "warning", "text": text}) + "\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", ["one", "all", "two", "profile"])
def test_the_report_shows_and_fits_the_window(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.open(pages[name], width=width, scheme=scheme)
    assert browser.requests() == [pages[name].resolve().as_uri()]
    picture = browser.screenshot()
    assert picture.shape[1] == browser.size()[0] == width
    assert picture.shape[0] > 1000
    ink = inked(picture)
    assert ink.mean() > 0.01
    assert not ink[:, :8].any(), "something sticks out on the left"
    assert not ink[:, -8:].any(), "something sticks out on the right"
    # A blank stretch of more than a window's height would be a plot or table that does not show.
    blank = np.flatnonzero(np.diff(np.flatnonzero(ink.any(axis=1))) > 300)
    assert blank.size == 0


def test_text_and_lines_are_readable_by_day_and_night(browser: Browser, pages: dict[str, Path]) -> None:
    pictures = {}
    for scheme in ("light", "dark"):
        browser.open(pages["one"], width=1200, scheme=scheme)
        pictures[scheme] = browser.screenshot()
    assert min(background(pictures["light"])) > 240
    assert max(background(pictures["dark"])) < 40
    # The same things show in both: what is inked by day is inked by night, plots with their labels included.
    both = [inked(pictures[scheme]) for scheme in ("light", "dark")]
    assert both[0].shape == both[1].shape
    assert (both[0] & both[1]).sum() > 0.8 * max(both[0].sum(), both[1].sum())


@pytest.mark.parametrize(("name", "num_figures", "num_tables"), [("all", 14, 11), ("profile", 7, 4)])
def test_a_screen_reader_finds_its_way(
    browser: Browser, pages: dict[str, Path], name: str, num_figures: int, num_tables: int
) -> None:
    """What the browser tells assistive technology: landmarks, headings in order, names of figures and tables."""
    browser.open(pages[name], width=1400)
    nodes = [node for node in browser.send("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
    named: dict[str, list[str]] = {}
    for node in nodes:
        named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert all(len(named[role]) == 1 for role in ("main", "banner", "contentinfo", "navigation"))
    assert named["link"][0] == "Skip to the content"
    figures = [label for role in ("image", "img") for label in named.get(role, [])]
    assert len(figures) >= num_figures
    assert all(len(label) > 15 for label in figures)
    tables = [label for role in ("table", "grid") for label in named.get(role, [])]
    assert len(tables) >= num_tables
    assert all(tables)
    assert named["rowheader"]
    assert named["columnheader"]
    levels = [
        int(prop["value"]["value"])
        for node in nodes
        if node["role"]["value"] == "heading"
        for prop in node["properties"]
        if prop["name"] == "level"
    ]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels)), "no level is left out"


def test_the_first_key_leads_past_the_head(browser: Browser, pages: dict[str, Path]) -> None:
    """Tab shows the link that skips to the figures, which is not seen otherwise; Enter follows it."""
    browser.open(pages["all"], width=1400)
    before = browser.screenshot()[:60, :300]
    for kind in ("keyDown", "keyUp"):
        browser.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert (browser.screenshot()[:60, :300] != before).mean() > 0.05
    enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    for kind in ("keyDown", "keyUp"):
        browser.send("Input.dispatchKeyEvent", type=kind, **enter)
    assert browser.send("Page.getNavigationHistory")["entries"][-1]["url"].endswith("#content")


def test_what_is_folded_opens_without_scripts(browser: Browser, pages: dict[str, Path]) -> None:
    """The tables behind a title are in the page, and a click opens them."""
    browser.open(pages["all"], width=1400)
    before = browser.size()[1]
    root = browser.send("DOM.getDocument")["root"]["nodeId"]
    found = browser.send("DOM.querySelectorAll", nodeId=root, selector="summary")["nodeIds"]
    assert len(found) == 2
    for node in found:
        browser.send("DOM.scrollIntoViewIfNeeded", nodeId=node)
        box = browser.send("DOM.getBoxModel", nodeId=node)["model"]["content"]
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": box[0] + 20, "y": (box[1] + box[5]) / 2, "button": "left", "clickCount": 1}
            browser.send("Input.dispatchMouseEvent", type=kind, **place)
    assert browser.size()[1] > before + 500
    assert browser.size()[0] == 1400


def test_the_report_prints_on_white(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=800, scheme="dark", media="print")
    picture = browser.screenshot()
    assert min(background(picture)) > 240
    assert inked(picture).mean() > 0.01
    assert base64.b64decode(browser.send("Page.printToPDF")["data"]).startswith(b"%PDF")
