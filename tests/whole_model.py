"""A small BERT whose every term counts, a bin with all that can occur, and its gradient from the specification."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bertrain.config.settings import ModelSettings
from bertrain.model.arena import Arena
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.encoder import EncoderModel, split_parts
from bertrain.model.fused_families import new_fused
from bertrain.training.plain_engine import sums_of
from tests import helpers, twins


def vanishing(settings: ModelSettings) -> set[str]:
    """Biases that are added to all scores of a span alike, and so make no difference: gradients that sum to zero."""
    last = settings.num_layers - 1
    return {"answer.score.bias", f"layers.{last}.output_norm.bias"} if settings.head == "span" else set()


def random_batch(
    lengths: list[int], num_tokens: int, num_slots: int, num_predictions: int, max_seqlen: int, vocab_size: int
) -> Batch:
    """A bin of sequences of these lengths, padding up to `num_tokens`, and slots that stay empty."""
    ends = list(np.cumsum([0, *lengths]))
    while ends[-1] < num_tokens:
        ends.append(min(num_tokens, ends[-1] + max_seqlen))
    sequence_lengths = np.diff(ends)
    position_ids = np.arange(num_tokens) - np.repeat(ends[:-1], sequence_lengths)
    cu_seqlens = np.full(num_slots + 1, num_tokens, dtype=np.int32)
    cu_seqlens[: len(ends)] = ends
    segment_ids = position_ids >= np.repeat((sequence_lengths + 1) // 2, sequence_lengths)
    is_real = np.arange(num_tokens) < sum(lengths)
    masked = torch.from_numpy(np.flatnonzero(is_real & (position_ids % 4 == 1)))[:num_predictions]
    mlm_positions = torch.zeros(num_predictions, dtype=torch.int64)
    mlm_labels = torch.full((num_predictions,), IGNORED)
    mlm_positions[: len(masked)] = masked
    mlm_labels[: len(masked)] = torch.randint(5, vocab_size, (len(masked),))
    nsp_labels = torch.full((num_slots,), IGNORED)
    nsp_labels[: len(lengths)] = torch.randint(0, 2, (len(lengths),))
    return Batch(
        input_ids=torch.randint(5, vocab_size, (num_tokens,)),
        segment_ids=torch.from_numpy(segment_ids.astype(np.int64)),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        cls_positions=torch.from_numpy(np.minimum(cu_seqlens[:-1], num_tokens - 1).astype(np.int64)),
        mlm_positions=mlm_positions,
        mlm_labels=mlm_labels,
        nsp_labels=nsp_labels,
        is_real=nsp_labels != IGNORED,
        answers=None,
        max_seqlen=max_seqlen,
        sequence_lengths=tuple(sequence_lengths.tolist()),
        dropout_seed=5,
        num_tokens=sum(lengths),
        num_sequences=len(lengths),
        num_predictions=len(masked),
    )


def with_answers(batch: Batch, head: str, num_labels: int, hidden_size: int = 0, *, is_weighted: bool = False) -> Batch:
    """The same bin with random answers of a task; those of slots without an example are nonsense."""
    if head == "tag":
        classes = torch.randint(0, num_labels, batch.mlm_labels.shape)
        return replace(batch, mlm_labels=torch.where(batch.mlm_labels == IGNORED, IGNORED, classes))
    lengths = np.diff(batch.cu_seqlens.numpy())
    slots = len(lengths)
    if head == "classify":
        answers = torch.randint(0, num_labels, (slots, 1))
    elif head == "regress":
        answers = torch.randn(slots, 1)
    elif head == "multilabel":
        answers = torch.randint(0, 2, (slots, num_labels)).float()
    elif head == "embed":  # the gradient of each embedding
        answers = torch.randn(slots, hidden_size)
    else:
        draw = np.random.default_rng(1)
        answers = torch.from_numpy(np.array([sorted(draw.integers(0, max(1, length), 2)) for length in lengths]))
    weights = torch.rand(answers.shape) + 0.5 if is_weighted else None
    return replace(batch, answers=answers, answer_weights=weights)


def with_replaced_words(batch: Batch) -> Batch:
    """The same bin, some of whose tokens are said to be replaced; others, padding among them, are not asked about."""
    is_real = batch.is_real.repeat_interleave(batch.cu_seqlens.diff())
    drawn = torch.randint(0, 10, is_real.shape)
    return replace(batch, replaced=torch.where(is_real & (drawn < 8), (drawn < 2).long(), IGNORED))


class BothWays:
    """A model computed by bert.py or modern.py under autograd in float32, and by hand on the same weights and bin."""

    def __init__(
        self,
        settings: ModelSettings,
        batch: Batch,
        device: str,
        *,
        fp8: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        matrix_scale: float = 1.0,
    ) -> None:
        model = helpers.build_model(settings).to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(matrix_scale if parameter.ndim > 1 else 1.0)
        self.batch = batch.to(torch.device(device))
        self.arena = Arena(model, split_parts)
        self.expected_sums, self.expected = self._specification(model)
        for gradient in self.gradients_in_place():
            gradient.fill_(float("nan"))
        self.fused = new_fused(model, self.arena, fp8=fp8, dtype=dtype)

    def _specification(self, model: EncoderModel) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self.batch
        outputs = model.eval()(batch)
        self.expected_outputs = outputs
        sums = sums_of(outputs, batch, model.settings.head)
        loss = sums.mlm_loss / batch.num_predictions + sums.sequence_loss / batch.num_sequences
        if sums.rtd_loss is not None:
            loss = loss + model.settings.rtd * sums.rtd_loss / batch.num_tokens
        loss.backward()
        gradients = self.arena.named(self.arena.gradients.clone())
        return sums.pack(), gradients

    def run(self, seed: int = 7, accumulate: bool = False) -> Tensor:
        """One pass of the fused model; returns its sums."""
        device = self.arena.values.device
        word_scale, sequence_scale = (
            torch.tensor([1 / count], device=device) for count in (self.batch.num_predictions, self.batch.num_sequences)
        )
        seeded = torch.tensor([seed], device=device)
        token_scale = torch.tensor([self.fused.settings.rtd / self.batch.num_tokens], device=device)
        work = self.fused.forward_backward(
            self.batch, seeded, word_scale, sequence_scale, accumulate, token_scale=token_scale
        )
        try:
            next(work)
        except StopIteration as end:
            return end.value
        raise AssertionError("it was told of no layer to pause after")

    def measure_scales(self) -> None:
        """The first pass of FP8, in 16 bits, after which the scales are those of this bin."""
        assert self.fused.scales is not None
        self.fused.requantize()
        self.run()
        self.fused.scales.collect()
        self.fused.scales.update()
        self.fused.requantize()

    def gradients_in_place(self) -> list[Tensor]:
        return list(self.arena.named(self.arena.gradients).values())

    def gradients(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.arena.named(self.arena.gradients).items()}

    def sums_error(self, sums: Tensor) -> float:
        """The largest relative error of the losses; what `embed` adds up cancels, so it is measured by its terms."""
        losses = [0, 1, 4]  # of words, sequences and replaced tokens
        size = self.expected_sums[losses].abs()
        if self.fused.settings.head == "embed":
            assert self.expected_outputs.answers is not None
            assert self.batch.answers is not None
            terms = self.expected_outputs.answers.detach() * self.batch.answers
            size = size.clamp(min=float(terms[self.batch.is_real].norm()))
        difference = (sums[losses] - self.expected_sums[losses]).abs()
        return float(torch.where(difference == 0, 0.0, difference / size).max())

    def output_error(self) -> float:
        """The largest relative error of what the heads say, dropout off."""
        found, expected = self.fused.outputs(self.batch), self.expected_outputs
        pairs = [(getattr(found, name), getattr(expected, name)) for name in ("mlm_logits", "nsp_logits", "answers")]
        assert all((one is None) == (other is None) for one, other in pairs)
        return max(twins.error(one, other.detach()) for one, other in pairs if one is not None)

    def total_error(self) -> float:
        """Of the whole gradient: where the terms of single tensors cancel, it is what rounding is to be measured by."""
        found = self.gradients()
        return twins.error(*(torch.cat([one[name].flatten() for name in found]) for one in (found, self.expected)))

    def errors(self) -> dict[str, float]:
        """The relative error of each gradient; of what is zero up to rounding, relative to the whole gradient."""
        zero = vanishing(self.fused.settings)
        whole = torch.stack([gradient.norm() for gradient in self.expected.values()]).norm()
        return {
            name: float((tensor - self.expected[name]).norm() / whole)
            if name in zero
            else twins.error(tensor, self.expected[name])
            for name, tensor in self.gradients().items()
        }
