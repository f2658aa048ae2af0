"""Layouts of other systems as pure functions: the fields of some records to a Block of examples, and back.

**fixed** (BERT's script, MLPerf, NVIDIA, Samsung): rows padded to max_seq_length and max_predictions with zeros. A
prediction at position 0 is an empty slot, since [CLS] is never predicted; `masked_lm_weights`, if any, decides.

**varlength** (NVIDIA): the same fields without padding and without `input_mask`.

**packed** (NVIDIA): several sequences per record, with their lengths; positions count from the record's beginning.

**graphcore**: several sequences per padded row. `packed_input_mask` numbers them from 1, `packed_position_ids` order
the tokens of each; their [CLS] are in the last columns, next-sentence labels in the same order.

**encoded** (the GPU-variability study): unmasked padded rows and the positions of [CLS] and [SEP].

An inconsistent record raises `BadRecord` with its number among those given; the caller knows the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.data.formats.block import Block, Masks, flat_ranges, joined, split
from bertrain.data.formats.masking import Ints

Fields = dict[str, Any]  # field name to a 2-D array, or to a list of arrays, one for each record

FIXED = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
VARLENGTH = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
PACKED = (*VARLENGTH, "packed_input_len", "packed_masked_lm_len")
ENCODED = ("input_ids", "special_token_positions", "next_sentence_labels")
GRAPHCORE = (
    "packed_input_ids",
    "packed_input_mask",
    "packed_segment_ids",
    "packed_position_ids",
    "packed_masked_lm_positions",
    "packed_masked_lm_ids",
    "packed_masked_lm_mask",
    "packed_next_sentence_labels",
)
WEIGHTS = "masked_lm_weights"  # of TFRecords: 1 for real predictions, 0 for padding


def join(parts: list[Any]) -> Any:
    return list(chain.from_iterable(parts)) if isinstance(parts[0], list) else np.concatenate(parts)


class BadRecord(Exception):
    """An inconsistent record: its number among those given, and the complaint."""

    def __init__(self, number: int, complaint: str) -> None:
        super().__init__(complaint)
        self.number, self.complaint = int(number), complaint


@dataclass(frozen=True)
class Shape:
    """Width of padded rows and of their predictions, and the type of a token."""

    max_seq_length: int
    max_predictions: int
    token_type: npt.DTypeLike


def from_fixed(fields: Fields) -> tuple[Block, Ints]:
    """The examples of fixed records, and the number of examples of each record: one."""
    next_labels = np.asarray(fields["next_sentence_labels"])
    if next_labels.ndim == 2 and next_labels.shape[1] != 1:  # TFRecords store a number as a list of one
        raise BadRecord(0, f"next_sentence_labels has {next_labels.shape[1]} places, not one")
    ids, mask, segments = (np.asarray(fields[name]) for name in FIXED[:3])
    positions, labels = (np.asarray(fields[name]) for name in FIXED[3:5])
    _refuse_unequal_widths(fields, FIXED[:3])
    _refuse_unequal_widths(fields, FIXED[3:5])
    weights = np.asarray(fields[WEIGHTS]) if WEIGHTS in fields else positions
    if weights.shape != positions.shape:
        raise BadRecord(0, f"{WEIGHTS} has {weights.shape[1]} places, but masked_lm_positions has {positions.shape[1]}")
    real, predicted = mask != 0, weights != 0
    lengths = real.sum(axis=1)
    _refuse((real != (np.arange(mask.shape[1]) < lengths[:, None])).any(axis=1), "input_mask has a gap")
    block = _block(
        ids[real],
        lengths,
        segments[real],
        next_labels.reshape(-1),
        Masks(predicted.sum(axis=1), positions[predicted].astype(np.int64), labels[predicted].astype(np.int64)),
    )
    return block, np.ones(len(block), dtype=np.int64)


def from_varlength(fields: Fields) -> tuple[Block, Ints]:
    """The examples of variable-length records, and the number of examples of each record: one."""
    lengths, counts = _sizes(fields["input_ids"]), _sizes(fields["masked_lm_positions"])
    _refuse(_sizes(fields["segment_ids"]) != lengths, "segment_ids and input_ids differ in length")
    _refuse(_sizes(fields["masked_lm_ids"]) != counts, "masked_lm_ids and masked_lm_positions differ in length")
    sizes = {"packed_input_len": lengths[:, None], "packed_masked_lm_len": counts[:, None]}
    labels = np.asarray(fields["next_sentence_labels"])[:, None]
    return from_packed(fields | sizes | {"next_sentence_labels": labels})  # packs of one example


def from_packed(fields: Fields) -> tuple[Block, Ints]:
    """The examples of NVIDIA's packs, and the number of examples of each pack."""
    parts = _sizes(fields["packed_input_len"])
    _refuse(parts == 0, "the pack contains no sequence")
    for name in ("packed_masked_lm_len", "next_sentence_labels"):
        _refuse(_sizes(fields[name]) != parts, f"{name} and packed_input_len differ in length")
    lengths, counts = joined(fields["packed_input_len"]), joined(fields["packed_masked_lm_len"])
    pack = np.repeat(np.arange(len(parts)), parts)
    _refuse_at(pack[(lengths < 0) | (counts < 0)], "a length is negative")
    tokens_of_pack = np.bincount(pack, lengths, len(parts)).astype(np.int64)
    predictions_of_pack = np.bincount(pack, counts, len(parts)).astype(np.int64)
    for name in ("input_ids", "segment_ids"):
        _refuse(_sizes(fields[name]) != tokens_of_pack, f"packed_input_len does not add up to the length of {name}")
    for name in ("masked_lm_positions", "masked_lm_ids"):
        complaint = f"packed_masked_lm_len does not add up to the length of {name}"
        _refuse(_sizes(fields[name]) != predictions_of_pack, complaint)
    starts = np.cumsum(lengths) - lengths
    starts_in_pack = starts - np.repeat(np.cumsum(tokens_of_pack) - tokens_of_pack, parts)
    masks = Masks(
        counts,
        joined(fields["masked_lm_positions"]) - np.repeat(starts_in_pack, counts),
        joined(fields["masked_lm_ids"]),
    )
    tokens, segments = joined(fields["input_ids"]), joined(fields["segment_ids"])
    return _block(tokens, lengths, segments, joined(fields["next_sentence_labels"]), masks, pack), parts


