"""The kernels and the model made of them in Triton's interpreter, against their plain twins.

One process with TRITON_INTERPRET=1 measures all cases of `tests/interpreted.py`; each test looks at one of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.interpreted import CASES


def why_not() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"

    def release(package: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:2])

    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        return "the interpreter of triton < 3.7 does not work with numpy >= 2.4"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.interpreted"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    print(run.stderr)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "triton interpreter" in run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_kernel_matches_twin(figures: dict[str, float], case: str) -> None:
    assert figures[case] <= CASES[case][1]
