"""Text extraction by several worker processes and by the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests import helpers
from tests.quick.test_extract import DUMP, documents_of


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "cut.xml").write_bytes(DUMP[:-1000])
    done = helpers.bertrain("data", "extract", tmp_path / "cut.xml", "--out", tmp_path / "out", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    for named in ("[damaged-input]", "cut.xml", "page 7", "--on-error skip"):
        assert named in done.stderr
    assert not (tmp_path / "out").exists()
    arguments = ("--on-error", "skip", "--hold-out", 1, "--json")
    done = helpers.bertrain("data", "extract", tmp_path / "cut.xml", "--out", tmp_path / "out", *arguments)
    made = json.loads(done.stdout)
    assert made == json.loads((tmp_path / "out" / "extract.json").read_text())
    assert made["counts"]["documents"] == 4
    assert made["skipped"]["damaged"] == 1
    assert made["counts"]["held_out"] == len(documents_of((tmp_path / "out" / "eval.txt").read_text())) == 1
