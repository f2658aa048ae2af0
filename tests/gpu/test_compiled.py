"""The compiled engine on a GPU: the losses of the plain one in every precision, and what happens without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from bertrain.training.start import pretrain
from tests import helpers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

WIDE = {"model__hidden_size": 128, "model__intermediate_size": 256, "train__device": "cuda"}
NO_DROPOUT = {"model__hidden_dropout": 0, "model__attention_dropout": 0}
ERRORS = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 5e-3, "bf16": 2e-2}
"""Largest relative distance from the plain engine's losses in fp32 over 12 steps."""


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Data, and the losses of the plain engine in fp32."""
    folder = tmp_path_factory.mktemp("plain")
    data = helpers.make_data(folder)
    settings = helpers.tiny_settings(**WIDE, **NO_DROPOUT, train__kernels="plain", train__max_steps=12)
    pretrain(settings, data, folder / "run")
    return data, helpers.losses(folder / "run")


@pytest.mark.parametrize("precision", ERRORS)
def test_losses_are_those_of_the_plain_engine(
    exact: tuple[Path, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    data, expected = exact
    for checkpointing in ("none", "full"):
        settings = helpers.tiny_settings(
            **WIDE, **NO_DROPOUT, train__kernels="compiled", train__precision=precision, train__max_steps=12,
            train__activation_checkpointing=checkpointing,
        )  # fmt: skip
        pretrain(settings, data, tmp_path / checkpointing)
        said = capsys.readouterr()
        assert f"computing with compiled PyTorch, {precision}" in said.out
        assert "torch.compile failed" not in said.err
        losses = helpers.losses(tmp_path / checkpointing)
        distances = [abs(one - other) / other for one, other in zip(losses, expected, strict=True)]
        assert max(distances) <= ERRORS[precision], distances


def test_dropout_is_on_and_follows_the_seed(exact: tuple[Path, list[float]], tmp_path: Path) -> None:
    data, without = exact
    runs = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        settings = helpers.tiny_settings(
            **WIDE, train__kernels="compiled", train__max_steps=4, train__seed=seed, train__deterministic=True
        )
        pretrain(settings, data, tmp_path / name)
        runs[name] = helpers.losses(tmp_path / name)
    torch.use_deterministic_algorithms(False)
    assert runs["first"] == runs["again"]
    assert runs["first"] != runs["other"]
    assert runs["first"][1:] != without[1:4], "without dropout the losses are others"


def test_a_model_that_does_not_compile_trains_plainly_with_a_warning(
    exact: tuple[Path, list[float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, expected = exact

    def fail(*_: object, **__: object) -> object:
        raise TorchDynamoException("no compiler today\nand a page of its reasons")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fail)
    settings = helpers.tiny_settings(**WIDE, **NO_DROPOUT, train__kernels="compiled", train__max_steps=12)
    pretrain(settings, data, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("torch.compile failed") == 1
    assert "page of its reasons" not in said
    assert helpers.losses(tmp_path / "run") == pytest.approx(expected, rel=1e-6)
