"""MLPerf's library missing, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_without_mlperfs_library_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['mlperf_logging'] = None\n"
        "from bertrain.cli.main import main; sys.argv = ['bertrain', 'mlperf', 'check', sys.argv[1]]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "[missing-package]" in done.stderr
    assert "pip install 'bertrain[mlperf]'" in done.stderr
