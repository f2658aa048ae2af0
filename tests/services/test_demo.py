"""`make demo` as a newcomer runs it: a fresh clone, nothing installed, the package index and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1500)
def test_a_fresh_clone_learns_and_shows_it(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={sys.executable}"], cwd=clone, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    accuracy, ratio, constant = re.search(
        r"masked words ([\d.]+)%.*\n.* ([\d.]+) x the ([\d.]+)% of always guessing", done.stdout
    ).groups()
    assert float(ratio) >= 1.8
    assert float(accuracy) > float(constant)
    assert re.search(r"united \[MASK\] \.\n +states", done.stdout), "it has learnt something from context"
    for made in ("run/report.html", "exported/model.safetensors", "vocab.txt"):
        assert (clone / "runs" / "demo" / made).is_file()
