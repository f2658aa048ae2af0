"""The self-test of the kernels: it passes under Triton's interpreter, and a kernel that fails in any way is named."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertrain.kernels import self_test
from bertrain.kernels.self_test_checks import Checks, Sizes
from bertrain.training import engine
from bertrain.training.start import pretrain
from tests import helpers

SIZES = Sizes(
    hidden=16, heads=1, inner=16, vocabulary=30, padded_vocabulary=32, hidden_dropout=0.1, attention_dropout=0.1,
    fp8=False,
)  # fmt: skip
CPU = torch.device("cpu")


def child(kernels: str) -> list[str]:
    """A child whose kernels are others: `kernels` is the source of a dict."""
    lines = (
        "import os, time, torch",
        "from bertrain.kernels import self_test_checks",
        f"self_test_checks.Checks.all = lambda self: {kernels}",
        "self_test_checks.main()",
    )
    return [sys.executable, "-c", "\n".join(lines)]


def use(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(self_test, "child_command", lambda: command)


@pytest.mark.parametrize(
    "sizes", [SIZES, pytest.param(replace(SIZES, family="modern", window=9), marks=pytest.mark.long)]
)
def test_every_kernel_agrees_with_its_twin(monkeypatch: pytest.MonkeyPatch, sizes: Sizes) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    results, _ = self_test.examine(sizes, "cpu")
    assert {result.kernel for result in results} == Checks(sizes, "cpu").all().keys()
    for result in results:
        assert not result.failure
        assert result.error is not None
        assert result.error < 1e-5 or result.kernel == "LAMB"  # which writes a copy in bf16


def test_each_kind_of_failure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(
        monkeypatch,
        child(
            "{'good': lambda: (print('a word'), (0.001, 0.01))[1], 'raises': lambda: 1 / 0,"
            " 'wrong': lambda: (0.5, 0.01),"
            " 'not a number': lambda: (float('nan'), 0.01), 'ends the process': os.abort, 'never reached': None}"
        ),
    )
    results, errors = self_test.examine(SIZES, "cpu")
    failed = {result.kernel: result.failure for result in results}
    assert list(failed) == ["good", "raises", "wrong", "not a number", "ends the process"]
    assert not failed["good"]
    assert failed["raises"] == "division by zero"
    assert "division by zero" in errors
    assert "0.5" in failed["wrong"]
    assert "nan" in failed["not a number"]
    assert "-6" in failed["ends the process"]


def test_a_compiler_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, child("{'hangs': lambda: time.sleep(600)}"))
    monkeypatch.setattr(self_test, "PATIENCE_S", 10)
    results, _ = self_test.examine(SIZES, "cpu")
    assert [result.kernel for result in results] == ["hangs"]
    assert "10" in results[0].failure


@pytest.mark.parametrize("kernels", ["{'big': lambda: (_ for _ in ()).throw(torch.OutOfMemoryError())}", "1 / 0"])
def test_a_gpu_that_is_taken_says_nothing_about_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use(monkeypatch, child(kernels))
    self_test.results_here.cache_clear()
    assert self_test.why_failed(SIZES, CPU) == ""
    assert not list(tmp_path.rglob("*.json"))


def test_results_are_kept_by_machine_and_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use(monkeypatch, child("{'raises': lambda: 1 / 0}"))
    self_test.results_here.cache_clear()
    random_before = torch.get_rng_state()
    failure = self_test.why_failed(SIZES, CPU)
    assert torch.equal(torch.get_rng_state(), random_before), "a run draws the same weights with and without it"
    assert "raises" in failure
    assert "division by zero" in failure

    use(monkeypatch, ["no such program"])
    self_test.results_here.cache_clear()
    assert self_test.why_failed(SIZES, CPU) == failure, "not read from the file"

    (file,) = tmp_path.rglob("*.json")
    file.write_text('[{"kernel": ')
    use(monkeypatch, child("{'other': lambda: 1 / 0}"))
    self_test.results_here.cache_clear()
    assert "other" in self_test.why_failed(SIZES, CPU), "a damaged file is replaced"
    self_test.results_here.cache_clear()


@pytest.mark.parametrize(
    "kernel", ["os.kill(os.getpid(), 9)", "(_ for _ in ()).throw(RuntimeError('CUBLAS_STATUS_ALLOC_FAILED'))"]
)
def test_a_failure_that_may_pass_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use(monkeypatch, child(f"{{'fails': lambda: {kernel}}}"))
    self_test.results_here.cache_clear()
    assert "fails" in self_test.why_failed(SIZES, CPU)
    assert not list(tmp_path.rglob("*.json"))
    self_test.results_here.cache_clear()


def test_a_run_goes_on_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "kernels_serve", lambda *_: (True, "triton"))
    monkeypatch.setattr(engine, "failed_kernel", lambda *_: "the kernel GELU failed here: too many registers")
    settings = helpers.tiny_settings(train__max_steps=2)
    pretrain(settings, data=helpers.make_data(tmp_path), run=tmp_path / "run")
    assert len(helpers.losses(tmp_path / "run")) == 2
    said = capsys.readouterr()
    assert "too many registers" in said.err + said.out
    with helpers.refused("engine-not-possible", "too many registers"):
        engine.choose(helpers.tiny_settings(train__kernels="fused"), CPU)
