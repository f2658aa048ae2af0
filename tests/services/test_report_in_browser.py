"""The report in a real Chromium, headless and with scripts off: it shows, fits the window, and asks for nothing.

Chromium is spoken to over its debugging pipe (JSON messages that end in a zero byte), since its --screenshot
option needs the very scripts that are to be off, and takes no whole page.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from bertrain.observe.report import report
from bertrain.train.pretrain import pretrain
from tests import helpers

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; Debian's package is called chromium"),
]

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--blink-settings=scriptEnabled=false",
    "--remote-debugging-pipe",
]


class Browser:
    """One Chromium with one page open."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium reads from 3 and writes to 4; our ends must not be among these when bash puts them there.
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        start = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec "${@:3}" 3<&"$1" 4>&"$2"', "bash", *map(str, given), *start],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *given):
            os.close(end)
        self._reader = os.fdopen(self._answers, "rb")
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setScriptExecutionDisabled", value=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer, keeping the events that come before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._commands,
            json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0",
        )
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def open(self, page: Path, *, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Show a page and wait until it is loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def size(self) -> tuple[int, int]:
        """Width and height of all there is to see, what sticks out included."""
        content = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return content["width"], content["height"]

    def screenshot(self) -> npt.NDArray[np.uint8]:
        """The whole page as red, green and blue of its pixels."""
        width, height = self.size()
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))

    def requests(self) -> list[str]:
        """Addresses that the open page asked for."""
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        os.close(self._commands)  # Chromium ends when its pipe does
        self._process.wait(timeout=30)
        self._reader.close()

    def _receive(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._reader.read(1)) != b"\0":
            assert byte, "chromium ended before it answered"
            message += byte
        return dict(json.loads(message))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of one run, and one of two; the names are long and have no place to break."""
    folder = tmp_path_factory.mktemp("runs")
    data = helpers.make_data(folder)
    runs = [folder / f"{'a-run-with-a-long-name' * 4}{number}" for number in range(2)]
    for number, run in enumerate(runs):
        settings = helpers.tiny_settings(
            train__max_steps=4, train__seed=number, evaluate__data=data, evaluate__every_samples=24
        )
        pretrain(settings, data, run)
    return {"one": report(runs[:1]), "two": report(runs, out=folder / "two.html")}


def background(picture: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    return tuple(picture[2, 2].tolist())


def inked(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where a picture is visibly not its background."""
    return np.abs(picture.astype(int) - background(picture)).max(axis=2) > 40


@pytest.mark.parametrize("width", [1200, 420])
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_report_shows_and_fits_the_window(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width=width)
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


def test_the_report_prints_on_white(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], width=800, scheme="dark", media="print")
    picture = browser.screenshot()
    assert min(background(picture)) > 240
    assert inked(picture).mean() > 0.01
    assert base64.b64decode(browser.send("Page.printToPDF")["data"]).startswith(b"%PDF")
