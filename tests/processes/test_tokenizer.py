"""Imports of modules, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("bertrain.data.text.vocabulary", {"pyarrow", "tokenizers", "bertrain.data.text.documents"}),
        ("bertrain.reports.watch", {"mwparserfromhell", "bertrain.data.text.wikipedia"}),
        ("bertrain.training.start", {"torch._dynamo", "torch._inductor"}),  # a second and more in every rank
    ],
)
def test_a_module_does_not_load_what_it_does_not_need(module: str, unwanted: set[str]) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert not unwanted & set(loaded)