def from_graphcore(fields: Fields) -> tuple[Block, Ints]:
    """The examples of Graphcore's packs, and the number of examples of each pack."""
    _refuse_unequal_widths(fields, GRAPHCORE[:4])
    _refuse_unequal_widths(fields, GRAPHCORE[4:7])
    ids, mask, segments, position_ids, mlm_positions, mlm_ids = (
        np.asarray(fields[name]).astype(np.int64) for name in GRAPHCORE[:6]
    )
    mlm_mask, labels = (np.asarray(fields[name]).astype(np.int64) for name in GRAPHCORE[6:])
    width, slots = mask.shape[1], labels.shape[1]
    parts = mask.max(axis=1, initial=0)
    _refuse(
        (parts == 0) | (mask.min(axis=1, initial=0) < 0) | (parts > width),
        "packed_input_mask is not a numbering of sequences",
    )
    first_example = np.cumsum(parts) - parts
    pack = np.repeat(np.arange(len(parts)), parts)

    record, column = np.nonzero(mask)
    example = first_example[record] + mask[record, column] - 1
    order = np.lexsort((position_ids[record, column], example))
    record, column, example = record[order], column[order], example[order]
    lengths = np.bincount(example, minlength=len(pack))
    _refuse_at(pack[lengths == 0], "packed_input_mask skips a sequence")
    within = flat_ranges(np.zeros(len(pack), dtype=np.int64), lengths)
    _refuse_at(record[position_ids[record, column] != within], "packed_position_ids do not count a sequence from 0")

    label_slot = column[np.cumsum(lengths) - lengths] - (width - slots)
    _refuse_at(pack[label_slot < 0], "a [CLS] is not among the last columns, so it has no next-sentence label")

    predicted_in, prediction = np.nonzero(mlm_mask)
    place = mlm_positions[predicted_in, prediction]
    _refuse_at(predicted_in[(place < 0) | (place >= width)], "a masked position is outside the row")
    owner = mlm_mask[predicted_in, prediction]
    _refuse_at(predicted_in[owner != mask[predicted_in, place]], "a masked position is in another sequence")
    owner = first_example[predicted_in] + owner - 1
    by_owner = np.argsort(owner, kind="stable")
    masks = Masks(
        np.bincount(owner, minlength=len(pack)),
        position_ids[predicted_in, place][by_owner],
        mlm_ids[predicted_in, prediction][by_owner],
    )
    tokens, segments = ids[record, column], segments[record, column]
    return _block(tokens, lengths, segments, labels[pack, label_slot], masks, pack), parts


