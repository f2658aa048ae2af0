"""`bertrain profile` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.cli.main import app
from bertrain.profiling.sets import find_sets
from tests import helpers
from tests.miniature_tasks import command_line


def test_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`run` may be left out; two ranks make two sets; real data is taken as it is."""
    data, out = helpers.make_data(tmp_path), tmp_path / "out"
    arguments = helpers.tiny_arguments()
    command_line(
        "profile", "bert-tiny", "--data", data, "--out", out, "--steps", 3, "--warm-up-steps", 3, "--recorded-steps", 1,
        "--nproc", 2, *arguments,
    )  # fmt: skip
    assert len(list(out.glob("*-cpu*/repeat-1/device.json"))) == 2
    assert "ms per step (median; " in capfd.readouterr().out
    for words in (["report", str(out), "--json"], ["roofline", str(out)]):
        app(["profile", *words], standalone_mode=False)
    said = capfd.readouterr().out
    assert {entry["steps"] for entry in json.loads(said.splitlines()[0])["sets"]} == {3}
    assert "query, key, value" in said
    for found in find_sets([out]):
        assert found.energy_tokens == found.tokens.sum(), "a processor's energy is that of both ranks"
    with helpers.refused("occupied-folder", out):
        app(["profile", "bert-tiny", "--out", str(out), *arguments], standalone_mode=False)
