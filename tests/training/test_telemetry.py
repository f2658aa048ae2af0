"""Telemetry of runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bertrain.training.start import pretrain
from tests import helpers
from tests.quick.test_telemetry import notes_of, rows_of


def test_a_runs_samples_join_with_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = helpers.make_data(tmp_path)
    began = time.time()
    settings = helpers.tiny_settings(train__max_steps=12, log__telemetry=True, log__telemetry_ms=10)
    pretrain(settings, data, tmp_path / "run")
    over = time.time()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps, end = [line for line in lines if line["kind"] == "step"], lines[-1]
    starts = [step["ended"] - sum(step["seconds"].values()) for step in steps]
    assert began < starts[0]
    assert steps[-1]["ended"] < over
    assert all(step["ended"] <= later + 1e-3 for step, later in zip(steps, starts[1:], strict=False))
    times = [float(row["time"]) for row in rows_of(tmp_path / "run" / "telemetry.csv")]
    assert times == sorted(times)
    assert any(starts[0] <= moment <= steps[-1]["ended"] for moment in times)
    notes = notes_of(tmp_path / "run")
    assert notes["samples"] == len(times) > 2
    assert notes["share_of_a_core"] < 0.02
    assert end["kind"] == "end"
    said = capsys.readouterr().out
    if notes["joules"] is None:  # most machines hide RAPL from all but root
        assert "energy_j" in notes["missing"]
        assert end["joules"] is None
        assert "energy unknown (see telemetry.json)" in said
    else:
        assert end["joules"] == notes["joules"] > 0
        assert " J per million tokens" in said


def test_without_being_asked_nothing_is_sampled(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    pretrain(helpers.tiny_settings(train__max_steps=2), data, tmp_path / "run")
    assert not list((tmp_path / "run").glob("telemetry*"))
    assert "joules" not in (tmp_path / "run" / "metrics.jsonl").read_text()
