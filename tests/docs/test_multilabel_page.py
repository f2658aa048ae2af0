"""The commands of docs/how-to-multilabel.md run as written, on a model and data in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.training.start import pretrain
from bertrain.training.task_results import metrics_of
from bertrain.weights.export import export
from tests import helpers, miniature_tasks
from tests.docs.test_documents import DOCS, commands_of, words_of
from tests.miniature_tasks import command_line

LABELS = dict(zip(miniature_tasks.COLOURS, ("toxic", "insult", "threat"), strict=True))


def test_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = helpers.tiny_settings(train__max_steps=1, model__max_positions=128, log__level="quiet")
    pretrain(settings, helpers.make_data(tmp_path, documents=10), tmp_path / "base")
    export(tmp_path / "base", tmp_path / "weights")
    for folder in ("comments", "columns"):
        (tmp_path / folder).mkdir()
    for name, count, seed in (("train", 60, 1), ("dev", 40, 2)):
        rows = [json.loads(line) for line in miniature_tasks.label_sets(count, seed).splitlines()]
        rows = [row | {"label": [LABELS[color] for color in row["label"]]} for row in rows]
        (tmp_path / "comments" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        marks = [
            ",".join([row["text"], *(str(int(label in row["label"])) for label in LABELS.values())]) for row in rows
        ]
        header = ",".join(["text", *LABELS.values()])
        (tmp_path / "columns" / f"{name}.csv").write_text("\n".join([header, *marks]) + "\n")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "how-to-multilabel.md").read_text()
    commands = [command for command, is_whole in commands_of(page) if is_whole]
    assert len(commands) == 8
    for command in commands:
        command_line(*words_of(command))
    assert metrics_of("runs/columns")["examples"] == 40
    assert len((tmp_path / "predictions" / "dev.jsonl").read_text().splitlines()) == 40
    assert set(json.loads((tmp_path / "exported" / "config.json").read_text())["thresholds"]) == set(LABELS.values())
