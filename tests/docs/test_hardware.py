"""The page on hardware has the rows that `doctor` prints, and the kernel matrix covers the GPUs it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.base import hardware

ROOT = Path(__file__).parents[2]


def test_the_page_has_every_row() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    for row in (*hardware.GPUS.values(), hardware.AMD, *hardware.CPUS):
        assert row.row in page


def test_gpus_with_kernels_are_those_of_the_matrix() -> None:
    matrix = json.loads((ROOT / "benchmarks" / "results" / "kernel_matrix.json").read_text())
    with_kernels = {f"{major}{minor}" for (major, minor), row in hardware.GPUS.items() if row.kernels != "none"}
    for version in matrix["triton"].values():
        assert version.keys() == with_kernels


@pytest.mark.parametrize(
    ("capability", "family"),
    [((8, 0), "Ampere, 8.0"), ((8, 7), "Ampere, 8.6"), ((9, 0), "Hopper, 9.0"), ((12, 1), "Blackwell, 12.0")],
)
def test_a_gpu_in_between_is_the_one_below(capability: tuple[int, int], family: str) -> None:
    assert hardware.of_gpu(capability).family == family


def test_other_hardware() -> None:
    assert hardware.of_gpu((6, 1)).compiled == "none"
    assert hardware.of_gpu((9, 4), is_amd=True) is hardware.AMD
    assert [hardware.of_cpu(flags).family for flags in ({"amx_bf16", "avx512f"}, {"avx512f"}, {"avx2"}, {"asimd"})] == [
        row.family for row in hardware.CPUS
    ]
