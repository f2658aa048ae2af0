"""Balance as a run of one rank prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.data.formats.shards import Shards
from bertrain.training.start import pretrain
from tests import helpers


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards.open(helpers.make_data(tmp_path_factory.mktemp("data")))


def test_one_rank_waits_for_nobody(shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(helpers.tiny_settings(train__max_steps=2, log__level="verbose"), shards.folder, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["idle_share"] for step in steps] == [0.0, 0.0]
    assert "rank_tokens" not in steps[0]
    said = capsys.readouterr().out
    assert "balance" not in said
    assert "idle" not in said
