"""Telemetry: least, mean, most and curves as worked out plainly, whatever the clock does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bertrain.run import stream, telemetry_reader
from bertrain.run.telemetry_reader import NUM_BINS, RunTelemetry, newest_samples, read_telemetry

HEADER = "time,power_w,gpu_utilisation,throttle_reasons,energy_j"


def write(folder: Path, rows: list[str], header: str = HEADER) -> Path:
    (folder / "telemetry.csv").write_text("\n".join([header, *rows]) + "\n")
    return folder


def test_each_device_by_hand(tmp_path: Path) -> None:
    (tmp_path / "telemetry-1.csv").write_text(f"{HEADER}\n10,50,,0,5\n")
    rows = ["10,100,0.5,,1000", "11,300,1.0,4,1200", "12,,0.9,4,1350"]
    first, second = read_telemetry(write(tmp_path, rows)).devices
    assert (first.name, first.num_samples, first.seconds, first.energy_j) == ("rank 0", 3, 2.0, 350.0)
    power = first.tracks["power_w"]
    assert (power.minimum, power.mean, power.maximum) == (100.0, 200.0, 300.0)
    assert first.reasons == {"the power limit": 2}
    assert (second.name, second.energy_j, second.reasons) == ("rank 1", 0.0, {})
    assert "gpu_utilisation" not in second.tracks
    np.testing.assert_array_equal(power.curve[:3], [100.0, 300.0, math.nan])


@pytest.mark.parametrize("block", [500, 8 << 20])
def test_a_long_curve_is_halved_until_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(stream, "BLOCK", block)
    seconds, power = np.arange(0, 3000, 2.5), np.random.default_rng(1).uniform(100, 700, 1200).round(3)
    rows = [f"{1.7e9 + t},{p},1,,{2.5 * i}" for i, (t, p) in enumerate(zip(seconds, power, strict=True))]
    device = read_telemetry(write(tmp_path, rows)).devices[0]
    assert device.bin_s == 8.0
    assert len(device.minutes) == 375 <= NUM_BINS
    expected = [power[(seconds >= 8 * i) & (seconds < 8 * i + 8)].mean() for i in range(375)]
    np.testing.assert_allclose(device.tracks["power_w"].curve[:375], expected)
    assert device.tracks["power_w"].mean == pytest.approx(power.mean())
    assert device.energy_j == pytest.approx(2.5 * 1199)


def test_a_clock_set_back_and_a_counter_begun_anew_add_nothing(tmp_path: Path) -> None:
    rows = ["100,1,1,,50", "101,1,1,,60", "41,1,1,,5", "43,1,1,,9"]
    device = read_telemetry(write(tmp_path, rows)).devices[0]
    assert (device.seconds, device.num_set_back, device.energy_j) == (3.0, 1, 14.0)
    assert device.longest_gap_s == 2.0


def test_what_others_spent_between_two_starts_is_not_the_runs(tmp_path: Path) -> None:
    """NVML counts since the driver was loaded, and another GPU stands elsewhere."""
    header = "time,monotonic,energy_j"
    rows = ["100,1,5000", "101,2,", "102,3,6000", "", "400,301,9000000", "402,303,9001000"]
    write(tmp_path, rows, header=header)
    device = {"uuid": "GPU-1"}
    starts = [{"started": started, "device": device, "missing": {}} for started in (100.2, 399.9)]
    assert read_telemetry(tmp_path).joules == 8_996_000, "as far as one can know without the starts"
    (tmp_path / "telemetry.json").write_text(json.dumps(starts))
    assert read_telemetry(tmp_path).joules == 2000.0
    (tmp_path / "telemetry-1.csv").write_text((tmp_path / "telemetry.csv").read_text())
    (tmp_path / "telemetry-1.json").write_text(json.dumps(starts))
    assert read_telemetry(tmp_path).joules == 2000.0, "two ranks that share it"


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    write(tmp_path, ["10,100,1,,1", "11,broken,1,,2", "12,0", "12,inf,1,,2", "1e300,200,1,,2", "13,300,1,,3"])
    with open(tmp_path / "telemetry.csv", "a") as file:
        file.write("14,9")  # being written
    telemetry = read_telemetry(tmp_path)
    assert telemetry.num_unreadable == 4
    assert telemetry.devices[0].tracks["power_w"].mean == 200.0
    (tmp_path / "telemetry.csv").write_text("no,such,columns\n1,2,3\n")
    assert read_telemetry(tmp_path) == RunTelemetry([], 1)


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    """As the sampler writes them: a processor's counter is read by both ranks on it, and begun anew with a start."""
    write(
        tmp_path,
        ["10,1,2.5,100,", "11,2,,,", "", "20,1,3.5,150,4"],
        header="time,monotonic,core0_mhz,energy_j,cpu_utilisation",
    )
    (tmp_path / "telemetry-before-1.csv").write_text("time,monotonic,core0_mhz\n1,1,0.5\n")
    (tmp_path / "telemetry-1.csv").write_text("time,monotonic,energy_j\n10,1,100\n20,1,150\n")
    (tmp_path / "telemetry-notes.csv").write_text("not ours\n")
    notes = {"host": "here", "device": {}, "missing": {"energy_j": "no permission"}}
    (tmp_path / "telemetry.json").write_text(json.dumps([{"missing": {"old": "x"}}, notes]))
    (tmp_path / "telemetry-1.json").write_text(json.dumps([notes | {"missing": {}}]))
    telemetry = read_telemetry(tmp_path)
    first, second = telemetry.devices
    assert (first.name, second.name) == ("rank 0", "rank 1")
    assert (first.num_samples, first.seconds) == (4, 19.0)
    assert first.tracks["core0_mhz"].mean == pytest.approx(6.5 / 3)
    assert set(first.tracks) == {"core0_mhz", "cpu_utilisation"}
    assert (first.energy_j, second.energy_j, telemetry.joules) == (50.0, 50.0, 50.0)
    assert telemetry.missing == ["telemetry of rank 0 has no energy_j: no permission"]
    cores = {f"core{number}_mhz": "no such file" for number in range(64)}
    (tmp_path / "telemetry-1.json").write_text(json.dumps([notes | {"missing": cores}]))
    (tmp_path / "telemetry.json").write_text(json.dumps([notes | {"missing": cores}]))
    assert read_telemetry(tmp_path).missing == [
        "telemetry of rank 0, 1 has no core0_mhz, core1_mhz, core2_mhz, core3_mhz, …: no such file"
    ]
    (tmp_path / "telemetry-1.json").write_text(json.dumps([notes | {"device": {"uuid": "GPU-1"}}]))
    assert read_telemetry(tmp_path).joules == 100.0
    assert newest_samples(tmp_path)["rank 0"] == {"core0_mhz": 3.5, "energy_j": 150.0, "cpu_utilisation": 4.0}


def test_throttle_reasons_are_said_in_words(tmp_path: Path) -> None:
    """NVML's mask: nothing, idle, the power limit twice, the same with a temperature; a cell that was not read."""
    masks = ["0", "1", "4", "4", "36", ""]
    rows = [f"{number},{mask}" for number, mask in enumerate(masks)]
    device = read_telemetry(write(tmp_path, rows, header="time,throttle_reasons")).devices[0]
    assert device.reasons == {"the power limit": 3, "temperature (software)": 1}


def test_the_newest_sample_is_found_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{number},{number},1,,{number}" for number in range(1000)]
    write(tmp_path, rows)
    for tail in (100, 1 << 20):
        monkeypatch.setattr(telemetry_reader, "TAIL_BYTES", tail)
        assert newest_samples(tmp_path)["rank 0"] == {"power_w": 999.0, "gpu_utilisation": 1.0, "energy_j": 999.0}
    assert newest_samples(tmp_path / "nowhere") == {}
