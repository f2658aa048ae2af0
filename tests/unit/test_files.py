"""What is half written goes, whatever ends the writing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertrain.base.files import new_folder, replacing

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


def test_a_handler_that_is_there_keeps_the_signal(tmp_path: Path) -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    try:
        with new_folder(tmp_path / "whole") as folder:
            signal.raise_signal(signal.SIGTERM)
            (folder / "part").write_text("whole")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == ["SIGTERM"]
    assert (tmp_path / "whole" / "part").read_text() == "whole"


def test_the_default_is_there_again_afterwards(tmp_path: Path) -> None:
    with new_folder(tmp_path / "whole"):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_file_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(tmp_path / "file") as file:
        file.write("new \udc80")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
