"""Precision and kernels of runs: settled at the start, kept at a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from bertrain.base import isa
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.kernels import cpu_library
from bertrain.ranks.parallel import Ranks
from bertrain.run.metrics import Stopwatch
from bertrain.training import engine
from bertrain.training.loop import train_step
from bertrain.training.plain_engine import PlainEngine
from bertrain.training.precision import choose_precision
from bertrain.training.start import pretrain, resume
from bertrain.training.state import TrainState
from tests import helpers
from tests.quick.test_compute import CPU


@pytest.fixture(params=["this machine", "with AMX"])
def kernels(request: pytest.FixtureRequest) -> tuple[bool, str]:
    """Whether the kernels for CPUs can run, and why: here, and on a machine with AMX, if it can be emulated."""
    if request.param == "with AMX":
        request.getfixturevalue("c_kernels")
    return cpu_library.available()


def precision_of(run: Path) -> str:
    return json.loads((run / "config.json").read_text())["settings"]["train"]["precision"]


def test_auto_is_settled_when_a_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: tuple[bool, str]
) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(train__precision="auto", train__device="cpu", train__max_steps=2)
    pretrain(settings, data, run)
    chosen, reason = choose_precision(settings.train, CPU)
    assert precision_of(run) == chosen
    said = capsys.readouterr().out
    computing = "fused kernels" if chosen == "bf16" and kernels[0] else "plain PyTorch"
    assert f"computing with {computing}, {chosen}" in said
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


def test_kernels_can_be_switched_off_and_on_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: tuple[bool, str]
) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(
        train__device="cpu", train__precision="bf16", train__kernels="plain", train__max_steps=3
    )
    pretrain(settings, data, run)
    assert "computing with plain PyTorch, bf16 (asked for)" in capsys.readouterr().out
    resume(run, [("train.kernels", "auto")])
    has_kernels, reason = kernels
    why_not = reason if isa.usable("auto") == "amx" else "the kernels for CPUs need AMX"
    computing = "fused kernels, bf16 (AMX kernels, compiled by" if has_kernels else f"plain PyTorch, bf16 ({why_not}"
    assert f"computing with {computing}" in capsys.readouterr().out


def test_a_changed_model_does_not_train_on_the_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "kernels_serve", lambda *_: (True, "kernels everywhere"))
    monkeypatch.setattr(engine, "why_outdated", lambda: "another source")
    settings = helpers.tiny_settings(train__precision="bf16")
    assert engine.choose(settings, CPU)[0] == "plain", "known before a model is built"
    state = TrainState.build(settings, Ranks(0, 1, CPU))
    assert isinstance(state.engine, PlainEngine)
    assert "slower than the kernels: another source" in capsys.readouterr().err
    with helpers.refused("precision-not-possible", "another source"):
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
    said = capsys.readouterr().err
    assert "torch.compile failed" not in said
    assert "torch.compile has compiled" not in said
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4 * (settings.model.num_layers + 2), "compiled more than once for a shape"


def failing(error: Exception, *, backward: bool) -> Callable[..., Any]:
    """A backend of torch.compile whose graphs compile and fail when they are run."""

    def fail(*_: object) -> None:
        raise error

    return aot_autograd(
        fw_compiler=lambda graph, _: graph if backward else make_boxed_func(fail),
        bw_compiler=lambda *_: make_boxed_func(fail),
    )


@pytest.mark.parametrize("backward", [False, True])
def test_a_launch_that_fails_takes_the_run_to_the_plain_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backward: bool
) -> None:
    data, compiling = helpers.make_data(tmp_path), torch.compile
    settings = helpers.tiny_settings(
        train__kernels="compiled", train__max_steps=4, model__num_layers=1, model__hidden_dropout=0,
        model__attention_dropout=0,
    )  # fmt: skip
    pretrain(replace(settings, train=replace(settings.train, kernels="plain")), data, tmp_path / "plain")
    backend = failing(RuntimeError("too many resources requested for launch\nand a page"), backward=backward)
    monkeypatch.setattr(torch, "compile", partial(compiling, backend=backend))
    pretrain(settings, data, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("torch.compile failed") == 1
    assert "too many resources" in said
    assert "and a page" not in said
    assert helpers.losses(tmp_path / "run") == pytest.approx(helpers.losses(tmp_path / "plain"), rel=1e-5)

    full = failing(torch.OutOfMemoryError("CUDA out of memory"), backward=backward)
    monkeypatch.setattr(torch, "compile", partial(compiling, backend=full))
    with helpers.refused("out-of-memory", "CUDA out of memory"):
        pretrain(settings, data, tmp_path / "full")


def test_compilations_that_no_shape_explains_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    settings = helpers.tiny_settings(train__kernels="compiled", model__num_layers=1)
    step = Loader(Shards.open(helpers.make_data(tmp_path)), settings).step(0, 0)
    ranks = Ranks(0, 1, CPU)
    state = TrainState.build(settings, ranks)
    for number in range(4):
        if number > 1:
            torch._dynamo.reset()  # forgets what is compiled
        train_step(state, step, settings, ranks, Stopwatch(CPU))
        assert ("torch.compile has compiled" in capsys.readouterr().err) == (number == 2)
