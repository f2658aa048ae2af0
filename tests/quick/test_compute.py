"""Precision and engine of a run: chosen once, printed with a reason, kept; and never the kernels for another model."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertrain.base import isa
from bertrain.model import attention, bert, fused_check
from bertrain.model.attention import RaggedPlan
from bertrain.model.bert import Bert
from bertrain.model.fused_check import why_not_implemented
from bertrain.model.initialization import uninitialized
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
    assert why_not_implemented(uninitialized(settings.model)) == ""
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


def tiny_model(**overrides: object) -> Bert:
    return Bert(helpers.tiny_settings(**overrides).model)


@pytest.mark.parametrize("head", ["pretrain", "classify", "multilabel", "regress", "span", "tag"])
@pytest.mark.parametrize("nsp", [True, False])
def test_the_kernels_implement_the_model(head: str, nsp: bool) -> None:
    task = "" if head == "pretrain" else "glue/mnli"
    assert why_not_implemented(tiny_model(model__head=head, model__nsp=nsp, task__name=task)) == ""


def test_the_kernels_implement_the_current_source() -> None:
    """Fails after a deliberate change of bert.py, and says what to do."""
    current = {family: fused_check.fingerprints(family) for family in fused_check.WRITTEN_FOR}
    assert current == fused_check.WRITTEN_FOR, (
        "bert.py, modern.py, heads.py or attention.py has changed, so every run now trains on the plain engine. Change "
        "bertrain/model/fused*.py to match, then run tests/numerics/test_kernels_interpreted.py, and on a GPU "
        "tests/gpu/test_fused.py. Once both pass, replace WRITTEN_FOR in bertrain/model/fused_check.py by\n"
        + json.dumps(current, indent=4)
    )


class PreNormLayer(bert.Layer):
    def forward(self, x: Tensor, plan: RaggedPlan) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, self.head_size))
        x = x + self.attention_out(bert.attend_grouped(qkv, plan, 0.0).flatten(-2))
        return x + self.contract(F.gelu(self.expand(self.output_norm(x))))


def relu_forward(self: Any, x: Tensor, plan: RaggedPlan) -> Tensor:
    qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_size))
    attended = bert.attend_grouped(qkv, plan, self.attention_dropout if self.training else 0.0).flatten(-2)
    x = self.attention_norm(x + bert.dropout(self.attention_out(attended), self.hidden_dropout, self.training))
    expanded = F.relu(self.expand(x))
    return self.output_norm(x + bert.dropout(self.contract(expanded), self.hidden_dropout, self.training))


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def run(*arguments: Any) -> Tensor:
        return 2 * function(*arguments)

    return run


def with_prenorm_layer(patch: pytest.MonkeyPatch) -> Bert:
    model = tiny_model()
    model.layers[1] = PreNormLayer(model.settings)
    return model


def with_prenorm_class(patch: pytest.MonkeyPatch) -> Bert:
    patch.setattr(bert, "Layer", PreNormLayer)
    return tiny_model()


def with_other_activation(patch: pytest.MonkeyPatch) -> Bert:
    patch.setattr(bert.Layer, "forward", relu_forward)
    return tiny_model()


def with_decorated_forward(patch: pytest.MonkeyPatch) -> Bert:
    patch.setattr(bert.Layer, "forward", doubled(bert.Layer.forward))
    return tiny_model()


def with_other_attention(patch: pytest.MonkeyPatch) -> Bert:
    patch.setattr(attention, "attend_grouped", doubled(attention.attend_grouped))
    return tiny_model()


def with_forward_of_instance(patch: pytest.MonkeyPatch) -> Bert:
    model = tiny_model()
    model.embeddings.forward = doubled(model.embeddings.forward)  # type: ignore[method-assign]
    return model


def with_added_module(patch: pytest.MonkeyPatch) -> Bert:
    model = tiny_model()
    model.layers[0].gate = nn.Linear(32, 32)
    return model


def with_other_norm(patch: pytest.MonkeyPatch) -> Bert:
    model = tiny_model()
    model.layers[0].output_norm = nn.RMSNorm(32)
    return model


def with_other_dropout(patch: pytest.MonkeyPatch) -> Bert:
    model = tiny_model()
    model.layers[0].hidden_dropout = 0.5  # type: ignore[assignment]
    return model


def with_hook(patch: pytest.MonkeyPatch) -> Bert:
    model = tiny_model()
    model.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


CHANGES = {
    with_prenorm_layer: "layers.1",
    with_prenorm_class: "PreNormLayer",
    with_other_activation: "Layer.forward",
    with_decorated_forward: "Layer.forward",
    with_other_attention: "attend_grouped",
    with_forward_of_instance: "embeddings",
    with_added_module: "layers.0.gate",
    with_other_norm: "layers.0.output_norm",
    with_other_dropout: "hidden_dropout",
    with_hook: "layers.0",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_kernels_refuse_another_model(change: Callable[..., Bert], monkeypatch: pytest.MonkeyPatch) -> None:
    model = change(monkeypatch)
    assert CHANGES[change] in why_not_implemented(model)
    monkeypatch.setattr(engine, "kernels_serve", lambda *_: (True, "kernels everywhere"))
    settings = helpers.tiny_settings(train__precision="bf16")
    name, sentence = engine.choose(settings, CPU, model)
    assert name == "plain"
    assert CHANGES[change] in sentence


def test_a_fingerprint_ignores_comments_and_layout() -> None:
    one = "def f(x):\n    return x + 1"
    same = 'def f(x: int) -> int:\n    """Words."""\n    # more words\n    return (\n        x + 1\n    )'
    other = "def f(x):\n    return x + 2"
    trees = [fused_check._syntax(ast.parse(source).body[0]) for source in (one, same, other)]
    assert trees[0] == trees[1] != trees[2]


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
