"""Streams of lines: as a plain reader reads them, in bounded pieces, whatever is torn."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertrain.run import stream
from bertrain.run.records import ClassScores, EvaluationRecord
from bertrain.run.stream import read_metrics


def records(count: int, ranks: int = 3) -> list[dict[str, Any]]:
    """Steps with evaluations, ranks and an end between them; a field that comes late, and numbers that are null."""
    draw = random.Random(count)
    lines: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        seconds = {"data": draw.random(), "forward_backward": draw.random()}
        line = {"kind": "step", "step": number, "samples": 2**40 + number, "loss": draw.random(), "applied": True}
        lines.append(line | {"loss": None, "applied": False} if number % 7 == 0 else line)
        lines[-1] |= {"seconds": seconds, "rank_tokens": [1] * ranks}
        if number > count // 2:
            lines[-1]["loss_scale"] = 2.0 ** (number % 16)
        if number % 5 == 0:
            lines.append({"kind": "evaluation", "step": number, "f1": draw.random(), "loss": None})
            if number % 10 == 0:  # a class for each evaluation so far
                scores = {"precision": 1, "recall": draw.random(), "f1": 0.5, "support": number}
                lines[-1]["by_class"] = [{"label": f"c{one}"} | scores for one in range(number // 10)]
            means = [{"rank": r, "host": f"h{r % 2}", "tokens": 10.0 * r, "seconds": seconds} for r in range(ranks)]
            lines.append({"kind": "ranks", "step": number, "ranks": means})
    return [*lines, {"kind": "end", "step": count, "samples": 1, "reason": "done"}]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("block", [700, 8 << 20])
def test_it_reads_what_a_plain_reader_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(stream, "BLOCK", block)
    lines = records(40)
    table = read_metrics(write(tmp_path / "metrics.jsonl", lines))
    steps = [line for line in lines if line["kind"] == "step"]
    assert table.num_unreadable == 0
    for name in ("step", "samples", "loss", "applied", "loss_scale"):
        values = [line.get(name) for line in steps]
        expected = np.array([math.nan if value is None else value for value in values])
        np.testing.assert_array_equal(table.columns[name], expected.astype(table.columns[name].dtype))
    assert table.columns["samples"][-1] == 2**40 + 40, "counts keep every digit"
    waits = [line["seconds"]["data"] for line in steps]
    np.testing.assert_allclose(table.columns["seconds.data"], waits, rtol=1e-7)
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert table.evaluations == [
        EvaluationRecord(
            line["step"], 0, {"f1": line["f1"]},
            tuple(ClassScores(**scores) for scores in line["by_class"]) if "by_class" in line else None,
        )
        for line in evaluations
    ]  # fmt: skip
    assert table.end is not None
    assert (table.end.step, table.end.samples, table.end.reason) == (40, 1, "done")
    entries = [entry for line in lines if line["kind"] == "ranks" for entry in line["ranks"] if entry["rank"] == 2]
    sums = table.ranks[2, "h0"]
    assert (sums.records, sums.tokens) == (8, 160.0)
    assert sums.seconds["data"] == pytest.approx(sum(entry["seconds"]["data"] for entry in entries))


@settings(max_examples=30, deadline=None)
@given(
    torn=st.sets(st.integers(0, 42), max_size=5),
    how=st.sampled_from(["cut", "zeros", "text", "bytes", "empty", "null"]),
)
def test_only_torn_lines_are_lost(tmp_path_factory: pytest.TempPathFactory, torn: set[int], how: str) -> None:
    lines = records(30)
    raw = [json.dumps(line).encode() for line in lines]
    for number in torn:
        damage = {
            "cut": raw[number][:30],
            "zeros": b"\0" * 50,
            "text": b'"step"',
            "bytes": b"\xff\xfe{",
            "empty": b"{}",
            "null": b"null",
        }
        raw[number] = damage[how]
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    path.write_bytes(b"\n".join(raw) + b"\n")
    table = read_metrics(path)
    left = [line for number, line in enumerate(lines) if number not in torn]
    assert table.num_unreadable == len(torn)
    assert table.columns["step"].tolist() == [line["step"] for line in left if line["kind"] == "step"]
    assert len(table.evaluations) == sum(line["kind"] == "evaluation" for line in left)
    assert (table.end is not None) == (left[-1]["kind"] == "end")


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            f'{{"kind": "step", "step": {value}}}'
            for value in ("null", "1.5", '"1"', "true", "-1", "1e999", str(2**60))
        ),
        *(f'{{"kind": "step", "step": 9, "tokens": {value}}}' for value in ("1e30", "-1", "[]", "9" * 400)),
        *(f'{{"kind": "step", "step": 9, "seconds": {{"data": {value}}}}}' for value in ("1e300", "Infinity", '"x"')),
        '{"kind": "step", "step": 9, "seconds": 3}',
        '{"kind": "evaluation", "step": 9, "f1": Infinity}',
        '{"kind": "ranks", "step": 9, "ranks": [null]}',
        '{"kind": "ranks", "step": 9, "ranks": [{"rank": null, "host": "a", "tokens": 1}]}',
        '{"kind": "ranks", "step": 9, "ranks": [{"rank": 1, "host": "a", "tokens": null}]}',
        '{"kind": "ranks", "step": 9, "ranks": [{"rank": 1, "tokens": 1}]}',
        '{"kind": "ranks", "step": 9, "ranks": [{"rank": 1, "host": "a", "tokens": 1, "seconds.data": 1}]}',
    ],
)
def test_a_line_of_values_that_no_run_writes_is_damaged(tmp_path: Path, wrong: str) -> None:
    path = write(tmp_path / "metrics.jsonl", records(12))
    whole = read_metrics(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:5], wrong + "\n", *lines[5:]]))
    table = read_metrics(path)
    assert table.num_unreadable == 1
    assert table.columns.keys() == whole.columns.keys()
    assert table.columns["step"].tolist() == whole.columns["step"].tolist()
    assert (table.evaluations, table.ranks, table.end) == (whole.evaluations, whole.ranks, whole.end)


def test_a_last_line_being_written_is_no_loss(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", records(3))
    with open(path, "a") as file:
        file.write('{"kind": "step", "st')
    assert read_metrics(path).num_unreadable == 0
    assert read_metrics(tmp_path / "absent.jsonl").columns == {}


def test_lines_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK", 1 << 10)
    table = read_metrics(write(tmp_path / "metrics.jsonl", records(10, ranks=2000)))
    assert table.num_unreadable == 0
    assert len(table.ranks) == 2000


def note_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all blocks that Arrow will be given."""
    sizes, parse = list[int](), stream._parse_json

    def parse_and_note(block: bytes) -> pa.Table:
        sizes.append(len(block))
        return parse(block)

    monkeypatch.setattr(stream, "_parse_json", parse_and_note)
    return sizes


