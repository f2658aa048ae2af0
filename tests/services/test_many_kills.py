"""The same as `tests/faults/test_kill.py` does twice, for as long as it takes to meet rare moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_kill import kill_random_ranks

pytestmark = [pytest.mark.services, pytest.mark.long]


@pytest.mark.timeout(1500)
def test_twenty_random_ranks_are_killed(tmp_path: Path) -> None:
    kill_random_ranks(tmp_path, kills=20, steps=300)
