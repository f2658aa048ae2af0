"""Real runs in processes of their own, which tests watch and do things to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import helpers

PATIENCE_S = 240  # against a hang of the test itself, on a machine that others use too


class Launched:
    """A command that was started, what it says going to files that can be read meanwhile."""

    def __init__(self, command: list[str], folder: Path, name: str = "launched", **environment: str) -> None:
        self.out_path, self.err_path = folder / f"{name}.out", folder / f"{name}.err"
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = subprocess.Popen(
                command, env=helpers.environment() | environment, stdout=out, stderr=err, cwd=folder
            )

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks it has started, as far as they know who they are."""
        found: dict[int, int] = {}
        for process in children(self.process.pid):
            try:
                words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {int(word[5:]): process for word in words if word.startswith(b"RANK=")}
        return found

    def wait_until(self, condition: Callable[[], bool], what: str, pause: float = 0.02) -> None:
        """Wait for something to happen while it runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.err}"
            assert time.monotonic() < deadline, f"no end of waiting for {what}:\n{self.err}"
            time.sleep(pause)

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)

    def kill(self) -> None:
        """End whatever is left of it. Stopped first, it starts no process that would be missed here."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
        for process in reversed(descendants(self.process.pid)):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def as_job(
    launcher: str, *options: object, data: object, run: object, restarts: int = 0, **settings: object
) -> list[object]:
    """The words that launch the pre-training of a tiny model."""
    command = ["pretrain", "bert-tiny", "--data", data, "--run", run, "--restarts", restarts]
    return ["launch", launcher, *options, "--", *command, *helpers.tiny_arguments(**settings)]


def kill_when(condition: Callable[[], bool], *arguments: object) -> None:
    """Start the command line, and kill it as soon as something holds."""
    process = subprocess.Popen(
        helpers.command(*arguments),
        env=helpers.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"


def descendants(process: int) -> list[int]:
    """A process and all below it: torchrun's ranks are in sessions of their own."""
    found = [process]
    for one in found:
        found += children(one)
    return found


def children(process: int) -> list[int]:
    """The processes that a process has started, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if parent == process:
                found.append(int(entry.name))
    return found


def records(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """What the metrics of a run hold by now, of one kind; a line in the making is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["kind"] == kind]
