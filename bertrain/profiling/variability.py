"""How much devices, nodes and repeats differ, by profile sets (`bertrain profile`) or by runs with telemetry.

The method is that of the study of GPU variability: a device's time is the median of its steps, or of their forward and
backward passes if it was one of several ranks, whose steps all take as long as those of the slowest. The medians of all
devices make a box plot, whose whiskers reach to the last value within 1.5 interquartile ranges of the quartiles. The
spread is the distance of the whiskers over the median. A device beyond them, or at 1.5 times the median, is an outlier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bertrain.profiling.sets import Floats, ProfileSet
from bertrain.run.sensors import throttle_reasons

WHISKER = 1.5  # interquartile ranges
SLOW = 1.5  # times the median
MIN_COVERAGE = 0.99  # of the time of the steps, that energy samples must span
MIN_PAIRS = 3  # for a correlation
QUANTITIES = {"clock_mhz": "clock", "power_w": "power", "temperature_c": "temperature"}
"""The columns that durations are correlated with."""


@dataclass(frozen=True)
class Box:
    """A box plot in numbers."""

    median: float
    lower_quartile: float
    upper_quartile: float
    lower_whisker: float
    upper_whisker: float

    @property
    def spread(self) -> float:
        """The distance of the whiskers over the median."""
        return (self.upper_whisker - self.lower_whisker) / self.median if self.median else 0.0

    def is_outlier(self, value: float) -> bool:
        """Whether a value is beyond the whiskers, or `SLOW` times the median."""
        return not self.lower_whisker <= value <= self.upper_whisker or value >= SLOW * self.median


def box_of(values: Iterable[float]) -> Box:
    """Interpolated quartiles, and the last values within `WHISKER` interquartile ranges of them."""
    array = np.fromiter(values, dtype=np.float64)
    low, middle, high = np.percentile(array, (25, 50, 75))
    reach = WHISKER * (high - low)
    inside = array[(array >= low - reach) & (array <= high + reach)]
    return Box(float(middle), float(low), float(high), float(inside.min()), float(inside.max()))


def correlation(one: Floats, other: Floats) -> float | None:
    """Pearson's correlation over the finite pairs; None if there are too few, or if one side is constant."""
    both = np.isfinite(one) & np.isfinite(other)
    one, other = one[both], other[both]
    is_constant = len(one) < MIN_PAIRS or any(side.std() <= 1e-12 * abs(side.mean()) for side in (one, other))
    return None if is_constant else float(np.corrcoef(one, other)[0, 1])


def during(found: ProfileSet, column: str) -> Floats:
    """A telemetry column at the middle of each step, interpolated between samples; NaN outside them."""
    values = found.telemetry.get(column, np.array([]))
    known = np.isfinite(values)
    if not known.any():
        return np.full(len(found.seconds), np.nan)
    times = found.telemetry["time"]
    return np.interp(found.started + found.seconds / 2, times[known], values[known], left=np.nan, right=np.nan)


def joules(found: ProfileSet) -> float | None:
    """Energy from the start of the first step to the end of the last; None if it was not sampled throughout."""
    span = np.array([found.started[0], found.ended])
    times = found.telemetry.get("time", np.array([]))
    counter = found.telemetry.get("energy_j", np.array([]))
    known = np.isfinite(counter)
    if not covers(times[known], span):
        return None
    # The counter restarts at 0 when a run is resumed elsewhere.
    risen = np.maximum(np.diff(counter[known], prepend=counter[known][0]), 0.0)
    first, last = np.interp(span, times[known], np.cumsum(risen))
    return float(last - first)


def covers(times: Floats, span: Floats) -> bool:
    """Whether samples span at least MIN_COVERAGE of a time span: a sampler may die halfway."""
    if len(times) < 2:
        return False
    covered = min(times[-1], span[1]) - max(times[0], span[0])
    return bool(covered >= MIN_COVERAGE * (span[1] - span[0]))


@dataclass(frozen=True)
class SetSummary:
    """The metrics of one set."""

    host: str
    device: str
    uuid: str
    repeat: int
    steps: int
    median_s: float
    lower_quartile_s: float
    upper_quartile_s: float
    spread: float
    outliers: int
    tokens_per_s: float  # over all ranks
    joules_per_million_tokens: float | None
    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttled_by: str
    with_clock: float | None  # correlation of a step's duration with the clock; likewise with power and temperature
    with_power: float | None
    with_temperature: float | None
    folder: str


def summarize(found: ProfileSet) -> SetSummary:
    """Medians over the timed steps, and the correlations of their durations."""
    box, energy = box_of(found.seconds), joules(found)
    samples = {column: during(found, column) for column in QUANTITIES}
    return SetSummary(
        host=found.host,
        device=found.device,
        uuid=found.uuid,
        repeat=found.repeat,
        steps=len(found.seconds),
        median_s=box.median,
        lower_quartile_s=box.lower_quartile,
        upper_quartile_s=box.upper_quartile,
        spread=box.spread,
        outliers=sum(map(box.is_outlier, found.seconds.tolist())),
        tokens_per_s=float(found.tokens.sum() / found.seconds.sum()),
        joules_per_million_tokens=None if energy is None else 1e6 * energy / found.energy_tokens,
        **{column: median(values) for column, values in samples.items()},
        throttled_by=throttled_by(found),
        **{f"with_{name}": correlation(found.seconds, samples[column]) for column, name in QUANTITIES.items()},
        folder=str(found.folder),
    )


