"""Makes a Batch from the examples of a bin: masked tokens in one dimension, everything padded to the bin's shape."""

from __future__ import annotations

import numpy as np
import torch

from bertrain.config.settings import Settings
from bertrain.data.feed.batching import Capacity, Policy
from bertrain.data.formats.block import Block, Masks, Values, flat_ranges
from bertrain.data.formats.masking import Ints
from bertrain.model.batch import IGNORED, Batch


def assemble_batch(
    block: Block,
    *,
    policy: Policy,
    shape: Capacity,
    max_seq_length: int,
    pad_id: int,
    dropout_seed: int,
    num_segments: int = 2,
) -> Batch:
    """Lay a bin's examples out in one dimension. With `num_segments` 1 (RoBERTa), all segment ids are 0."""
    assert block.masks is not None
    lengths, masks = block.lengths, block.masks
    layout = policy.lay_out(lengths, shape.tokens, max_seq_length)
    num_slots = policy.num_slots(shape, max_seq_length)
    within = flat_ranges(np.zeros_like(lengths), lengths)  # position of each token in its example
    in_batch = within + np.repeat(layout.starts, lengths)  # and in the batch

    input_ids = np.full(shape.tokens, pad_id, dtype=np.int64)
    input_ids[in_batch] = block.tokens
    segment_ids = np.zeros(shape.tokens, dtype=np.int64)
    if num_segments > 1:
        segment_ids[in_batch] = within >= np.repeat(block.segment_b, lengths)
    boundaries = layout.boundaries
    sequence_lengths = np.diff(boundaries)
    position_ids = np.arange(shape.tokens) - np.repeat(boundaries[:-1], sequence_lengths)

    cu_seqlens = np.full(num_slots + 1, shape.tokens, dtype=np.int32)
    cu_seqlens[: len(boundaries)] = boundaries
    nsp_labels = np.full(num_slots, IGNORED, dtype=np.int64)
    nsp_labels[layout.slots] = block.is_random
    is_real = np.zeros(num_slots, dtype=bool)
    is_real[layout.slots] = True
    mlm_positions = np.zeros(shape.predictions, dtype=np.int64)
    mlm_positions[: len(masks.positions)] = masks.positions + np.repeat(layout.starts, masks.counts)
    mlm_labels = np.full(shape.predictions, IGNORED, dtype=np.int64)
    mlm_labels[: len(masks.labels)] = masks.labels

    def in_slots(rows: Values | None) -> torch.Tensor | None:
        if rows is None:
            return None
        slots = np.zeros((num_slots, rows.shape[1]), dtype=rows.dtype)
        slots[layout.slots] = rows
        return torch.from_numpy(slots)

    return Batch(
        input_ids=torch.from_numpy(input_ids),
        segment_ids=torch.from_numpy(segment_ids),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        cls_positions=torch.from_numpy(np.minimum(cu_seqlens[:-1], shape.tokens - 1).astype(np.int64)),
        mlm_positions=torch.from_numpy(mlm_positions),
        mlm_labels=torch.from_numpy(mlm_labels),
        nsp_labels=torch.from_numpy(nsp_labels),
        is_real=torch.from_numpy(is_real),
        answers=in_slots(block.answers),
        answer_weights=in_slots(block.answer_weights),
        max_seqlen=max_seq_length,
        sequence_lengths=tuple(sequence_lengths.tolist()),
        dropout_seed=dropout_seed,
        num_tokens=len(block.tokens),
        num_sequences=len(block),
        num_predictions=len(masks.positions),
    )


def placeholder_block(lengths: Ints, predictions: Ints, token: int, settings: Settings) -> Block:
    """Masked examples of these sizes that repeat one token, for a step that only measures time or memory."""
    model = settings.model
    label = 0 if model.head == "tag" else token  # a class, or a word
    positions = flat_ranges(np.zeros_like(predictions), predictions)
    answers, weights = None, None
    if model.head not in ("pretrain", "tag"):
        columns = {"span": 2, "multilabel": model.num_labels}.get(model.head, 1)
        dtype = np.float32 if model.head in ("regress", "multilabel", "embed") else np.int64
        answers = np.zeros((len(lengths), columns), dtype=dtype)
        weights = np.ones((len(lengths), columns), dtype=np.float32) if settings.task.class_weights else None
    return Block(
        tokens=np.full(lengths.sum(), token),
        lengths=lengths,
        segment_b=lengths // 2,
        is_random=np.zeros_like(lengths),
        masks=Masks(predictions, positions, np.full_like(positions, label)),
        answers=answers,
        answer_weights=weights,
    )
