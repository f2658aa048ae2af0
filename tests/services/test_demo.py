"""`make demo` as a newcomer runs it: a fresh clone, nothing installed, the package index and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.services, pytest.mark.long]
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
    # How much it learns in two minutes depends on the machine; that it learns does not.
    losses = [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)", done.stdout, re.M)]
    assert losses[-1] < losses[0] - 1
    assert re.search(r"^quality: +[\d.]+% of masked words predicted in .*: [\d.]+%$", done.stdout, re.M)
    assert re.search(r"united \[MASK\] \.\n +\S+ [\d.]+%", done.stdout)
    for made in ("report.html", "model/model.safetensors", "model/README.md", "recipe.toml"):
        assert (clone / "runs" / "demo" / made).is_file()
    again = subprocess.run(["make", "demo"], cwd=clone, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "quality:" in again.stdout
