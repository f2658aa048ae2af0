"""Other people's layouts: pure functions against plain twins, and real files field by field."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertrain.base import protobuf
from bertrain.data.formats import layouts, tfrecord
from bertrain.data.formats.block import Block, Masks, concatenate, split
from bertrain.data.formats.layouts import BadRecord, Shape
from bertrain.data.formats.source import open_data
from tests.helpers import examples_of

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPE = Shape(24, 8, np.int16)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Examples of 3 to 24 tokens with 0 to 8 predictions."""
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(3, 24))
        positions = sorted(draw(st.sets(st.integers(1, length - 1), max_size=8)))
        words = st.integers(0, 30521)
        rows.append(
            Block(
                np.array(draw(st.lists(words, min_size=length, max_size=length))),
                np.array([length]),
                np.array([draw(st.integers(0, length))]),
                np.array([draw(st.integers(0, 1))]),
                Masks(
                    np.array([len(positions)]),
                    np.array(positions, dtype=np.int64),
                    np.array([draw(words) for _ in positions], dtype=np.int64),
                ),
            )
        )
    return concatenate(rows)


def padded(values: list[int], width: int) -> list[int]:
    return values + [0] * (width - len(values))


def plain_row(example: dict[str, Any]) -> dict[str, list[int]]:
    """The ragged fields of one example, said in the plainest way."""
    length = len(example["tokens"])
    return {
        "input_ids": example["tokens"],
        "segment_ids": [int(place >= example["segment_b"]) for place in range(length)],
        "masked_lm_positions": example["positions"],
        "masked_lm_ids": example["labels"],
    }


@settings(max_examples=40)
@given(blocks())
def test_fixed_rows_are_padded_rows_and_read_back(block: Block) -> None:
    fields = layouts.to_fixed(block, SHAPE)
    for number, example in enumerate(examples_of(block)):
        row = plain_row(example)
        assert fields["input_ids"][number].tolist() == padded(row["input_ids"], 24)
        assert fields["input_mask"][number].tolist() == padded([1] * len(row["input_ids"]), 24)
        assert fields["segment_ids"][number].tolist() == padded(row["segment_ids"], 24)
        assert fields["masked_lm_positions"][number].tolist() == padded(row["masked_lm_positions"], 8)
        assert fields["masked_lm_ids"][number].tolist() == padded(row["masked_lm_ids"], 8)
        assert fields["next_sentence_labels"][number] == example["is_random"]
    back, parts = layouts.from_fixed(fields)
    assert examples_of(back) == examples_of(block)
    assert parts.tolist() == [1] * len(block)


@settings(max_examples=40)
@given(blocks())
def test_ragged_rows_read_back(block: Block) -> None:
    fields = layouts.to_varlength(block, SHAPE)
    for number, example in enumerate(examples_of(block)):
        for name, values in plain_row(example).items():
            assert fields[name][number].tolist() == values
    assert examples_of(layouts.from_varlength(fields)[0]) == examples_of(block)


@settings(max_examples=40)
@given(blocks(), st.data())
def test_packs_read_back(block: Block, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, len(block) - 1)))) if len(block) > 1 else []
    parts = np.diff([0, *ends, len(block)])
    fields = layouts.to_packed(block, parts, SHAPE)
    rows = [plain_row(example) for example in examples_of(block)]
    for pack, members in enumerate(split(np.arange(len(block)), parts)):
        before = 0
        tokens, positions = [], []
        for member in members:
            tokens += rows[member]["input_ids"]
            positions += [before + place for place in rows[member]["masked_lm_positions"]]
            before += len(rows[member]["input_ids"])
        assert fields["input_ids"][pack].tolist() == tokens
        assert fields["masked_lm_positions"][pack].tolist() == positions
        assert fields["packed_input_len"][pack].tolist() == [len(rows[member]["input_ids"]) for member in members]
    back, found = layouts.from_packed(fields)
    assert examples_of(back) == examples_of(block)
    assert found.tolist() == parts.tolist()


