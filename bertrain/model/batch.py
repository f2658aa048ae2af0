"""The Batch: a flat run of tokens and all the model needs to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bertrain.kernels import IGNORED as IGNORED  # the label of an empty slot


@dataclass(frozen=True)
class Batch:
    """One bin. T tokens, S sequence slots, P prediction slots, all fixed by the bin's shape.

    Every row belongs to a sequence; sequences beyond the real ones are junk, and empty slots of cu_seqlens
    repeat T. Labels of empty slots are -100, their positions point at a safe row.
    """

    input_ids: Tensor  # [T]
    segment_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S + 1] int32, from 0 to T
    cls_positions: Tensor  # [S]
    mlm_positions: Tensor  # [P]
    mlm_labels: Tensor  # [P]
    nsp_labels: Tensor  # [S]
    answers: Tensor | None  # [S, 1 or 2] for fine-tuning: a class, a number, or an answer's first and last token
    max_seqlen: int
    sequence_lengths: tuple[int, ...]
    """Lengths of all sequences, junk included, on the host: what a ragged loop on the CPU goes by."""
    dropout_seed: int
    num_tokens: int
    num_sequences: int
    num_predictions: int

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def without_junk(self) -> Batch:
        """This bin without what fills it up to its shape, which only devices that repeat shapes have a use for.

        Where padding lies between the sequences, as in the policy `padded`, it stays.
        """
        tokens, sequences, predictions = self.num_tokens, self.num_sequences, self.num_predictions
        if self.cu_seqlens[sequences] != tokens or (self.nsp_labels[:sequences] == IGNORED).any():
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
            answers=None if self.answers is None else self.answers[:sequences],
            sequence_lengths=self.sequence_lengths[:sequences],
        )

    def to(self, device: torch.device) -> Batch:
        """This batch on `device`, copied without waiting where the memory is pinned."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory, from which a GPU copies while it computes."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = change(value)
        return Batch(**values)