def from_encoded(fields: Fields) -> tuple[Block, Ints]:
    """The unmasked examples of the study's records, and the number of examples of each record: one."""
    ids, special = np.asarray(fields["input_ids"]), np.asarray(fields["special_token_positions"]).astype(np.int64)
    if special.shape[1] not in (2, 3):
        raise BadRecord(0, f"special_token_positions has {special.shape[1]} places, not 3 (a pair) or 2 (one text)")
    lengths = special[:, -1] + 1
    _refuse(
        (np.diff(special, axis=1) <= 0).any(axis=1) | (special[:, 0] != 0) | (lengths > ids.shape[1]),
        "special_token_positions do not ascend from 0 to the end of the example",
    )
    within = np.arange(ids.shape[1])
    real = within < lengths[:, None]
    segments = real & (within > special[:, 1:2])
    block = _block(ids[real], lengths, segments[real], np.asarray(fields["next_sentence_labels"]), None)
    return block, np.ones(len(block), dtype=np.int64)


DECODERS: dict[str, Callable[[Fields], tuple[Block, Ints]]] = {
    "fixed": from_fixed,
    "varlength": from_varlength,
    "packed": from_packed,
    "graphcore": from_graphcore,
    "encoded": from_encoded,
}


def to_fixed(block: Block, shape: Shape) -> Fields:
    assert block.masks is not None
    masks = block.masks
    real = np.arange(shape.max_seq_length) < block.lengths[:, None]
    predicted = np.arange(shape.max_predictions) < masks.counts[:, None]
    return {
        "input_ids": _padded(real, block.tokens, shape.token_type),
        "input_mask": real.astype(np.int8),
        "segment_ids": (real & (np.arange(shape.max_seq_length) >= block.segment_b[:, None])).astype(np.int8),
        "masked_lm_positions": _padded(predicted, masks.positions, shape.token_type),
        "masked_lm_ids": _padded(predicted, masks.labels, shape.token_type),
        "next_sentence_labels": block.is_random.astype(np.int8),
    }


def to_packed(block: Block, parts: Ints, shape: Shape) -> Fields:
    """The fields of packs; pack i holds the next parts[i] examples."""
    assert block.masks is not None
    masks = block.masks
    pack = np.repeat(np.arange(len(parts)), parts)
    tokens_of_pack = np.bincount(pack, block.lengths, len(parts)).astype(np.int64)
    predictions_of_pack = np.bincount(pack, masks.counts, len(parts)).astype(np.int64)
    starts = np.cumsum(block.lengths) - block.lengths
    starts_in_pack = starts - np.repeat(np.cumsum(tokens_of_pack) - tokens_of_pack, parts)
    shifted = masks.positions + np.repeat(starts_in_pack, masks.counts)
    segments = np.arange(len(block.tokens)) >= np.repeat(starts + block.segment_b, block.lengths)
    return {
        "input_ids": split(block.tokens.astype(shape.token_type), tokens_of_pack),
        "segment_ids": split(segments.astype(np.int8), tokens_of_pack),
        "packed_input_len": split(block.lengths.astype(shape.token_type), parts),
        "masked_lm_positions": split(shifted.astype(shape.token_type), predictions_of_pack),
        "masked_lm_ids": split(masks.labels.astype(shape.token_type), predictions_of_pack),
        "packed_masked_lm_len": split(masks.counts.astype(shape.token_type), parts),
        "next_sentence_labels": split(block.is_random.astype(np.int8), parts),
    }


