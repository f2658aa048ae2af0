"""`bertrain logs` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.miniature_tasks import command_line
from tests.quick.test_logs import put


def test_the_command_prints_lines_or_json(tmp_path: Path) -> None:
    put(tmp_path, 4, {"time": 1e9, "text": "a warning", "level": "warning"}, {"time": 1e9, "text": "chatter"})
    shown = command_line("logs", tmp_path, "--rank", 4, "--level", "warning").out
    assert shown.rstrip().endswith("rank 4  warning  a warning")
    (line,) = command_line("logs", tmp_path, "--level", "warning", "--json").out.splitlines()
    assert json.loads(line) | {"rank": 4, "text": "a warning"} == json.loads(line)
    refused = command_line("logs", tmp_path, "--rank", 5, check=False)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
