"""Precision and kernels of runs: settled at the start, kept at a resume."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from bertrain.base import isa
from bertrain.kernels import cpu_library
from bertrain.model import bert
from bertrain.ranks.parallel import Ranks
from bertrain.training import engine
from bertrain.training.plain_engine import PlainEngine
from bertrain.training.precision import choose_precision
from bertrain.training.start import pretrain, resume
from bertrain.training.state import TrainState
from tests import helpers
from tests.quick.test_compute import CPU, relu_forward

HAS_KERNELS, WHY_NOT = cpu_library.available()


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
    assert f"train.precision auto: {other} (as the run began)" in said
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


def test_a_changed_model_trains_on_the_plain_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "kernels_serve", lambda *_: (True, "kernels everywhere"))
    monkeypatch.setattr(bert.Layer, "forward", relu_forward)
    settings = helpers.tiny_settings(train__precision="bf16")
    assert engine.choose(settings, CPU)[0] == "plain", "known before a model is built"
    state = TrainState.build(settings, Ranks(0, 1, CPU))
    assert isinstance(state.engine, PlainEngine)
    assert "Layer.forward" in capsys.readouterr().err
    with helpers.refused("precision-not-possible", "Layer.forward"):
        engine.choose(helpers.tiny_settings(train__precision="fp8"), CPU)


def test_compiled_with_attention_outside_the_graph_is_the_plain_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What AMD GPUs and odd head sizes get: bins of few shapes and many groups, each shape traced once.

    The last stage of the compiler, which turns a graph into C++, takes minutes on a CPU and is left out.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    data, losses = helpers.make_data(tmp_path), {}
    torch._dynamo.utils.counters.clear()
    for kernels in ("plain", "compiled"):
        settings = helpers.tiny_settings(
            train__kernels=kernels, train__max_steps=6, model__hidden_dropout=0, model__attention_dropout=0,
            evaluate__data=data, evaluate__every_samples=20,
        )  # fmt: skip
        pretrain(settings, data, tmp_path / kernels)
        losses[kernels] = helpers.losses(tmp_path / kernels)
    assert "torch.compile failed" not in capsys.readouterr().err
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4 * (settings.model.num_layers + 2), "compiled more than once for a shape"