@settings(max_examples=40)
@given(blocks(), st.data())
def test_examples_are_taken_in_any_order(block: Block, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(block) - 1), max_size=8))
    taken = block.take(np.array(chosen, dtype=np.int64))
    assert examples_of(taken) == [examples_of(block)[number] for number in chosen]


def test_answers_and_their_weights_stay_with_the_examples() -> None:
    column, lengths = np.arange(4.0)[:, None], np.ones(4, dtype=np.int64)
    block = Block(np.arange(4), lengths, lengths, np.zeros(4, bool), None, column, -column, texts_per_example=2)
    joined = concatenate([block.take(np.array([2, 3])), block])
    assert joined.texts_per_example == 2
    assert joined.answers is not None
    assert joined.answer_weights is not None
    assert joined.answers[:, 0].tolist() == [2, 3, 0, 1, 2, 3]
    assert joined.answer_weights[:, 0].tolist() == [-2, -3, 0, -1, -2, -3]
    with pytest.raises(ValueError, match="others have none"):
        concatenate([block, replace(block, answer_weights=None)])


def test_predictions_out_of_order_are_sorted() -> None:
    one = {
        "input_ids": [np.array([101, 7, 8, 102])],
        "segment_ids": [np.zeros(4, int)],
        "masked_lm_positions": [np.array([2, 1])],
        "masked_lm_ids": [np.array([20, 10])],
        "next_sentence_labels": np.array([0]),
    }
    masks = layouts.from_varlength(one)[0].masks
    assert masks is not None
    assert masks.positions.tolist() == [1, 2]
    assert masks.labels.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("input_ids", [101, -7, 8, 102], "a token id is negative"),
        ("segment_ids", [0, 1, 0, 1], "segment_ids are not a run of 0"),
        ("segment_ids", [0, 0, 0], "segment_ids and input_ids differ in length"),
        ("masked_lm_positions", [1, 4], "a masked position is outside the example"),
        ("masked_lm_positions", [1, 1], "a position is masked twice"),
        ("masked_lm_ids", [1], "masked_lm_ids and masked_lm_positions differ in length"),
        ("masked_lm_ids", [1, -1], "a label is negative"),
        ("next_sentence_labels", 2, "the next-sentence label is neither 0 nor 1"),
    ],
)
def test_records_that_contradict_themselves(field: str, value: Any, complaint: str) -> None:
    good = {
        "input_ids": [101, 7, 8, 102],
        "segment_ids": [0, 0, 1, 1],
        "masked_lm_positions": [1, 2],
        "masked_lm_ids": [5, 6],
        "next_sentence_labels": 1,
    }
    rows = [good, good, good | {field: value}]
    fields: dict[str, Any] = {name: [np.array(row[name]) for row in rows] for name in good}
    with pytest.raises(BadRecord, match=complaint) as caught:
        layouts.from_varlength(fields)
    assert caught.value.number == 2


# --- the wire format ------------------------------------------------------------------------------------


def plain_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place


