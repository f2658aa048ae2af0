"""Two ranks hash initial weights once."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from bertrain.run import checkpoint
from tests import helpers, miniature_tasks
from tests.miniature_tasks import Miniature

LOG_HASHES = """
import hashlib, os
digest = hashlib.file_digest

def logged(stream, name):
    with open(os.environ["HASH_LOG"], "a") as log:
        log.write(os.environ.get("RANK", "launcher") + " " + stream.name + "\\n")
    return digest(stream, name)

hashlib.file_digest = logged
"""


def test_only_the_first_of_two_ranks_hashes(mini: Miniature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOG_HASHES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("HASH_LOG", str(tmp_path / "hashes"))
    helpers.bertrain(
        "finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", tmp_path / "run", "--nproc", 2,
        *miniature_tasks.arguments(train__max_steps=1, checkpoint__enabled=False),
    )  # fmt: skip
    lines = [line.split(" ", 1) for line in (tmp_path / "hashes").read_text().splitlines()]
    of_weights = [(rank, Path(path).name) for rank, path in lines if Path(path).is_relative_to(mini.base)]
    assert Counter(of_weights) == Counter({("0", name): 1 for name in checkpoint.FILES})
