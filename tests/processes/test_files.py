"""A signal while a folder is written, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

WRITING = """
import sys, time
from pathlib import Path
from bertrain.base.files import new_folder
with new_folder(Path(sys.argv[1]) / "whole") as folder:
    (folder / "part").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_of_a_folder(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert [path.name for path in tmp_path.iterdir()] == [f".whole.partial-{process.pid}"]
    process.send_signal(number)
    assert process.wait() == -number
    assert list(tmp_path.iterdir()) == []
