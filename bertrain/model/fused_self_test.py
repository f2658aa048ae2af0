"""The self-test's child process, with one check beyond those of single kernels: every gradient of a small model of the
run's widths, computed by the kernels, is compared with autograd in float32.
"""

from __future__ import annotations

import torch

from bertrain.config.settings import ModelSettings
from bertrain.kernels import backend, self_test_checks
from bertrain.kernels.self_test_checks import LENGTHS, Sizes
from bertrain.kernels.self_test_twins import boundaries, positions_of, relative_error
from bertrain.model.arena import Arena
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.encoder import split_parts
from bertrain.model.families import new_model
from bertrain.model.fused import FusedModel
from bertrain.model.fused_families import new_fused
from bertrain.model.heads import pretraining_sums

VOCABULARY, LAYERS = 192, 2
TOLERANCE, TOLERANCE_FP8 = 5e-2, 0.4
"""Of the gradient of each parameter: several times the rounding error, far below the error of a wrong term."""


def whole_model(sizes: Sizes, device: str) -> tuple[float, float]:
    """The largest relative error of a gradient, and the tolerance; no dropout."""
    settings = ModelSettings(
        family=sizes.family, vocab_size=VOCABULARY, hidden_size=sizes.hidden, num_heads=sizes.heads,
        intermediate_size=sizes.inner, num_layers=LAYERS, max_positions=max(LENGTHS), global_every=2,
        local_window=2 * sizes.window, hidden_dropout=0.0, attention_dropout=0.0, nsp=False, layer_norm_eps=1e-5,
    )  # fmt: skip
    model, batch = new_model(settings).to(device), _batch(device)
    arena = Arena(model, split_parts)
    logits = model(batch).mlm_logits
    assert logits is not None
    pretraining_sums(logits, None, batch).mlm_loss.backward()
    expected = arena.named(arena.gradients.clone())
    dtype = torch.float32 if backend.INTERPRETED else torch.bfloat16  # Triton's interpreter has no bf16 of its own
    fused = new_fused(model, arena, fp8=sizes.fp8, dtype=dtype)
    if fused.scales is not None:  # the first pass measures, in 16 bits
        fused.requantize()
        _run(fused, batch)
        fused.scales.collect()
        fused.scales.update()
        fused.requantize()
    arena.gradients.fill_(float("nan"))
    _run(fused, batch)
    found = arena.named(arena.gradients)
    error = max(relative_error(found[name], gradient) for name, gradient in expected.items())
    return error, TOLERANCE_FP8 if sizes.fp8 else TOLERANCE


def _batch(device: str) -> Batch:
    """Sequences of very different lengths, every fourth token masked."""
    total, starts = sum(LENGTHS), boundaries(LENGTHS, device)
    words = torch.randint(5, VOCABULARY, (2, total), device=device)
    masked = torch.arange(1, total, 4, device=device)
    slots = len(LENGTHS)
    return Batch(
        input_ids=words[0], segment_ids=torch.zeros_like(words[0]), position_ids=positions_of(LENGTHS, device),
        cu_seqlens=starts, cls_positions=starts[:-1].long(), mlm_positions=masked, mlm_labels=words[1][masked],
        nsp_labels=torch.full((slots,), IGNORED, device=device), is_real=starts[:-1] < total,
        answers=None, max_seqlen=max(LENGTHS), sequence_lengths=LENGTHS, dropout_seed=1, num_tokens=total,
        num_sequences=slots, num_predictions=len(masked),
    )  # fmt: skip


def _run(fused: FusedModel, batch: Batch) -> None:
    one, seed = torch.ones(1, device=batch.input_ids.device), torch.ones_like(batch.input_ids[:1])
    for _ in fused.forward_backward(batch, seed, one, one, accumulate=False):
        pass


# BERT's kernels have trained models on GPUs for longer, so for BERT the checks of single kernels are enough.
self_test_checks.OF_MODELS["modern"] = {"whole model": whole_model}

if __name__ == "__main__":
    self_test_checks.main()
