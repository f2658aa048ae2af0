"""Packers: every sequence once, no row over its length, as good as published; least squares at its optimum."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.data.formats import packing
from bertrain.data.formats.pack import pack, read_lengths
from bertrain.data.formats.packing import (
    Algorithm,
    count_lengths,
    exact_fillings,
    pack_histogram,
    plan_packing,
    solve,
    sort_by_length,
)
from bertrain.data.formats.shards import Shards
from tests import helpers

ROW = 40
ALGORITHMS: tuple[Algorithm, ...] = ("lpfhp", "spfhp", "nnlshp")
some_lengths = st.lists(st.integers(1, ROW), min_size=1, max_size=150).map(lambda values: np.array(values, np.int32))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=some_lengths, max_per_row=st.integers(0, 3), seed=st.integers(0, 5))
def test_every_sequence_lies_in_one_row(algorithm: Algorithm, lengths: np.ndarray, max_per_row: int, seed: int) -> None:
    def pack() -> tuple[np.ndarray, np.ndarray]:
        return helpers.packed_rows(lengths, row_length=ROW, algorithm=algorithm, max_per_row=max_per_row, seed=seed)

    indices, offsets = pack()
    assert indices.dtype == offsets.dtype == np.int64
    assert sorted(indices.tolist()) == list(range(len(lengths)))
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths)
    assert np.diff(offsets).min() >= 1
    if max_per_row:
        assert np.diff(offsets).max() <= max_per_row
    assert max(lengths[row].sum() for row in np.split(indices, offsets[1:-1])) <= ROW
    again = pack()
    assert (again[0] == indices).all()
    assert (again[1] == offsets).all()


@given(lengths=some_lengths, max_per_row=st.integers(1, 6), into_fullest=st.booleans())
def test_histograms_are_packed_as_one_sequence_after_another_would_be(
    lengths: np.ndarray, max_per_row: int, into_fullest: bool
) -> None:
    """Against a plain twin that keeps a list of rows: space left and number of sequences, row by row."""
    rows: list[list[int]] = []  # space, sequences
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row in rows if row[0] >= length and row[1] < max_per_row]
        if not fitting:
            rows.append([ROW, 0])
            fitting = rows[-1:]
        row = min(fitting, key=lambda row: (row[0] if into_fullest else -row[0], -row[1]))
        row[0] -= length
        row[1] += 1
    strategies = pack_histogram(
        count_lengths(lengths),
        row_length=ROW,
        algorithm="lpfhp" if into_fullest else "spfhp",
        max_per_row=max_per_row,
    )
    packed = [
        [ROW - sum(strategy.lengths), len(strategy.lengths)] for strategy in strategies for _ in range(strategy.rows)
    ]
    assert sorted(packed) == sorted(rows)


@given(lengths=some_lengths, key=st.integers(0, 9), chunk=st.integers(1, 60))
def test_sorting_by_length_is_a_permutation_drawn_by_its_key(lengths: np.ndarray, key: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNK", chunk)  # as in parts, so whole
        order = sort_by_length(lengths, count_lengths(lengths), key)
    assert order.itemsize == 4
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert (np.diff(lengths[order]) >= 0).all()
    assert (order == sort_by_length(lengths, count_lengths(lengths), key)).all()


def test_another_seed_is_another_packing_of_the_same_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, ROW + 1, 3000).astype(np.int32)
    one, other = (helpers.packed_rows(lengths, row_length=ROW, max_per_row=0, seed=seed) for seed in (1, 2))
    assert (one[0] != other[0]).mean() > 0.9
    rows = [sorted(tuple(lengths[row]) for row in np.split(found[0], found[1][1:-1])) for found in (one, other)]
    assert rows[0] == rows[1]


@given(lengths=some_lengths, cuts=st.lists(st.integers(0, 100), max_size=4))
def test_any_stretch_of_rows_can_be_asked_for(lengths: np.ndarray, cuts: list[int]) -> None:
    plan = plan_packing(lengths, row_length=ROW, max_per_row=0)
    indices, offsets = helpers.packed_rows(lengths, row_length=ROW, max_per_row=0)
    edges = sorted({0, len(plan), *(min(cut, len(plan)) for cut in cuts)})
    for first, stop in pairwise(edges):
        members, ends = plan.rows(first, stop)
        assert members.tolist() == indices[offsets[first] : offsets[stop]].tolist()
        assert ends.tolist() == (offsets[first : stop + 1] - offsets[first]).tolist()


@given(
    total=st.integers(1, 24),
    most=st.integers(1, 4),
    usable=st.lists(st.booleans(), min_size=25, max_size=25).map(np.array),
)
def test_fillings_are_all_there_are(total: int, most: int, usable: np.ndarray) -> None:
    from itertools import combinations_with_replacement

    lengths = [length for length in range(total, 0, -1) if usable[length]]
    expected = {
        filling
        for count in range(1, most + 1)
        for filling in combinations_with_replacement(lengths, count)
        if sum(filling) == total
    }
    found = list(exact_fillings(total, most, usable))
    assert len(found) == len(set(found))
    assert set(found) == expected


@given(data=st.data(), num_entries=st.integers(2, 12), num_columns=st.integers(1, 40))
def test_least_squares_reaches_its_optimum(data: st.DataObject, num_entries: int, num_columns: int) -> None:
    """By the conditions of Karush, Kuhn and Tucker, which hold at the optimum of a convex problem and nowhere else."""
    draw = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    columns = draw.integers(0, num_entries, (num_columns, 3))
    weights, target = draw.uniform(0.1, 1, num_entries), draw.uniform(0, 1000, num_entries)
    weights[0] = 0
    solution = solve(columns, weights, target)
    matrix = np.zeros((num_entries, num_columns))
    np.add.at(matrix, (columns, np.arange(num_columns)[:, None]), 1)
    slope = (weights[:, None] * matrix).T @ (weights * (target - matrix @ solution))
    assert (solution >= 0).all()
    assert slope.max() <= 1e-5
    assert np.abs(slope[solution > 0]).max(initial=0) <= 1e-5


@pytest.mark.parametrize(
    ("lengths", "options", "code", "named"),
    [
        ([3, 50], {}, "example-too-long", ("50 tokens", "row of 40")),
        ([0, 3], {}, "empty-sequence", ("1 sequences",)),
        ([], {}, "empty-data", ()),
        ([3], {"max_per_row": -1}, "option-out-of-range", ("--max-per-row is -1",)),
    ],
)
def test_what_cannot_be_packed(lengths: list[int], options: dict, code: str, named: tuple[str, ...]) -> None:
    with helpers.refused(code, *named):
        helpers.packed_rows(np.array(lengths, np.int32), row_length=ROW, **options)


def test_least_squares_refuses_more_than_it_can_weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five places in a row of 512 can be filled in 25 million ways; here the limit is lower, to be quick."""
    monkeypatch.setattr("bertrain.data.formats.packing.MAX_FILLINGS", 1000)
    with helpers.refused("too-many-fillings", "5 sequences", "40 tokens", "1,000", "--max-per-row 3"):
        helpers.packed_rows(np.arange(1, 41, dtype=np.int32), row_length=ROW, max_per_row=5, algorithm="nnlshp")


