"""Instruction sets capped in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bertrain.base import isa
from tests import helpers
from tests.quick.test_isa import has, needs

PRODUCTS = """
import sys
from bertrain.base.isa import cap_isa
cap_isa(sys.argv[1])
import torch
a = torch.ones(64, 64)
a @ a
with torch.autocast("cpu", torch.bfloat16):
    a @ a
print("aten", torch.backends.cpu.get_cpu_capability())
"""


def run_products(wish: str) -> str:
    """What MKL, oneDNN and ATen say of a product of 32 bits and one of 16."""
    clean = {name: value for name, value in os.environ.items() if name not in isa.CAPS["avx2"]}
    environment = clean | {"ONEDNN_VERBOSE": "profile_exec", "MKL_VERBOSE": "1"}
    command = [sys.executable, "-c", PRODUCTS, wish]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.lower()


@needs(not has("avx2"), reason="this CPU has no AVX2")
def test_avx2_leaves_out_all_that_is_newer() -> None:
    said = run_products("avx2")
    assert "aten avx2" in said
    assert "avx512" not in said
    assert "amx" not in said
    assert "mkl_verbose" not in said or "(intel(r) avx2)" in said, "a torch without MKL has oneDNN for both"


@needs(not has("avx512"), reason="this CPU has no AVX-512")
def test_avx512_leaves_out_amx() -> None:
    said = run_products("avx512")
    assert "aten avx512" in said
    if not isa.emulation("bf16", "avx512"):  # without instructions for bf16, oneDNN names a general product
        assert "matmul,brg_matmul:avx512" in said
    assert "amx" not in said


@needs(not has("amx"), reason="this CPU has no AMX")
def test_amx_is_used_where_it_is_not_left_out() -> None:
    assert "_amx" in run_products("amx")


@needs(not has("avx2"), reason="this CPU has no AVX2")
def test_the_command_line_caps_a_run_and_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("isa")
    arguments = helpers.tiny_arguments(train__isa="avx2", train__max_steps=1, log__level="verbose")
    done = helpers.bertrain(
        "pretrain", "bert-tiny", "--data", helpers.make_data(folder), "--run", folder / "run", *arguments
    )
    assert "instructions up to avx2 (train.isa)" in done.stdout