def plain_fields(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    place = 0
    while place < len(data):
        key, place = plain_varint(data, place)
        assert key & 7 == 2
        size, place = plain_varint(data, place)
        found.append((key >> 3, data[place : place + size]))
        place += size
    return found


def plain_examples(path: Path) -> list[dict[str, list[Any]]]:
    """The features of each record of a real file, by a parser of a few plain lines that trusts it."""
    data = path.read_bytes()
    place = 0
    found = []
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        (_, features), *_ = plain_fields(data[place + 12 : place + 12 + length])
        example: dict[str, list[Any]] = {}
        for _, entry in plain_fields(features):
            (_, name), (_, feature) = plain_fields(entry)
            ((kind, content),) = plain_fields(feature)
            ((_, values),) = plain_fields(content)
            if kind == 2:
                example[name.decode()] = list(struct.unpack(f"<{len(values) // 4}f", values))
            else:
                numbers = []
                at = 0
                while at < len(values):
                    number, at = plain_varint(values, at)
                    numbers.append(number)
                example[name.decode()] = numbers
        found.append(example)
        place += length + 16
    return found


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_varints(values: list[int]) -> None:
    encoded = protobuf.encode_varints(np.array(values, dtype=np.int64))
    place, back = 0, []
    while place < len(encoded):
        value, place = plain_varint(encoded, place)
        back.append(value)
    assert back == values
    assert protobuf.decode_varints(encoded).tolist() == values


def test_negative_numbers_take_ten_bytes() -> None:
    assert protobuf.decode_varints(b"\xff" * 9 + b"\x01" + b"\x05").tolist() == [-1, 5]


def test_lists_may_be_a_field_for_each_number() -> None:
    """Parsers must take both forms of a repeated field."""
    unpacked = b"".join(b"\x08" + bytes([value]) for value in (1, 2, 3))
    feature = b"\x1a" + bytes([len(unpacked)]) + unpacked
    entry = b"\x0a\x01n" + b"\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    example = b"\x0a" + bytes([len(features)]) + features
    assert tfrecord.stack("n", [tfrecord.parse_example(example)["n"]]).tolist() == [[1, 2, 3]]


def test_the_checksum_is_castagnoli_masked() -> None:
    checksum = 0xE3069283  # CRC32C of "123456789", the published check value
    assert tfrecord.masked_checksum(b"123456789") == ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_googles_file_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "part-00000"
    path.write_bytes((GOLDEN / "google-mlperf.tfrecord").read_bytes())
    source = open_data(path)
    assert (source.layout, source.max_seq_length, source.max_predictions) == ("tfrecord", 512, 76)
    theirs = plain_examples(path)
    ours = examples_of(source.read(np.arange(len(source))))
    assert len(ours) == len(theirs) == 10
    for one, other in zip(ours, theirs, strict=True):
        row = plain_row(one)
        assert padded(row["input_ids"], 512) == other["input_ids"]
        assert padded([1] * len(row["input_ids"]), 512) == other["input_mask"]
        assert padded(row["segment_ids"], 512) == other["segment_ids"]
        assert padded(row["masked_lm_positions"], 76) == other["masked_lm_positions"]
        assert padded(row["masked_lm_ids"], 76) == other["masked_lm_ids"]
        assert padded([1.0] * len(row["masked_lm_ids"]), 76) == other["masked_lm_weights"]
        assert [one["is_random"]] == other["next_sentence_labels"]


def test_graphcores_packs_sequence_by_sequence(tmp_path: Path) -> None:
    path = tmp_path / "packed.tfrecord"
    path.write_bytes((GOLDEN / "graphcore-packed.tfrecord").read_bytes())
    source = open_data(path)
    assert (source.layout, len(source)) == ("tfrecord-packed", 45)
    ours = iter(examples_of(source.read(np.arange(45))))
    for record in plain_examples(path):
        for sequence in range(1, max(record["packed_input_mask"]) + 1):
            places = [place for place, owner in enumerate(record["packed_input_mask"]) if owner == sequence]
            places.sort(key=record["packed_position_ids"].__getitem__)
            predictions = [number for number, owner in enumerate(record["packed_masked_lm_mask"]) if owner == sequence]
            assert next(ours) == {
                "tokens": [record["packed_input_ids"][place] for place in places],
                "segment_b": [record["packed_segment_ids"][place] for place in places].index(1),
                "is_random": record["packed_next_sentence_labels"][-sequence],
                "positions": [places.index(record["packed_masked_lm_positions"][number]) for number in predictions],
                "labels": [record["packed_masked_lm_ids"][number] for number in predictions],
            }
    assert next(ours, None) is None
    words = source.vocabulary.words
    assert all(words[example["tokens"][0]] == "[CLS]" for example in examples_of(source.read(np.arange(45))))
