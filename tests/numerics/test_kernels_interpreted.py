"""The kernels and the model made of them in Triton's interpreter, against their plain twins.

One process with TRITON_INTERPRET=1 measures all cases of `tests/interpreted.py` but the long ones, which have another.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.interpreted import CASES, LONG


def why_not() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"

    def release(package: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:2])

    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        return "the interpreter of triton < 3.7 does not work with numpy >= 2.4"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def measured(*options: str) -> dict[str, float]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.interpreted", *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    print(run.stderr)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "triton interpreter" in run.stderr
    return json.loads(run.stdout)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.long)])
def test_kernels_match_their_twins(is_long: bool) -> None:
    """All cases in one test, since another worker that took some of them would measure all."""
    errors = measured(*(["--long"] if is_long else []))
    assert errors.keys() == (LONG if is_long else CASES.keys() - LONG)
    assert not {name: error for name, error in errors.items() if not error <= CASES[name][1]}
