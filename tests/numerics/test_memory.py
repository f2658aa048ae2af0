"""The estimate of memory against the bytes of live tensors."""

from __future__ import annotations

import pytest
import torch

from bertrain.config.settings import Settings
from bertrain.model.families import new_model
from bertrain.model.heads import pretraining_sums
from bertrain.planning.memory import LIBRARIES, BinSize, estimate
from bertrain.training.precision import autocast
from bertrain.training.recompute import recompute_layers
from tests import helpers, whole_model
from tests.live_memory import LiveMemory

CPU = torch.device("cpu")


def bin_peak(settings: Settings, length: int, tokens: int, predictions: int) -> int:
    """The most bytes that a bin of full sequences needs on the plain path beside weights and gradients."""
    model = new_model(settings.model).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    recompute_layers(model, settings.train.activation_checkpointing)
    slots = tokens // length
    batch = whole_model.random_batch([length] * slots, tokens, slots, predictions, length, settings.model.vocab_size)
    batch = whole_model.with_replaced_words(batch) if settings.model.rtd else batch
    with LiveMemory() as live:
        with autocast(settings.train, CPU):
            outputs = model(batch)
        sums = pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch, outputs.rtd_logits)
        of_tokens = 0 if sums.rtd_loss is None else sums.rtd_loss / tokens
        (sums.mlm_loss / predictions + sums.sequence_loss / slots + of_tokens).backward()
    return live.peak


@pytest.mark.parametrize("vocab_size", [100, 6000], ids=["layers weigh most", "scores weigh most"])
@pytest.mark.parametrize("what", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=helpers.needs_short_floats)])
@pytest.mark.parametrize("family", ["bert", "modern"])
def test_the_estimate_of_a_bin_is_what_its_tensors_take(
    family: str, precision: str, what: str, vocab_size: int
) -> None:
    assert_estimated(64, family, precision, what, vocab_size)


@pytest.mark.parametrize("what", ["none", "full"])
def test_the_estimate_of_local_attention(what: str) -> None:
    assert_estimated(512, "modern", "fp32", what, 100, model__local_window=32)


def test_the_estimate_of_replaced_words() -> None:
    """The generator is another model: here is only the head."""
    assert_estimated(64, "bert", "fp32", "none", 100, model__rtd=50, data__generator="any", data__replaced_share=0.01)


def assert_estimated(
    length: int, family: str, precision: str, what: str, vocab_size: int, tokens: int = 1024, **overrides: object
) -> None:
    predictions = 160
    settings = helpers.tiny_settings(
        model__family=family, model__max_positions=length, data__max_seq_length=length, batch__token_budget=tokens,
        model__hidden_size=64, model__num_heads=2, model__intermediate_size=256, model__num_layers=6,
        model__vocab_size=vocab_size, train__precision=precision, train__activation_checkpointing=what,
        **overrides,
    )  # fmt: skip
    expected = estimate(settings, BinSize(tokens, predictions, length), ranks=1, engine="plain", on_gpu=False)
    peak = bin_peak(settings, length, tokens, predictions)
    tensors = sum(size for name, size in expected.bin.items() if name != LIBRARIES)
    assert 0.95 <= tensors / peak <= 1.2
