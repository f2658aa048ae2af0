"""`bertrain data pack` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest

from bertrain.data.formats.pack import pack
from bertrain.data.formats.packing import (
    Algorithm,
)
from bertrain.data.formats.shards import Shards
from tests import helpers
from tests.miniature_tasks import command_line
from tests.quick.test_packing import ALGORITHMS


def test_pack_tells_what_packing_comes_to(tmp_path: Path) -> None:
    """By hand: 7 + 3, 5 + 5 and 2 + 2 + 1 in rows of 10 are 25 tokens in three rows."""
    table = tmp_path / "lengths.csv"
    table.write_text("length,sequences\n1,1\n2,2\n3,1\n5,2\n7,1\n")
    printed = command_line("data", "pack", "--lengths", table, "--row-length", 10, "--json")
    stats = json.loads(printed.out)
    assert stats["efficiency"] == pytest.approx(25 / 30)
    assert (stats["rows"], stats["sequences"], stats["tokens"], stats["most_per_row"]) == (3, 7, 25, 3)
    assert stats["strategies"] == 3
    assert pack(lengths=table).row_length == 7


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packs_are_written_as_they_were_counted(tmp_path: Path, algorithm: Algorithm) -> None:
    folder = helpers.make_data(tmp_path)
    made = {}
    for seed in (1, 2):
        out = tmp_path / f"packed-{seed}"
        told = command_line(
            "data", "pack", folder, "--algorithm", algorithm, "--seed", seed, "--shards", 2, "--out", out, "--json"
        )
        stats = json.loads(told.out)
        rows = []
        for path in sorted(out.glob("part_*")):
            with h5py.File(path) as file:
                rows += [tuple(row.tolist()) for row in file["packed_input_len"]]
        assert len(rows) == stats["rows"] == stats["written"]["records"]
        assert max(map(len, rows)) == stats["most_per_row"]
        assert max(map(sum, rows)) <= stats["row_length"]
        assert sum(map(sum, rows)) / (len(rows) * stats["row_length"]) == pytest.approx(stats["efficiency"])
        made[seed] = rows
    lengths = sorted(Shards.open(folder).lengths.tolist())
    assert sorted(length for row in made[1] for length in row) == lengths
    assert made[1] != made[2]
    assert sorted(made[1]) == sorted(made[2]), "another seed is another order"