def throttled_by(found: ProfileSet) -> str:
    """Why the clock was throttled, and in which share of the samples; empty: never, or unknown."""
    masks = found.telemetry.get("throttle_reasons")
    if masks is None:
        return ""
    times = found.telemetry["time"]
    masks = masks[np.isfinite(masks) & (times >= found.started[0]) & (times <= found.ended)].astype(np.int64)
    counts = Counter(reason for mask in masks.tolist() for reason in throttle_reasons(mask))
    return ", ".join(f"{reason} {count / len(masks):.0%}" for reason, count in counts.items())


@dataclass(frozen=True)
class DeviceSummary:
    """All repeats of one device."""

    host: str
    device: str
    uuid: str
    repeats: int
    median_s: float
    over_median: float  # the device's median over that of all devices
    between_repeats: float  # the difference of the slowest and the fastest repeat, over the median
    is_outlier: bool

    @property
    def name(self) -> str:
        return f"{self.uuid or self.device} on host {self.host}"


@dataclass(frozen=True)
class Variability:
    """The comparison of several sets."""

    sets: list[SetSummary]
    devices: list[DeviceSummary]  # the slowest first
    hosts: dict[str, float]  # the median of a host's devices over that of all devices; the slowest first
    median_s: float
    spread: float
    correlations: dict[str, float | None]
    """Of the sets' median durations with their median clock, power and temperature."""
    joules_per_million_tokens: float | None
    slow_repeats: list[str]
    """Repeats of `SLOW` times their device's median, a sentence each; the device's median may hide them."""
    verdict: str


def compare(sets: Sequence[ProfileSet]) -> Variability:
    summaries = [summarize(found) for found in sets]
    by_device: dict[str, list[SetSummary]] = defaultdict(list)
    seconds: dict[str, list[Floats]] = defaultdict(list)
    for found, summary in zip(sets, summaries, strict=True):
        by_device[found.identity].append(summary)
        seconds[found.identity].append(found.compared)
    medians = {identity: float(np.median(np.concatenate(parts))) for identity, parts in seconds.items()}
    box = box_of(medians.values())
    devices, slow_repeats = [], []
    for identity, repeats in by_device.items():
        first, median_s = repeats[0], medians[identity]
        of_repeats = [float(np.median(part)) for part in seconds[identity]]
        slow_repeats += [
            f"repeat {one.repeat} of {one.uuid or one.device} on host {one.host} takes "
            f"{own_s / median_s:.3f} times the median of that device"
            for one, own_s in zip(repeats, of_repeats, strict=True)
            if own_s >= SLOW * median_s
        ]
        devices.append(
            DeviceSummary(
                host=first.host,
                device=first.device,
                uuid=first.uuid,
                repeats=len(repeats),
                median_s=median_s,
                over_median=median_s / box.median,
                between_repeats=(max(of_repeats) - min(of_repeats)) / median_s,
                is_outlier=len(medians) > 1 and box.is_outlier(median_s),
            )
        )
    devices.sort(key=lambda device: -device.median_s)
    by_host: dict[str, list[float]] = defaultdict(list)
    for device in devices:
        by_host[device.host].append(device.over_median)
    hosts = {host: float(np.median(ratios)) for host, ratios in by_host.items()}

    def column(name: str) -> Floats:
        return np.array([getattr(summary, name) for summary in summaries], dtype=np.float64)  # NaN for None

    return Variability(
        sets=summaries,
        devices=devices,
        hosts=dict(sorted(hosts.items(), key=lambda item: -item[1])),
        median_s=float(np.median([np.median([one.median_s for one in several]) for several in by_device.values()])),
        spread=box.spread,
        correlations={name: correlation(column("median_s"), column(key)) for key, name in QUANTITIES.items()},
        joules_per_million_tokens=median(column("joules_per_million_tokens")),
        slow_repeats=slow_repeats,
        verdict="; ".join([verdict(devices), *slow_repeats]),
    )


def median(values: Floats) -> float | None:
    """Median of the finite values; None if there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def verdict(devices: Sequence[DeviceSummary]) -> str:
    """Which devices are slow, in a sentence; `devices` has the slowest first."""
    slowest = devices[0]
    if len(devices) == 1:
        repeats = f"; {slowest.between_repeats:.1%} between its repeats" if slowest.repeats > 1 else ""
        return f"one device, nothing to compare it with{repeats}"
    named = [f"{one.name} takes {one.over_median:.3f} times the median" for one in devices if one.is_outlier]
    among = f"no outlier among {len(devices)} devices; the slowest is {slowest.name}"
    return f"outliers: {'; '.join(named)}" if named else f"{among}, {slowest.over_median:.3f} times the median"