def test_what_is_held_at_once_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of at most a block and a line are parsed; columns take four bytes a number, counts eight."""
    monkeypatch.setattr(stream, "BLOCK", 64 << 10)
    lines = [line for line in records(4000) if line["kind"] == "step"]
    path = write(tmp_path / "metrics.jsonl", lines)
    sizes = note_sizes(monkeypatch)
    table = read_metrics(path)
    assert sum(sizes) == path.stat().st_size
    assert max(sizes) <= (64 << 10) + 300
    assert sum(column.nbytes for column in table.columns.values()) == 4000 * (2 * 8 + 5 * 4)


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":1,"b":' * 50_000 + b"1" + b"}" * 50_000])
def test_a_deeply_nested_line_is_left_out(tmp_path: Path, deep: bytes) -> None:
    """pyarrow would overflow its stack, which ends the process."""
    line = b'{"kind":"step","step":1,"loss":2.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(line + b'{"kind":"step","step":' + deep + b"}\n" + line)
    table = read_metrics(tmp_path / "metrics.jsonl")
    assert table.columns["step"].tolist() == [1, 1]
    assert table.num_unreadable == 1


def test_a_file_of_bad_lines_is_given_up_and_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind":}\n' * 200_000)
    table = read_metrics(tmp_path / "metrics.jsonl")
    assert not table.columns
    assert table.num_unreadable == 200_000


def test_good_lines_among_thousands_of_bad_ones_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow parses such a block twice, not once for each bad line, which took seconds."""
    good = b"".join(b'{"kind":"step","step":%d,"loss":2.0}\n{"kind":"step","st\n' % step for step in range(1, 2001))
    (tmp_path / "metrics.jsonl").write_bytes(good)
    sizes = note_sizes(monkeypatch)
    table = read_metrics(tmp_path / "metrics.jsonl")
    assert table.columns["step"].tolist() == list(range(1, 2001))
    assert table.num_unreadable == 2000
    assert len(sizes) == 2
