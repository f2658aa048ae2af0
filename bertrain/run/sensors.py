"""The sensors of a GPU (NVML) and of a CPU (/proc and /sys): one gauge for each column of telemetry.csv.

Every gauge is tried once. Those that fail on this machine are left out, and the reason is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")
PAGE = os.sysconf("SC_PAGE_SIZE")
COUNTER_EVERY_S = 1.0
"""Reading NVML's energy counter takes 3 ms of a core (H200), thirty times as long as any other gauge."""


@dataclass(frozen=True)
class Gauge:
    """One column: how to read it, and the least time between two readings."""

    column: str
    read: Callable[[], float]
    every_s: float = 0.0


@dataclass
class Sensors:
    """The gauges that work, their device, and the reason why others do not."""

    gauges: list[Gauge] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)

    def try_out(self, *gauges: Gauge) -> None:
        for gauge in gauges:
            try:
                gauge.read()
            except Exception as error:  # any error of a driver: the run continues without this column
                self.missing[gauge.column] = describe(error)
            else:
                self.gauges.append(gauge)

    @property
    def columns(self) -> list[str]:
        return [gauge.column for gauge in self.gauges]


def describe(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def sensors_for(device_uuid: str | None) -> Sensors:
    """The sensors of the GPU with this UUID, or of the CPU, and of this process."""
    sensors = Sensors()
    if device_uuid is None:
        for core in sorted(os.sched_getaffinity(0)):  # those that this process may use
            sensors.try_out(core_clock(core))
        _add_rapl(sensors)
    else:
        try:
            import pynvml
        except ImportError:
            sensors.missing["gpu"] = "the package nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        else:
            add_nvml(sensors, device_uuid, pynvml)
    memory_pages = reader_of("/proc/self/statm")
    sensors.try_out(
        Gauge("rss_bytes", lambda: int(memory_pages().split()[1]) * PAGE),
        Gauge("cpu_utilisation", CpuShare().read),
    )
    return sensors


def uuid_of(number: int) -> str:
    """The UUID of a GPU by its index in torch, as NVML and nvidia-smi write it."""
    import torch

    text = str(torch.cuda.get_device_properties(number).uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


# --- GPU ----------------------------------------------------------------------------------------------


def add_nvml(sensors: Sensors, uuid: str, nvml: Any) -> None:
    """Add the gauges of one GPU; `nvml` is the module pynvml."""
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception as error:
        sensors.missing["gpu"] = f"NVML: {describe(error)}"
        return
    sensors.device |= {"uuid": uuid}
    for name, ask in {
        "name": lambda: nvml.nvmlDeviceGetName(handle),
        "driver": nvml.nvmlSystemGetDriverVersion,
        "pci": lambda: nvml.nvmlDeviceGetPciInfo(handle).busId,
    }.items():
        try:
            sensors.device[name] = ask()
        except Exception as error:
            sensors.missing[name] = describe(error)
    sensors.try_out(
        Gauge("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        Gauge("memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        Gauge("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        Gauge("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
        Gauge("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        Gauge("gpu_utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        Gauge("memory_utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory / 100),
        Gauge("memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        Gauge("throttle_reasons", _throttle_reader(nvml, handle)),
        Gauge("energy_j", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, COUNTER_EVERY_S),
    )


def _throttle_reader(nvml: Any, handle: Any) -> Callable[[], float]:
    """Reads the throttle reasons. A driver or a package before 535 knows them by another name only."""
    try:
        nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except Exception:
        return lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)


# NVML's bits for a throttled clock; idle (0x1) and a clock set by an application (0x2) do not count.
THROTTLE_REASONS = {
    0x4: "the power limit",
    0x8: "hardware slowdown",
    0x10: "a boost group",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "the power brake",
    0x100: "a display's clock",
}


def throttle_reasons(mask: int) -> list[str]:
    return [reason for bit, reason in THROTTLE_REASONS.items() if mask & bit]


# --- CPU ----------------------------------------------------------------------------------------------


def core_clock(core: int) -> Gauge:
    kilohertz = reader_of(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq")
    return Gauge(f"core{core}_mhz", lambda: int(kilohertz()) / 1e3)


def _add_rapl(sensors: Sensors) -> None:
    """The energy of all processor packages together, if the kernel permits reading it."""
    packages = sorted(RAPL.glob("intel-rapl:?")) + sorted(RAPL.glob("intel-rapl:??"))
    if not packages:
        sensors.missing["energy_j"] = f"this machine has no RAPL ({RAPL})"
        return
    sensors.try_out(Gauge("energy_j", Rapl(packages).read))  # since 2020 most kernels let only root read it
    if "energy_j" in sensors.missing:
        sensors.missing["energy_j"] = f"RAPL: {sensors.missing['energy_j']}"


def reader_of(path: str | Path) -> Callable[[], bytes]:
    """Reads a small file of the kernel, which stays open since opening it costs more than reading it."""
    opened = cache(FileIO)
    return lambda: os.pread(opened(path).fileno(), 8192, 0)


class Rapl:
    """Joules since the first reading; the counters wrap around after some minutes, which is corrected."""

    def __init__(self, packages: list[Path]) -> None:
        self._counters = [reader_of(package / "energy_uj") for package in packages]
        self._limits = [reader_of(package / "max_energy_range_uj") for package in packages]
        self._before: list[int] | None = None
        self._joules = 0.0

    def read(self) -> float:
        counters = [int(counter()) for counter in self._counters]
        for before, after, limit in zip(self._before or counters, counters, self._limits, strict=True):
            self._joules += ((after - before) % (int(limit()) + 1)) / 1e6
        self._before = counters
        return self._joules


class CpuShare:
    """Share of all cores' time that was busy since the last reading, over all processes."""

    def __init__(self, path: str | Path = "/proc/stat") -> None:
        self._read_file, self._before = reader_of(path), (0, 0)

    def read(self) -> float:
        first_line = self._read_file().partition(b"\n")[0]
        ticks = [int(word) for word in first_line.split()[1:9]]  # guest time is included in the others
        idle, total = ticks[3] + ticks[4], sum(ticks)
        (idle_before, before), self._before = self._before, (idle, total)
        return 1 - (idle - idle_before) / max(1, total - before)
