"""Parts of reports that need no run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertrain.base import formatting
from bertrain.config.settings import Settings
from bertrain.reports import history as arithmetic
from bertrain.reports import plots
from bertrain.run.folder import Run
from bertrain.run.stream import MetricsTable
from bertrain.run.telemetry_reader import RunTelemetry

NAN = float("nan")


# --- the arithmetic ------------------------------------------------------------------------------


def test_thinning_averages_groups_and_leaves_out_what_is_not_finite() -> None:
    values = np.array([1.0, 3.0, NAN, 5.0, NAN, NAN, 9.0])
    np.testing.assert_array_equal(arithmetic.thin(values, most=4), [2.0, 5.0, NAN, 9.0])
    np.testing.assert_array_equal(arithmetic.thin(values, most=7), values)
    assert arithmetic.group_size(1000) == 1
    assert arithmetic.group_size(1001) == 2
    assert len(arithmetic.thin(np.zeros(123_457))) <= 1000


def test_smoothing_stays_centred_to_the_ends() -> None:
    values = np.array([0.0, 3.0, 6.0, NAN, 12.0, 30.0])
    np.testing.assert_array_equal(arithmetic.smooth(values, 3), [0.0, 3.0, 4.5, 9.0, 21.0, 30.0])
    np.testing.assert_array_equal(arithmetic.smooth(values[:3], 1), values[:3])
    straight = np.arange(50.0)
    np.testing.assert_allclose(arithmetic.smooth(straight, 9), straight)
    assert [arithmetic.smoothing_window(count) for count in (1, 59, 60, 1000)] == [1, 1, 3, 33]


def test_lengths_fall_into_equal_ranges() -> None:
    lengths = {1: 1, 3: 2, 4: 1, 5: 2, 10: 2}
    assert plots.bin_lengths(lengths, most=4) == ([0, 3, 6, 9, 12], [3 / 8, 3 / 8, 0.0, 2 / 8])
    assert plots.bin_lengths({2: 3}, most=4) == ([0, 1, 2], [0.0, 1.0])
    # (1 + 6 + 4 + 10 + 20) / 8 = 5.125
    assert plots.describe_lengths(lengths) == "8 examples of 5.1 tokens on average; 25.0% have 10, the most."


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (9870, "9,870"), (9999, "9,999"), (9999.7, "10 k"), (45_600, "45.6 k"), (999_999, "1 M"),
     (1_012_130, "1.01 M"), (109_482_240, "109 M"), (3.3e9, "3.3 B"), (2.5e12, "2.5 T")],
)  # fmt: skip
def test_large_numbers_are_short(value: float, text: str) -> None:
    assert formatting.compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0 s"), (9.4, "9.4 s"), (45.2, "45 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"),
     (5 * 3600 + 12 * 60 + 59, "5 h 12 min"), (2 * 86400 + 3 * 3600, "2 d 3 h")],
)  # fmt: skip
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_colours_stand_out_from_the_page_by_day_and_night() -> None:
    """By the formula of WCAG 2: 4.5 for text, 3 for lines and areas."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    style = (Path(plots.__file__).parent / "colors.css").read_text()
    day, night = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in style.split("@media screen")[:2])
    assert day.keys() == night.keys()
    used = {value.removeprefix("var(--").removesuffix(")") for value in plots.VARIABLES.values()}
    assert used <= day.keys(), "every color of a plot is on the page"
    for palette in (day, night):
        for name, colour in palette.items():
            if name in ("ink", "muted", "warning", "run-0"):
                assert contrast(colour, palette["surface"]) >= 4.5, name
            elif name.startswith(("run", "phase")):
                assert contrast(colour, palette["surface"]) >= 3, name
        assert contrast(palette["ink"], palette["highlight"]) >= 4.5


def test_runs_of_one_name_go_by_their_paths(tmp_path: Path) -> None:
    assert arithmetic.display_names([tmp_path / "a" / "run", tmp_path / "b"]) == ["run", "b"]
    twins = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert arithmetic.display_names(twins) == [str(twin) for twin in twins]


def test_any_number_of_ranks_may_have_no_log() -> None:
    table = MetricsTable({"step": np.array([1.0])})
    missing = arithmetic._missing(table, RunTelemetry([]), [0, 2], [{"ranks": 2**53}])
    assert list(missing) == ["there is no log of rank 1, 3, 4, 5, 6, 7, 8, 9, …"]


def test_a_checkpoint_that_goes_away_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trains removes old checkpoints while a report reads its folder."""
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors").write_bytes(bytes(step))
    is_dir = Path.is_dir

    def remove_first(path: Path, **options: Any) -> bool:
        found = is_dir(path, **options)
        if path.name == "step-00000001":
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(Path, "is_dir", remove_first)
    entries = arithmetic.list_checkpoints(Run(tmp_path, Settings(), tmp_path, "", "", True, "", ""))
    assert [(entry.step, entry.bytes) for entry in entries] == [(2, 2)]
