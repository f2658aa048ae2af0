"""Precision and engine of a run: chosen once, printed with a reason, kept; and never the kernels for another model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from bertrain.base import isa
from bertrain.model import fused_check
from bertrain.training import engine
from tests import helpers

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"precision": "fp32"}, "the kernels work in bf16, not in fp32"),
        ({"precision": "bf16", "kernels": "plain"}, "asked for"),
    ],
)
def test_a_cpu_computes_plainly_and_says_why(overrides: dict[str, str], reason: str) -> None:
    settings = helpers.tiny_settings(**{f"train__{name}": value for name, value in overrides.items()})
    name, sentence = engine.choose(settings, CPU)
    assert name == "plain"
    assert sentence.startswith(f"plain PyTorch, {overrides['precision']} (")
    assert reason in sentence


def test_fp8_is_refused_where_it_is_not_possible() -> None:
    with helpers.refused("precision-not-possible", "--train.precision bf16"):
        engine.choose(helpers.tiny_settings(train__precision="fp8"), CPU)


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
    assert engine.why_unfit(settings, torch.device("cuda")) == reason


def test_the_kernels_compute_modernbert_on_gpus_alone() -> None:
    settings = helpers.tiny_settings(model__family="modern", train__precision="bf16")
    assert engine.why_unfit(settings, torch.device("cuda")) == ""
    assert engine.why_unfit(settings, CPU) == "the kernels for CPUs have no model.family modern"
    with helpers.refused("engine-not-possible", "fused"):
        engine.choose(helpers.tiny_settings(model__family="modern", train__kernels="fused"), CPU)
    tuned = helpers.tiny_settings(model__family="modern", model__head="classify", task__name="glue/mnli")
    reason = "model.family modern has no kernels for model.head classify yet"
    assert engine.why_unfit(tuned, torch.device("cuda")) == reason


def test_kernels_for_cpus_want_whole_sixteens() -> None:
    settings = helpers.tiny_settings(train__precision="bf16", model__intermediate_size=72)
    assert engine.why_unfit(settings, CPU) == "model.intermediate_size 72 is not a multiple of 16"


def test_without_amx_a_cpu_computes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in isa.CAPS["avx512"].items():
        monkeypatch.setenv(name, value)
    name, sentence = engine.choose(helpers.tiny_settings(train__precision="bf16"), CPU)
    assert name == "plain"
    assert sentence.startswith("plain PyTorch, bf16 (the kernels for CPUs need AMX)")


# --- the model that the kernels implement ---------------------------------------------------------------------

MODEL = Path(fused_check.__file__).parent


def test_the_kernels_implement_the_current_source() -> None:
    """Fails after a deliberate change of the specification, and says what to do."""
    assert fused_check.fingerprint(MODEL) == fused_check.WRITTEN_FOR, (
        f"one of {', '.join(fused_check.SPECIFICATION)} has changed, so every run now trains without the fused path. "
        "First compare bertrain/model/fused*.py with the change and make them follow. Then run "
        "tests/numerics/test_kernels_interpreted.py, and on a GPU tests/gpu/test_fused.py and test_modern.py. Once all "
        f'pass: WRITTEN_FOR = "{fused_check.fingerprint(MODEL)}" in bertrain/model/fused_check.py'
    )


@pytest.mark.parametrize(
    ("old", "new", "is_another"),
    [
        ("x + dropout(self.contract", "x - dropout(self.contract", True),
        ("F.gelu(", "F.relu(", True),
        ('"""Word + position', '"""Segment + position', False),
        ("        x = self.words(", "        # Three tables.\n        x = self.words(", False),
        ("return self.output_norm(x + ", "return self.output_norm(\n            x + ", False),
    ],
)
def test_the_kernels_do_not_compute_another_model(
    old: str, new: str, is_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    source = (folder / "bert.py").read_text()
    assert source.count(old) == 1
    (folder / "bert.py").write_text(source.replace(old, new))
    monkeypatch.setattr(fused_check, "__file__", str(folder / "fused_check.py"))
    monkeypatch.setattr(engine, "kernels_serve", lambda *_: (True, "kernels everywhere"))
    monkeypatch.setattr(engine, "why_outdated", fused_check.why_outdated.__wrapped__)
    name, sentence = engine.choose(helpers.tiny_settings(train__precision="bf16"), CPU)
    assert name == ("plain" if is_another else "fused")
    assert ("the source of the models is not" in sentence) == is_another


def test_without_the_source_of_the_models_the_kernels_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_check, "__file__", str(tmp_path / "fused_check.py"))
    assert "cannot be read" in fused_check.why_outdated.__wrapped__()


@pytest.mark.parametrize(
    ("capability", "given", "expected"),
    [
        ((9, 0), {"train__precision": "fp16"}, ("compiled", "flash attention")),
        ((9, 0), {"train__precision": "fp32"}, ("compiled", "efficient attention")),
        ((7, 5), {"train__precision": "fp16"}, ("compiled", "efficient attention")),
        ((9, 0), {"train__kernels": "compiled-grouped"}, ("compiled", "grouped attention; asked for")),
        ((9, 0), {"train__kernels": "compiled-efficient", "train__precision": "bf16"}, ("compiled", "efficient")),
        ((6, 1), {"train__precision": "fp32"}, ("plain", "")),
        ((9, 0), {"train__precision": "fp32", "train__kernels": "plain"}, ("plain", "asked for")),
        ((9, 0), {"train__precision": "fp32", "model__hidden_size": 24}, ("compiled", "grouped attention")),
    ],
)
def test_where_the_kernels_do_not_serve_a_gpu_compiles(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    given: dict[str, object],
    expected: tuple[str, str],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "some GPU")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    name, sentence = engine.choose(helpers.tiny_settings(**given), torch.device("cuda"))
    assert name == expected[0]
    assert expected[1] in sentence


def test_an_amd_gpu_compiles_without_anything_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "some GPU")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    name, sentence = engine.choose(helpers.tiny_settings(train__precision="bf16"), torch.device("cuda"))
    assert name == "compiled"
    assert "grouped attention" in sentence


def test_kernels_that_cannot_run_are_refused_when_they_are_asked_for() -> None:
    with helpers.refused("engine-not-possible", "train.kernels fused"):
        engine.choose(helpers.tiny_settings(train__kernels="fused"), CPU)


def test_a_cpu_compiles_only_if_it_is_asked_to() -> None:
    assert engine.choose(helpers.tiny_settings(), CPU)[0] == "plain"
    for kernels in ("compiled", "compiled-grouped"):
        assert engine.choose(helpers.tiny_settings(train__kernels=kernels), CPU)[0] == "compiled"
    with helpers.refused("engine-not-possible", "train.kernels compiled-flash", "attention here is grouped"):
        engine.choose(helpers.tiny_settings(train__kernels="compiled-flash"), CPU)
