"""The Batch: the tokens of one bin in one dimension, and the other inputs of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bertrain.kernels import IGNORED as IGNORED  # the label of an empty slot


@dataclass(frozen=True)
class Batch:
    """One bin (a micro-batch of packed sequences): T tokens, S sequence slots, P prediction slots.

    The bin's shape fixes all three. Padding tokens form sequences of their own, which are not real; unused entries of
    cu_seqlens repeat T. Labels of empty slots are -100, and their positions point at an existing row.
    """

    input_ids: Tensor  # [T]
    segment_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1] int32, from 0 to T
    cls_positions: Tensor  # [S]
    mlm_positions: Tensor  # [P] the masked tokens; for the tag head, the first token of each word
    mlm_labels: Tensor  # [P] the original tokens; for the tag head, the classes of the words
    nsp_labels: Tensor  # [S]
    is_real: Tensor  # [S] bool: whether a slot holds an example
    answers: Tensor | None  # [S, ...] for fine-tuning: class, number, first and last token, or 0 and 1 for each label
    max_seqlen: int
    sequence_lengths: tuple[int, ...]
    """Lengths of all sequences, padding included, on the host, for loops over sequences on a CPU."""
    dropout_seed: int
    num_tokens: int
    num_sequences: int
    num_predictions: int
    answer_weights: Tensor | None = None  # [S, 1] or as `answers`: factors of the loss; None: all are 1
    replaced: Tensor | None = None  # [T] for replaced-token detection: 1 replaced, 0 original, -100 ignored

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def without_padding(self) -> Batch:
        """This bin without the padding at its end, which only CUDA graphs need; padding between sequences stays."""
        tokens, sequences, predictions = self.num_tokens, self.num_sequences, self.num_predictions
        if self.cu_seqlens[sequences] != tokens or not self.is_real[:sequences].all():
            return self
        return replace(
            self,
            input_ids=self.input_ids[:tokens],
            segment_ids=self.segment_ids[:tokens],
            position_ids=self.position_ids[:tokens],
            cu_seqlens=self.cu_seqlens[: sequences + 1],
            cls_positions=self.cls_positions[:sequences],
            mlm_positions=self.mlm_positions[:predictions],
            mlm_labels=self.mlm_labels[:predictions],
            nsp_labels=self.nsp_labels[:sequences],
            is_real=self.is_real[:sequences],
            answers=None if self.answers is None else self.answers[:sequences],
            answer_weights=None if self.answer_weights is None else self.answer_weights[:sequences],
            replaced=None if self.replaced is None else self.replaced[:tokens],
            sequence_lengths=self.sequence_lengths[:sequences],
        )

    def copy_(self, batch: Batch) -> None:
        """Copy the tensors of a batch of the same shape into those of this one, asynchronously."""
        for name, tensor in batch._tensors():
            getattr(self, name).copy_(tensor, non_blocking=True)

    def to(self, device: torch.device) -> Batch:
        """This batch on `device`; the copy is asynchronous if the memory is pinned."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """This batch in pinned memory, from which a GPU copies asynchronously."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors()}
        return replace(self, **changed)
