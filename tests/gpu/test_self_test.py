"""The self-test on a GPU: every kernel passes in BERT-Base's sizes, and a broken one costs a run only speed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertrain.kernels import self_test
from bertrain.kernels.backend import available
from bertrain.kernels.self_test_checks import Checks, Sizes
from bertrain.training.start import pretrain
from tests import helpers

USABLE, REASON = available("cuda") if torch.cuda.is_available() else (False, "no CUDA device")
pytestmark = pytest.mark.skipif(not USABLE, reason=REASON)

BASE = Sizes(
    hidden=768, heads=12, inner=3072, vocabulary=30522, padded_vocabulary=30528, hidden_dropout=0.1,
    attention_dropout=0.1, fp8=torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9),
)  # fmt: skip
BROKEN = {
    "wrong numbers": "self_test_checks.gelu_both_ways = lambda *inputs: tuple(2 * x for x in real(*inputs))",
    "no compilation": "self_test_checks.gelu_both_ways = lambda *inputs: triton.compile('not a kernel')",
    "an illegal address": "self_test_checks.gelu_both_ways = lambda *inputs: os.abort()",
}


@pytest.mark.parametrize("sizes", [BASE, replace(BASE, inner=1152, family="modern", window=64)])
def test_every_kernel_agrees_with_its_twin(sizes: Sizes) -> None:
    results, errors = self_test.examine(sizes, "cuda:0")
    print(errors)
    assert {result.kernel: result.failure for result in results} == dict.fromkeys(Checks(sizes, "cpu").all(), "")
    for result in results:
        print(result)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_costs_a_run_only_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    lines = (
        "import os, triton",
        "from bertrain.kernels import self_test_checks",
        "real = self_test_checks.gelu_both_ways",
        BROKEN[fault],
        "self_test_checks.main()",
    )
    monkeypatch.setattr(self_test, "child_command", lambda: [sys.executable, "-c", "\n".join(lines)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    self_test.results_here.cache_clear()
    wide = {"model__hidden_size": 128, "model__intermediate_size": 256, "model__pad_vocab_to": 64}
    settings = helpers.tiny_settings(train__device="cuda", train__precision="bf16", train__max_steps=2, **wide)
    pretrain(settings, helpers.make_data(tmp_path), tmp_path / "run")
    said = capsys.readouterr()
    assert "the kernel GELU failed here" in said.out + said.err
    assert "computing with compiled PyTorch, bf16" in said.out
    assert len(helpers.losses(tmp_path / "run")) == 2
    self_test.results_here.cache_clear()
