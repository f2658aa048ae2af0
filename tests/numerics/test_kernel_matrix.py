"""Kernels compile for every kind of GPU: the committed matrix belongs to these sources, and a sample compiles here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CAPABILITIES = {"80", "86", "89", "90", "100", "103", "120"}


def test_the_matrix_is_of_these_kernels_and_has_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kernel_matrix import faults, source_hash

    matrix = json.loads((BENCHMARKS / "results" / "kernel_matrix.json").read_text())
    assert {version.rpartition(".")[0] for version in matrix["triton"]} == {"3.6", "3.7"}
    for version, capabilities in matrix["triton"].items():
        assert set(capabilities) == CAPABILITIES, version
        for capability, found in capabilities.items():
            assert found["sources"] == source_hash(), "the kernels have changed: run make kernel-matrix"
            assert not faults(found["kernels"], int(capability)), version


def test_a_kernel_that_spills_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kernel_matrix import MOST_STACK, faults

    kernel = {"shared": 1024, "registers": 255, "stack": MOST_STACK, "errors": []}
    assert not faults({"some_kernel": kernel}, 80)
    (fault,) = faults({"some_kernel": kernel | {"stack": MOST_STACK + 8}}, 80)
    assert "some_kernel on 8.0" in fault


def test_a_sample_compiles_for_blackwell() -> None:
    command = [sys.executable, BENCHMARKS / "kernel_matrix.py", "--capabilities", "100", "--case", "BERT-Large"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ", 0 fail" in ended.stdout
