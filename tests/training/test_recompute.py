"""Activation checkpointing of the plain path: the same gradient to the last bit, dropout on, in less memory."""

from __future__ import annotations

import pytest
import torch

from bertrain.model.heads import pretraining_sums
from bertrain.training.precision import autocast
from bertrain.training.recompute import recompute_layers
from tests import helpers, whole_model
from tests.live_memory import LiveMemory

CPU = torch.device("cpu")


def gradient_and_memory(precision: str, what: str) -> tuple[list[torch.Tensor], float, int]:
    """Gradients of a bin of ragged sequences, bytes alive after its forward pass, and the most there were."""
    settings = helpers.tiny_settings(train__precision=precision, model__num_layers=4)
    model = helpers.build_model(settings.model).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    recompute_layers(model, what)
    torch.manual_seed(5)
    batch = whole_model.random_batch([64, 7, 40, 33, 12], 180, 8, 20, 64, settings.model.vocab_size)
    with LiveMemory() as live:
        with autocast(settings.train, CPU):
            outputs = model(batch)
        sums = pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch)
        kept = live.now
        (sums.mlm_loss / 20 + sums.sequence_loss / 5).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], kept, live.peak


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_are_equal_and_memory_falls(precision: str) -> None:
    found = {what: gradient_and_memory(precision, what) for what in ("none", "selective", "full")}
    gradients, kept, peaks = ([found[what][part] for what in found] for part in range(3))
    for less in gradients[1:]:
        assert all(map(torch.equal, gradients[0], less))
    assert kept[1] < 0.7 * kept[0]
    assert kept[2] < 0.5 * kept[1]
    assert peaks[0] > peaks[1] > peaks[2]


def test_evaluation_computes_nothing_twice() -> None:
    settings = helpers.tiny_settings()
    model = helpers.build_model(settings.model).eval()
    batch = whole_model.random_batch([20, 9], 32, 4, 6, 64, settings.model.vocab_size)
    with torch.no_grad():
        expected = model(batch).mlm_logits
        recompute_layers(model, "full")
        assert torch.equal(model(batch).mlm_logits, expected)
