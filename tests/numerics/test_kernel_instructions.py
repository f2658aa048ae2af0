"""What the compiler makes of kernels, read without a GPU: the ways in which it has spoilt one without a word."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def instructions() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import kernel_instructions

        yield kernel_instructions
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("name", "an_element"), [("GELU forward, 8 bits", 2), ("GELU backward, bf16", 3), ("GELU backward, 8 bits", 3)]
)
def test_gelu_computes_its_curves_once(instructions: ModuleType, name: str, an_element: int) -> None:
    """Once it computed all of it twice, for the layout of a store and for that of a sum."""
    (kernel,) = (kernel for kernel in instructions.all_kernels() if kernel.name == name)
    listing, _, stack = instructions.disassembled(instructions.compiled(kernel, 90).asm["cubin"])
    (loop,) = instructions.loops(listing)
    curves = sum("MUFU" in text for address, text in listing if loop[0] <= address <= loop[1])
    assert curves == an_element * kernel.elements
    assert stack == "0"
