"""Balance as a run of one rank prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.training.start import pretrain
from tests import helpers


def test_one_rank_waits_for_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(
        helpers.tiny_settings(train__max_steps=2, log__level="verbose"), helpers.make_data(tmp_path), tmp_path / "run"
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["idle_share"] for step in steps] == [0.0, 0.0]
    assert "rank_tokens" not in steps[0]
    said = capsys.readouterr().out
    assert "balance" not in said
    assert "idle" not in said
