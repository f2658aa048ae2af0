"""`bertrain embed` as a command: on several ranks, killed by the system, and what it prints."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests import helpers
from tests.miniature_tasks import command_line
from tests.training.test_embed import encoder as encoder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of texts."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    words = helpers.vocabulary_words()
    path.write_text("".join(f"{words[row % 42]} {words[row % 41]} {words[row % 37]}\n" for row in range(20_000)))
    return path


def test_ranks_and_kills_change_nothing(encoder: Path, texts: Path, tmp_path: Path) -> None:
    alone = command_line("embed", encoder, texts, "--out", tmp_path / "alone.npy", "--json", "--max-length", 4)
    done = json.loads(alone.out)
    assert (done["texts"], done["width"], done["pooling"], done["normalize"]) == (20_000, 32, "mean", True)
    shared = helpers.bertrain(
        "embed", encoder, texts, "--out", tmp_path / "ranks.npy", "--nproc", 2, "--json", "--max-length", 4
    )
    assert json.loads(shared.stdout)["truncated"] == done["truncated"] > 10_000

    out, folder = tmp_path / "killed.npy", tmp_path / ".killed.npy.partial"
    process = subprocess.Popen(
        helpers.command("embed", encoder, texts, "--out", out, "--max-length", 4),
        env=helpers.environment(),
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (folder / "00000.parquet").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists() or not folder.exists()
    if not out.exists():
        again = command_line("embed", encoder, texts, "--out", out, "--max-length", 4)
        assert "continuing: " in again.err
    expected = np.load(tmp_path / "alone.npy")
    for name in ("ranks", "killed"):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), expected)


def test_a_bad_row_ends_with_one_sentence(encoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "bato"}\n{"text": null}\n')
    for ranks in (1, 2):
        failed = helpers.bertrain("embed", encoder, path, "--out", tmp_path / "v.npy", "--nproc", ranks, check=False)
        assert failed.returncode == 2
        assert failed.stderr.count("[bad-text]") == 1
        assert f"line 2 of {path}" in failed.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["texts.jsonl"]