def to_varlength(block: Block, shape: Shape) -> Fields:
    """The fields of variable-length records: packs of one example, without the fields of lengths."""
    packs = to_packed(block, np.ones(len(block), dtype=np.int64), shape)
    return {name: packs[name] for name in VARLENGTH[:-1]} | {"next_sentence_labels": block.is_random.astype(np.int8)}


def _block(
    tokens: npt.NDArray,
    lengths: Ints,
    segments: npt.NDArray,
    labels: npt.NDArray,
    masks: Masks | None,
    pack: Ints | None = None,
) -> Block:
    """A block of these arrays, checked; predictions in ascending order. `pack` is the record of each example."""
    record = np.arange(len(lengths)) if pack is None else pack
    example = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    _refuse_at(record[lengths == 0], "the example is empty")
    _refuse_at(record[example[tokens < 0]], "a token id is negative")
    segment_b = lengths - np.bincount(example, segments != 0, len(lengths)).astype(np.int64)
    is_mixed = segments != (within >= segment_b[example])
    _refuse_at(record[example[is_mixed]], "segment_ids are not a run of 0 followed by a run of 1")
    _refuse_at(record[(labels != 0) & (labels != 1)], "the next-sentence label is neither 0 nor 1")
    if masks is not None:
        owner = np.repeat(np.arange(len(lengths)), masks.counts)
        outside = (masks.positions < 0) | (masks.positions >= lengths[owner])
        _refuse_at(record[owner[outside]], "a masked position is outside the example")
        _refuse_at(record[owner[masks.labels < 0]], "a label is negative")
        rising = (np.diff(masks.positions) > 0) | (np.diff(owner) > 0)
        if not rising.all():
            order = np.lexsort((masks.positions, owner))
            masks = Masks(masks.counts, masks.positions[order], masks.labels[order])
            rising = (np.diff(masks.positions) > 0) | (np.diff(owner) > 0)
            _refuse_at(record[owner[1:][~rising]], "a position is masked twice")
    return Block(
        tokens.astype(np.int64), lengths.astype(np.int64), segment_b.astype(np.int64), labels.astype(np.int64), masks
    )


def _refuse(is_bad: npt.NDArray[np.bool_], complaint: str) -> None:
    _refuse_at(np.flatnonzero(is_bad), complaint)


def _refuse_at(numbers: npt.NDArray, complaint: str) -> None:
    if len(numbers):
        raise BadRecord(numbers[0], complaint)


def _refuse_unequal_widths(fields: Fields, names: tuple[str, ...]) -> None:
    width, *others = (np.asarray(fields[name]).shape[1] for name in names)
    for name, found in zip(names[1:], others, strict=True):
        if found != width:
            raise BadRecord(0, f"{name} has {found} places, but {names[0]} has {width}")


def _sizes(arrays: list[npt.NDArray]) -> Ints:
    return np.fromiter(map(len, arrays), np.int64, len(arrays))


def _padded(real: npt.NDArray[np.bool_], values: Ints, kind: npt.DTypeLike) -> npt.NDArray:
    """A 2-D array with the values where `real` is true, and zeros elsewhere."""
    out = np.zeros(real.shape, dtype=kind)
    out[real] = values
    return out
