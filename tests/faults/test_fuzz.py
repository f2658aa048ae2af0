"""Some mutations of every file that bertrain reads; `python -m tests.fuzz` tries as many as there is time for."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.fuzz import Fuzzed, Reader, readers

MUTATIONS, CPU_S = 40, 0.5


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fuzzed, draw = Fuzzed(reader, tmp_path / "fuzzed"), random.Random(reader.name)
    end = time.process_time() + CPU_S
    for _ in range(MUTATIONS):
        finding = fuzzed.try_one(draw)
        assert finding is None, f"{finding.what}\n{finding.content[:2000]!r}"
        if time.process_time() > end:
            break
    assert fuzzed.num_read + fuzzed.num_refused > 0
