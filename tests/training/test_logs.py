"""The log of a run over several starts."""

from __future__ import annotations

from pathlib import Path

from bertrain.base.logs import logs
from bertrain.training.start import pretrain
from tests import helpers
from tests.quick.test_logs import texts


def test_a_run_keeps_its_log_over_starts(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(train__max_steps=4, log__every_steps=2, log__level="quiet")
    for _ in range(2):
        pretrain(settings, data, run)
    events = [entry["event"] for entry in logs(run)]
    assert events.count("start") == events.count("end") == 2
    steps = [entry for entry in logs(run) if entry["event"] == "steps"]
    assert [entry["step"] for entry in steps] == [1, 2, 4]
    assert steps[0]["text"].startswith("step 1/4  loss ")
    assert any(text.startswith("the end, after step 4") for text in texts(logs(run)))
