"""Telemetry: what is sampled is what the machine says, joins with the steps, and never stands in a run's way."""

from __future__ import annotations

import csv
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertrain.base import clock
from bertrain.run import telemetry
from bertrain.run.sensors import CpuShare, Gauge, Rapl, Sensors, add_nvml, sensors_for, throttle_reasons
from bertrain.run.telemetry import TelemetryWriter


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(line for line in file if line.strip()))


def notes_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "telemetry.json").read_text())[-1]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def gauges(**readers: Callable[[], float]) -> Sensors:
    sensors = Sensors()
    sensors.gauges = [Gauge(column, read) for column, read in readers.items()]
    return sensors


def test_another_start_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        TelemetryWriter(tmp_path, gauges(power_w=lambda: 100.0), 10).stop()
        with open(tmp_path / "telemetry.csv", "a") as file:
            file.write("123.5,12")  # torn by a kill
    TelemetryWriter(tmp_path, gauges(power_w=lambda: 100.0), 10).stop()
    whole = [row for row in rows_of(tmp_path / "telemetry.csv") if row["power_w"]]
    starts = json.loads((tmp_path / "telemetry.json").read_text())
    assert len(starts) == 3
    assert len(whole) == sum(start["samples"] for start in starts)
    TelemetryWriter(tmp_path, gauges(temperature_c=lambda: 50.0), 10).stop()
    assert list(rows_of(tmp_path / "telemetry.csv")[0]) == ["time", "monotonic", "temperature_c"]
    assert len(rows_of(tmp_path / "telemetry-before-1.csv")) >= len(whole)


# --- what can go wrong --------------------------------------------------------------------------------


def test_a_machine_without_nvml_says_so(tmp_path: Path) -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        sensors = sensors_for("GPU-00000000-0000-0000-0000-000000000000")
        assert sensors.missing["gpu"].startswith("NVML: ")
        assert "rss_bytes" in sensors.columns
    else:
        pytest.skip("there is a GPU here")


def test_a_gpu_that_falls_off_the_bus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 0

    def clock_of_a_lost_gpu() -> float:
        nonlocal count
        count += 1
        if count > 3:
            raise RuntimeError("GPU is lost")
        return 1980.0

    sampler = TelemetryWriter(tmp_path, gauges(sm_clock_mhz=clock_of_a_lost_gpu, rss_bytes=lambda: 1.0), 10)
    wait_for(lambda: count >= 6)
    asked = count
    sampler.stop()
    assert asked == count == 6, "after three failures in a row it is asked no more"
    rows = rows_of(tmp_path / "telemetry.csv")
    assert [row["sm_clock_mhz"] for row in rows[:4]] == ["1980", "1980", "1980", ""]
    assert all(row["rss_bytes"] == "1" for row in rows), "the other columns go on"
    assert notes_of(tmp_path)["missing"]["sm_clock_mhz"].startswith("GPU is lost, since ")
    assert "sm_clock_mhz" in capsys.readouterr().err


def test_a_sampler_that_dies(tmp_path: Path) -> None:
    def die() -> float:
        raise SystemExit("no more")

    sampler = TelemetryWriter(tmp_path, gauges(power_w=die), 10)
    sampler.stop()
    assert notes_of(tmp_path)["missing"]["sampler"] == "failed: no more"
    assert sampler.joules is None


def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "telemetry.csv").symlink_to("/dev/full")
    counter = itertools.count(1000.0, 200.0)
    sampler = TelemetryWriter(tmp_path, gauges(energy_j=lambda: next(counter)), 10)
    time.sleep(0.2)
    sampler.stop()
    notes = notes_of(tmp_path)
    assert "No space left on device" in notes["missing"]["telemetry.csv"]
    assert notes["joules"] == 200 * (notes["samples"] - 1) > 0, "the energy is measured all the same"


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    sampler = TelemetryWriter(tmp_path / "gone", gauges(power_w=lambda: 200.0), 10)
    sampler.stop()
    assert not (tmp_path / "gone").exists()


def test_a_clock_that_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's clock is not ours to set; what it would say is."""
    real = time.time
    set_back = [0.0]
    monkeypatch.setattr(clock.time, "time", lambda: real() - set_back[0])
    sampler = TelemetryWriter(tmp_path, gauges(power_w=lambda: 1.0), 10)
    wait_for(lambda: len(sampler._clock_steps) == 0 and sampler._samples > 1)
    set_back[0] = 3600.0
    wait_for(lambda: len(sampler._clock_steps) == 1)
    sampler.stop()
    (step,) = notes_of(tmp_path)["clock_steps"]
    assert step["seconds"] == pytest.approx(-3600, abs=1)
    times = [float(row["time"]) for row in rows_of(tmp_path / "telemetry.csv")]
    assert times == sorted(times)
    assert times[-1] - times[0] < 60


