"""Which precision and which path a run computes with: chosen once, said aloud, kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bertrain.base import isa
from bertrain.base.errors import UserError
from bertrain.kernels import cpu
from bertrain.training import fused_engine as compute
from bertrain.training.precision import choose_precision
from bertrain.training.pretrain import pretrain, resume
from tests import helpers

CPU = torch.device("cpu")
HAS_KERNELS, WHY_NOT = cpu.available()


def precision_of(run: Path) -> str:
    return json.loads((run / "config.json").read_text())["settings"]["train"]["precision"]


def test_auto_is_settled_when_a_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(train__precision="auto", train__device="cpu", train__max_steps=2)
    pretrain(settings, data, run)
    chosen, reason = choose_precision(settings.train, CPU)
    assert precision_of(run) == chosen
    said = capsys.readouterr().out
    kernels = "fused kernels" if chosen == "bf16" and HAS_KERNELS else "plain PyTorch"
    assert f"computing with {kernels}, {chosen}" in said
    assert f"train.precision auto: {chosen} ({reason})" in said


def test_auto_continues_a_run_as_it_was_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As if it had begun on a machine that chose otherwise."""
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    chosen, _ = choose_precision(helpers.tiny_settings().train, CPU)
    other = "fp32" if chosen == "bf16" else "bf16"
    common = {"train__device": "cpu", "checkpoint__every_steps": 2}
    pretrain(helpers.tiny_settings(train__precision=other, train__max_steps=4, **common), data, run)
    calm = helpers.losses(run)
    (run / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    pretrain(helpers.tiny_settings(train__precision="auto", train__max_steps=4, **common), data, run)
    said = capsys.readouterr().out
    assert "continuing after step 2" in said
    assert f"train.precision auto: {other} (as the run was begun)" in said
    assert precision_of(run) == other
    assert helpers.losses(run) == calm


def test_kernels_can_be_switched_off_and_on_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(
        train__device="cpu", train__precision="bf16", train__kernels="plain", train__max_steps=3
    )
    pretrain(settings, data, run)
    assert "computing with plain PyTorch, bf16 (asked for)" in capsys.readouterr().out
    resume(run, [("train.kernels", "auto")])
    why_not = WHY_NOT if isa.usable("auto") == "amx" else "the kernels for CPUs need AMX"
    kernels = "fused kernels, bf16 (AMX kernels, compiled by" if HAS_KERNELS else f"plain PyTorch, bf16 ({why_not}"
    assert f"computing with {kernels}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"precision": "fp32"}, "the kernels work in bf16, not in fp32"),
        ({"precision": "bf16", "kernels": "plain"}, "asked for"),
    ],
)
def test_a_cpu_computes_plainly_and_says_why(overrides: dict[str, str], reason: str) -> None:
    settings = helpers.tiny_settings(**{f"train__{name}": value for name, value in overrides.items()})
    is_fused, sentence = compute.choose(settings, CPU)
    assert not is_fused
    assert sentence.startswith(f"plain PyTorch, {overrides['precision']} (")
    assert reason in sentence


def test_fp8_is_refused_where_it_is_not_possible() -> None:
    with pytest.raises(UserError, match=r"train.precision fp8 is not possible here \(.*\); use --train.precision bf16"):
        compute.choose(helpers.tiny_settings(train__precision="fp8"), CPU)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({}, ""),
        ({"model__num_heads": 1}, ""),
        ({"model__hidden_size": 48}, "heads of 24 are not 16, 32, 64 or 128 wide"),
        ({"model__num_heads": 4}, "heads of 8 are not 16, 32, 64 or 128 wide"),
        ({"batch__token_budget": 250}, ""),
        ({"batch__token_budget": 250, "train__precision": "fp8"}, "batch.token_budget 250 is not a multiple of 64"),
        (
            {"model__intermediate_size": 72, "train__precision": "fp8"},
            "model.intermediate_size 72 is not a multiple of 16",
        ),
    ],
)
def test_what_the_kernels_cannot_compute_is_known(overrides: dict[str, object], reason: str) -> None:
    settings = helpers.tiny_settings(**({"train__precision": "bf16"} | overrides))
    assert compute.why_unfit(settings, torch.device("cuda")) == reason


def test_kernels_for_cpus_want_whole_sixteens() -> None:
    settings = helpers.tiny_settings(train__precision="bf16", model__intermediate_size=72)
    assert compute.why_unfit(settings, CPU) == "model.intermediate_size 72 is not a multiple of 16"


def test_without_amx_a_cpu_computes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in isa.CAPS["avx512"].items():
        monkeypatch.setenv(name, value)
    is_fused, sentence = compute.choose(helpers.tiny_settings(train__precision="bf16"), CPU)
    assert not is_fused
    assert sentence.startswith("plain PyTorch, bf16 (the kernels for CPUs need AMX)")
