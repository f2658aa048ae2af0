"""The page on hardware has the rows that `doctor` prints, and the kernel matrix covers the GPUs it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bertrain.base import hardware
from bertrain.planning.plan import lengths_of, mean_of
from tests.miniature_tasks import command_line

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


def speed_rows() -> list[list[str]]:
    _, _, table = (ROOT / "docs" / "hardware.md").read_text().partition("| GPU | FP8 | bf16 | fp16, torch.compile |")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[1:]]


def test_the_speeds_to_expect_are_those_that_plan_predicts() -> None:
    rows = speed_rows()
    assert len(rows) >= 10
    lengths = ROOT / "benchmarks" / "wikipedia-128.csv"
    mean = float(mean_of(lengths_of(lengths, 128)))
    for number, (name, *speeds) in enumerate(rows):
        filled = [pair for pair in zip(("fp8", "bf16", "fp16"), speeds, strict=True) if pair[1]]
        precision, speed = filled[number % len(filled)]  # one cell of each row, of every column
        gpu = re.sub("rtx-", "rtx", name.lower().removesuffix(" sxm").replace(" ", "-"))
        words = ("plan", "bert-base", "--gpu", gpu, "--count", "1", "--lengths", str(lengths))
        printed = command_line(*words, "--train.precision", precision, "--json").out
        found = json.loads(printed)["plans"][0]["sequences_per_s"] * mean
        assert float(speed.replace(",", "")) == pytest.approx(found, rel=0.06), (name, precision)
