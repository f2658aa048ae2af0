"""Each precision rounds as much as it should, trains as it did when its losses were noted, and stores fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bertrain.base import isa
from bertrain.training.precision import check_precision, set_precision
from bertrain.training.start import pretrain
from tests import helpers
from tests.numerics import golden_losses

CPU = torch.device("cpu")
HAS_AMX = isa.usable("auto") == "amx"
needs_amx = pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX, or the environment leaves it out")

# Relative distances of losses. Between instruction sets (AVX2, AVX-512, AMX) those of fp32 differ by 5e-8, of fp16 by
# 9e-5, of bf16 by 7e-4: a sum in another order rounds to another neighbour now and then, and training carries it on.
# A single rounding is up to 6e-8, 5e-4 and 4e-3. The distance of each to fp32 is 7e-5 (fp16) to 5e-4.
TOLERANCES = {"fp32": 1e-5, "bf32": 2e-3, "bf16": 2e-3, "fp16": 5e-4}


@pytest.fixture
def fp32_afterwards() -> Iterator[None]:
    yield
    set_precision(helpers.tiny_settings().train)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


SHORT = [pytest.param(name, marks=helpers.needs_short_floats) for name in ("bf16", "fp16")]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf32", marks=needs_amx), *SHORT])
def test_losses_are_those_that_were_noted(
    precision: str, folder: Path, fp32_afterwards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.allow_emulated_fp16(monkeypatch)
    noted = json.loads(golden_losses.FILE.read_text())
    losses = golden_losses.losses_in(precision, folder)

    def distance(others: list[float]) -> float:
        return max(abs(one - other) / other for one, other in zip(losses, others, strict=True))

    assert distance(noted[precision]) <= TOLERANCES[precision]
    if precision != "fp32":
        assert distance(noted["fp32"]) > TOLERANCES["fp32"], "nothing was rounded"


NARROW = [pytest.param("bf32", marks=[needs_amx, pytest.mark.long]), pytest.param("bf16", marks=needs_amx)]


@pytest.mark.parametrize("precision", NARROW)
def test_narrow_precisions_follow_the_curve_of_fp32(precision: str, folder: Path, fp32_afterwards: None) -> None:
    """300 steps of a small BERT: no further from fp32 than another seed of fp32 is. Dropout is drawn in two ways."""
    noted = json.loads(golden_losses.CURVES.read_text())["fp32"]
    expected, *others = noted.values()
    noise = [max(abs(other[i] - one) for other in others) for i, one in enumerate(expected)]
    typical = sum(noise) / len(noise)
    curve = golden_losses.curve_of(precision, int(next(iter(noted))), folder)
    apart = [abs(one - other) for one, other in zip(curve, expected, strict=True)]
    assert curve[-1] < 0.8 * curve[0], "it learns"
    assert max(apart) <= 2 * max(typical, *noise)
    assert sum(apart) / len(apart) <= typical


def product_errors(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Relative errors of a product, of one with a bias, of a batch of them, and of the gradients of the first."""
    exact = a.double() @ b.double()
    one, other = a.clone().requires_grad_(), b.clone().requires_grad_()
    product = one @ other
    product.backward(b)
    assert one.grad is not None
    assert other.grad is not None
    assert product.dtype == torch.float32
    return [
        helpers.relative_error(product.double(), exact),
        helpers.relative_error(torch.addmm(torch.zeros(len(b)), a, b).double(), exact),
        helpers.relative_error(torch.stack([a, a]).matmul(b)[1].double(), exact),
        helpers.relative_error(one.grad.double(), b.double() @ b.double().t()),
        helpers.relative_error(other.grad.double(), a.double().t() @ b.double()),
    ]


@needs_amx
def test_bf32_rounds_the_operands_of_products_to_bf16_and_fp32_does_not(fp32_afterwards: None) -> None:
    """Two operands, each rounded to 8 bits: a relative error of about sqrt(2) * 2^-8 / sqrt(12) = 1.6e-3."""
    torch.manual_seed(0)
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    set_precision(helpers.tiny_settings(train__precision="bf32").train)
    rounded = product_errors(a, b)
    set_precision(helpers.tiny_settings(train__precision="fp32").train)
    exact = product_errors(a, b)
    assert all(1e-3 < error < 4e-3 for error in rounded), rounded
    assert all(error < 1e-6 for error in exact), exact


@pytest.mark.parametrize(
    ("precision", "capped", "instead"),
    [("tf32", "auto", "bf32"), ("bf32", "avx2", "fp32"), ("bf32", "avx512", "fp32")],
)
def test_what_a_cpu_cannot_multiply_is_refused(
    precision: str, capped: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capped != "auto":
        if isa.FLAGS[capped] not in isa.cpu_flags():
            pytest.skip(f"this CPU has no {capped}")
        for name, value in isa.CAPS[capped].items():
            monkeypatch.setenv(name, value)
    settings = helpers.tiny_settings(train__precision=precision, train__isa=capped).train
    named = [f"train.precision {precision}", f"--train.precision {instead}", *([capped] if capped != "auto" else [])]
    with helpers.refused("precision-not-possible", *named):
        check_precision(settings, CPU)


def test_fp16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = helpers.tiny_settings(train__precision="fp16").train
    monkeypatch.setattr(isa, "cpu_flags", lambda: {"avx2", "avx512bw", "amx_tile", "amx_bf16"})
    with helpers.refused("precision-not-possible", "no avx512_fp16 or amx_fp16", "--train.precision fp32"):
        check_precision(settings, CPU)
    for flag in ("avx512_fp16", "amx_fp16"):
        monkeypatch.setattr(isa, "cpu_flags", lambda flag=flag: {"avx2", "avx512bw", "amx_tile", flag})
        check_precision(settings, CPU)


@helpers.needs_short_floats
def test_bf16_follows_fp32(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    runs = {}
    for precision in ("fp32", "bf16"):
        runs[precision] = tmp_path / precision
        pretrain(helpers.tiny_settings(train__precision=precision), data, runs[precision])
    exact, rounded = helpers.losses(runs["fp32"]), helpers.losses(runs["bf16"])
    assert exact != rounded
    for one, other in zip(exact, rounded, strict=True):
        assert abs(one - other) < 0.01 * one
    assert all(tensor.dtype == torch.float32 for tensor in helpers.final_weights(runs["bf16"]).values())


def test_a_run_in_bf16_leaves_the_next_one_alone(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """On ARM CPUs without bf16 PyTorch turned a library off, with a page of warning, for the rest of the process."""
    data = helpers.make_data(tmp_path)

    def losses(name: str, precision: str) -> list[float]:
        settings = helpers.tiny_settings(
            train__precision=precision, train__device="cpu", train__max_steps=3, train__deterministic=True,
            evaluate__data=data, evaluate__every_samples=24, optimizer__learning_rate=0.05,
        )  # fmt: skip
        pretrain(settings, data, tmp_path / name)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] in ("step", "evaluation")]

    before = losses("before", "fp32")
    assert losses("between", "bf16") != before
    assert losses("after", "fp32") == before
    assert not [warning for warning in recwarn if "mkldnn" in str(warning.message)]
