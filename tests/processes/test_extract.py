"""Text extraction by several worker processes and by the command line."""

from __future__ import annotations

import json
from pathlib import Path

from bertrain.data.text.extract import extract
from tests import helpers
from tests.quick.test_extract import DUMP, SAMPLE, documents_of


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


def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sentence {n} is here. And {'more ' * 200}.\n\n" for n in range(2000)))
    for workers in (1, 2):
        extract([SAMPLE, text], tmp_path / str(workers), workers=workers, hold_out=20, part_bytes=500_000)
    one, two = ([path for path in sorted((tmp_path / n).rglob("*")) if path.is_file()] for n in "12")
    assert len(one) == len(two) == 7
    for first, second in zip(one, two, strict=True):
        assert first.relative_to(tmp_path / "1") == second.relative_to(tmp_path / "2")
        assert first.read_bytes() == second.read_bytes()