def test_least_squares_names_the_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with helpers.refused("missing-package", "pip install 'bertrain[pack]'"):
        helpers.packed_rows(np.array([30, 10], dtype=np.int32), row_length=ROW, algorithm="nnlshp")


def test_least_squares_is_not_for_steps() -> None:
    with pytest.raises(UserError) as refused:
        helpers.tiny_settings(batch__packing="nnlshp")
    for named in ("batch.packing", "lpfhp", "spfhp", "'nnlshp'"):
        assert named in str(refused.value)


def test_pack_takes_a_prepared_folder(tmp_path: Path) -> None:
    folder = helpers.make_data(tmp_path, documents=10)
    lengths = Shards.open(folder).lengths
    table = tmp_path / "lengths.csv"
    counted = count_lengths(lengths)
    table.write_text("length,sequences\n" + "".join(f"{length},{counted[length]}\n" for length in range(1, 65)))
    one, other = pack(folder), pack(lengths=table)
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(other, seconds=0)
    assert one.tokens == lengths.sum()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "length,sequences"),
        ("tokens,count\n1,2\n", "length,sequences"),
        ("length,sequences\n1,2\n5,many\n", "line 3: '5,many'"),
        ("length,sequences\n1\n", "line 2: '1'"),
        ("length,sequences\n\n", "line 2: ''"),
        ("length,sequences\n5,-1\n", "line 2: '5,-1'"),
        ("length,sequences\n0,4\n", "line 2: a length of 0"),
        ("length,sequences\n9999999999,4\n", "line 2: a length of 9999999999"),
        ("length,sequences\n5,1\n5,2\n", "line 3: length 5"),
        (b"length,sequences\n\xff\xfe,0\n", "UTF-8"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, text: str | bytes, named: str) -> None:
    table = tmp_path / "lengths.csv"
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    with helpers.refused("bad-length-table", table, named):
        pack(lengths=table)


def test_a_table_of_no_sequence(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("length,sequences\n5,0\n")
    with helpers.refused("empty-data", tmp_path / "lengths.csv"):
        pack(lengths=tmp_path / "lengths.csv")


def test_what_pack_needs(tmp_path: Path) -> None:
    for arguments in ({}, {"folder": tmp_path, "lengths": tmp_path / "lengths.csv"}):
        with helpers.refused("one-input-expected", "--lengths"):
            pack(**arguments)
    with helpers.refused("unreadable-file", tmp_path / "lengths.csv"):
        pack(lengths=tmp_path / "lengths.csv")
    with helpers.refused("option-without-effect", "--shards", "--out"):
        pack(tmp_path, shards=3)


@given(changes=st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=3)), min_size=1, max_size=4))
def test_a_damaged_table_is_refused_or_read(changes: list[tuple[int, bytes]]) -> None:
    content = b"length,sequences\n1,0\n2,1200\n17,5\n128,99\n512,31415926\n"
    for place, junk in changes:
        content = content[:place] + junk + content[place + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "lengths.csv"
        table.write_bytes(content)
        try:
            histogram = read_lengths(table)
        except UserError as refused:
            sentence = str(refused)
        else:
            sentence = f"{table} has {histogram.sum()} sequences"
            assert histogram.min() >= 0
        assert str(table) in sentence