def test_samples_are_taken_less_often_rather_than_cost_more(tmp_path: Path) -> None:
    def costly() -> float:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.02:
            pass
        return 1.0

    sampler = TelemetryWriter(tmp_path, gauges(power_w=costly), 10)
    time.sleep(0.5)
    sampler.stop()
    assert notes_of(tmp_path)["samples"] == 2, "the first and the last: each is worth two seconds"


# --- what is read -------------------------------------------------------------------------------------


def test_nvml_is_asked_for_every_column() -> None:
    """NVML's functions as a GPU of round numbers would answer them, one of them not supported."""

    def not_supported(_: object) -> int:
        raise RuntimeError("Not Supported")

    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetName=lambda _: "H200",
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId="0000:1B:00.0"),
        nvmlDeviceGetClockInfo=lambda _, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetPowerUsage=lambda _: 412_500,
        nvmlDeviceGetEnforcedPowerLimit=lambda _: 700_000,
        nvmlDeviceGetTemperature=lambda _, kind: 61,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=99, memory=45),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=1 << 30),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x24,
        nvmlDeviceGetTotalEnergyConsumption=not_supported,
    )
    sensors = Sensors()
    add_nvml(sensors, "GPU-1", nvml)
    assert {gauge.column: gauge.read() for gauge in sensors.gauges} == {
        "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_w": 412.5, "power_limit_w": 700, "temperature_c": 61,
        "gpu_utilisation": 0.99, "memory_utilisation": 0.45, "memory_used_bytes": 1 << 30, "throttle_reasons": 0x24,
    }  # fmt: skip
    assert sensors.missing == {"energy_j": "Not Supported"}
    assert sensors.device == {"uuid": "GPU-1", "name": "H200", "driver": "580.1", "pci": "0000:1B:00.0"}
    assert throttle_reasons(0x24) == ["the power limit", "temperature (software)"]


@pytest.mark.parametrize("knows_name", [True, False], ids=["new driver", "old driver"])
def test_throttle_reasons_are_read_by_the_name_that_the_driver_knows(knows_name: bool) -> None:
    """pynvml has both names, whatever the driver."""

    def newer(_: object) -> int:
        if not knows_name:
            raise RuntimeError("Function Not Found")
        return 0x4

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlSystemGetDriverVersion=lambda: "525.1",
        nvmlDeviceGetCurrentClocksEventReasons=newer,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x8,
    )
    sensors = Sensors()
    add_nvml(sensors, "GPU-1", nvml)
    assert {gauge.column: gauge.read() for gauge in sensors.gauges} == {"throttle_reasons": 0x4 if knows_name else 0x8}


def test_rapl_runs_over(tmp_path: Path) -> None:
    packages = [tmp_path / "intel-rapl:0", tmp_path / "intel-rapl:1"]

    def set_counters(*microjoules: int) -> None:
        for package, value in zip(packages, microjoules, strict=True):
            package.mkdir(exist_ok=True)
            (package / "max_energy_range_uj").write_text("99999999\n")
            (package / "energy_uj").write_text(f"{value}\n")

    set_counters(90_000_000, 10_000_000)
    rapl = Rapl(packages)
    assert rapl.read() == 0
    set_counters(95_000_000, 11_000_000)
    assert rapl.read() == pytest.approx(6)
    set_counters(1_000_000, 12_000_000)
    assert rapl.read() == pytest.approx(6 + 6 + 1)


def test_the_busy_share_is_that_since_the_last_reading(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3 4\n")
    share = CpuShare(stat)
    assert share.read() == pytest.approx(0.2)
    stat.write_text("cpu  175 0 100 725 100 0 0 0 0 0\ncpu0 1 2 3 4\n")
    assert share.read() == pytest.approx(0.75)


def test_gauges_that_cost_much_are_read_seldom(tmp_path: Path) -> None:
    counter = iter([1000.0, 1450.0])
    energy = Gauge("energy_j", lambda: next(counter), every_s=600.0)
    sensors = Sensors(gauges=[Gauge("power_w", lambda: 1.0), energy])
    sampler = TelemetryWriter(tmp_path, sensors, 10)
    wait_for(lambda: sampler._samples > 3)
    sampler.stop()
    energies = [row["energy_j"] for row in rows_of(tmp_path / "telemetry.csv")]
    assert energies == ["1000", *[""] * (len(energies) - 2), "1450"], "at the start and at the end"
    assert sampler.joules == 450
    assert telemetry.MAX_CPU_SHARE <= 0.01
