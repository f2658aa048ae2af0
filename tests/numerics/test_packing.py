"""Wikipedia's lengths, packed as well as published."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from bertrain.data.formats.packing import (
    Algorithm,
    efficiency,
    pack_histogram,
)


@pytest.mark.parametrize(
    ("algorithm", "max_per_row", "least"),
    [("lpfhp", 12, 0.998), ("lpfhp", 0, 0.999), ("spfhp", 12, 0.9955), ("nnlshp", 3, 0.997)],
)
def test_wikipedia_is_packed_as_well_as_published(algorithm: Algorithm, max_per_row: int, least: float) -> None:
    histogram = np.zeros(513, dtype=np.int64)
    with open(Path(__file__).parents[2] / "benchmarks" / "wikipedia-512.csv") as file:
        for entry in csv.DictReader(file):
            histogram[int(entry["length"])] = int(entry["sequences"])
    strategies = pack_histogram(histogram, row_length=512, algorithm=algorithm, max_per_row=max_per_row)
    found = np.zeros_like(histogram)
    for strategy in strategies:
        np.add.at(found, list(strategy.lengths), strategy.rows)
    assert (found == histogram).all()
    assert efficiency(strategies, 512) >= least
    assert efficiency(strategies, 512) == pytest.approx(
        (histogram * np.arange(513)).sum() / (512 * sum(strategy.rows for strategy in strategies))
    )
    assert max(len(strategy.lengths) for strategy in strategies) <= (max_per_row or 512)
