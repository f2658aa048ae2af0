"""A rank keeps to its cores, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_a_rank_keeps_to_its_cores_for_real() -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one processor cannot be shared out")
    program = "import os; from bertrain.ranks.binding import bind; bind(1, 2); print(*sorted(os.sched_getaffinity(0)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    mine = {int(word) for word in done.stdout.split()}
    assert mine
    assert mine < set(usable)
    assert usable[0] not in mine
