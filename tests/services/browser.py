"""A real Chromium, headless, with one page open.

It is spoken to over its debugging pipe (JSON messages that end in a zero byte), since its --screenshot option needs
scripts, which are to be off for some pages, and takes no whole page.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; Debian's package is called chromium")

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
    "--remote-debugging-pipe",
]


class Browser:
    """One Chromium with one page open."""

    def __init__(self, profile: Path, *, scripts: bool = False) -> None:
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium reads from 3 and writes to 4; our ends must not be among these when bash puts them there.
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        options = [*OPTIONS, *([] if scripts else ["--blink-settings=scriptEnabled=false"])]
        start = [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"]
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
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)

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

    def open(self, page: Path | str, *, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Show a page and wait until it is loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

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


def background(picture: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    return tuple(picture[2, 2].tolist())


def inked(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where a picture is visibly not its background."""
    return np.abs(picture.astype(int) - background(picture)).max(axis=2) > 40
