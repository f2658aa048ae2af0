"""The section about ONNX of docs/how-to-weights.md runs as written, and so does the script of its last table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bertrain.training.start import pretrain
from bertrain.weights.export import export
from tests import helpers
from tests.docs.test_documents import DOCS, ROOT, actions_of, commands_of, perform, words_of
from tests.miniature_tasks import command_line

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")
SECTION = (DOCS / "how-to-weights.md").read_text().partition("## Export to ONNX\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has trained runs/tiny."""
    folder = tmp_path_factory.mktemp("onnx")
    settings = helpers.tiny_settings(train__max_steps=1, log__level="quiet")
    pretrain(settings, helpers.make_data(folder, documents=10), folder / "runs" / "tiny")
    return folder


def test_the_section_runs_as_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    commands = [words_of(command) for command, is_whole in commands_of(SECTION) if is_whole]
    assert len(commands) == 2
    for command in commands:
        command_line(*command)
    (action,) = actions_of(SECTION)
    action.text += "\nprint(*logits.shape)"
    assert perform(action, folder).splitlines()[-1].split()[::2] == ["1", str(helpers.vocab_size())]
    sizes = [(folder / "exported" / name / "model.onnx").stat().st_size for name in ("onnx", "onnx-int8")]
    assert sizes[1] < sizes[0]


def test_the_table_of_latencies_is_measured(folder: Path) -> None:
    """In all its columns, on a small encoder; what it measures on MiniLM is in the results."""
    assert "benchmarks/onnx_latency.py" in SECTION
    export(folder / "runs" / "tiny", folder / "weights")
    command = [sys.executable, ROOT / "benchmarks" / "onnx_latency.py", "--weights", folder / "weights", "--shapes",
               "1x8", "3x16", "--repeats", "2", "--threads", "1", "--output", folder]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    measured, kept = (
        json.loads((place / "onnx_latency.json").read_text()) for place in (folder, ROOT / "benchmarks" / "results")
    )
    shapes = {(row["batch"], row["length"]) for row in measured["rows"]}
    assert shapes == {(1, 8), (3, 16)}
    assert len(measured["rows"]) == 10
    assert {row["system"] for row in measured["rows"]} == {row["system"] for row in kept["rows"]}
    for row in kept["rows"]:  # the medians of the page are those of the results
        if row["system"] == "transformers" and f"| {row['batch']} x {row['length']} |" in SECTION:
            medians = [
                one["median_ms"]
                for one in kept["rows"]
                if (one["batch"], one["length"]) == (row["batch"], row["length"])
            ]
            shown = " | ".join(f"{median:.0f}" for median in medians)
            assert f"| {row['batch']} x {row['length']} | {shown} |" in SECTION
