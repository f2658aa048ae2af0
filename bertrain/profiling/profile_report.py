"""`bertrain profile report` and `bertrain profile roofline`: the results of profiles as a page, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from markupsafe import Markup

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.base.formatting import compact, counted
from bertrain.base.schema import Finite, check_value
from bertrain.profiling.roofline import Row
from bertrain.profiling.sets import ProfileSet, find_sets
from bertrain.profiling.variability import DeviceSummary, SetSummary, Variability, box_of, compare
from bertrain.reports.compare import UNKNOWN
from bertrain.reports.history import group_size, thin
from bertrain.reports.page import NUM_COLORS, Plot, page_path, parts, render_page, write_page
from bertrain.reports.plots import MAX_MARKS, RUN_COLORS, SURFACE, blank_axes, few_marks, to_svg

MAX_KERNELS = 15
TIME_LINES = {
    "sm_clock_mhz": ("SM clock", "MHz"),
    "clock_mhz": ("Core clock", "MHz, mean of the cores"),
    "power_w": ("Power", "W"),
    "temperature_c": ("Temperature", "degrees Celsius"),
    "gpu_utilisation": ("GPU utilization", "share of time in which any kernel ran"),
    "rss_bytes": ("Process memory", "bytes"),
}

KIND = "profile report"  # stands in the title of its page

T = TypeVar("T")


def profile_report(folders: Sequence[str | Path], *, out: str | Path | None = None) -> tuple[Path, Variability]:
    """Write the variability of the profile sets in `folders`: a page, and the same as CSV and JSON beside it.

    `folders` are those of `bertrain profile`, or runs with telemetry. The page goes to `out`, or to
    profile-report.html in the first folder. Raises UserError for a folder without a set, or a path that cannot be
    written.
    """
    sets = find_sets(folders)
    found = compare(sets)
    path = page_path(out, Path(folders[0]) / "profile-report.html")
    if path.suffix in (".json", ".csv"):
        raise UserError("out-not-html", f"--out names an HTML page, not {path}; JSON and CSV are written beside it")
    written_before = path.is_file() and f"bertrain {KIND}</title>" in path.read_text(encoding="utf-8", errors="replace")
    others = [one for one in (path, path.with_suffix(".json"), path.with_suffix(".csv")) if one.exists()]
    if others and not written_before:
        raise UserError(
            "file-exists", f"{others[0]} exists and was not written by `profile report`; choose another --out"
        )
    write_page(path, page(sets, found))
    write_page(path.with_suffix(".json"), json.dumps(asdict(found), indent=1) + "\n")
    written = io.StringIO()
    writer = csv.DictWriter(written, [item.name for item in fields(SetSummary)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, found.sets))
    write_page(path.with_suffix(".csv"), written.getvalue())
    return path, found


def describe_ceilings(facts: dict[str, Any]) -> str:
    """The device of a set, and how fast it multiplies and copies."""
    found = facts["ceilings"]
    products = f"{found['operations_per_s'] / 1e12:,.4g} TFLOP/s in a product of {found['product']}"
    return f"{facts['device']['name']}: {products}, {found['bytes_per_s'] / 1e9:,.4g} GB/s in a copy"


def read_roofline(folder: str | Path) -> tuple[list[Row], dict[str, Any]]:
    """The roofline of a set, or of the first set under a folder, and the facts of that set."""
    (found, *_) = find_sets([folder])
    path = found.folder / "roofline.csv"
    if not path.is_file():
        raise UserError("missing-file", f"there is no roofline.csv in {found.folder}; `bertrain profile run` writes it")
    if "ceilings" not in found.facts:
        raise UserError("damaged-file", f"{found.folder / 'device.json'} is damaged: it has no ceilings; profile again")
    return [Row(*values) for values in _read_rows(path, [item.name for item in fields(Row)])], found.facts


def _read_rows(path: Path, columns: Sequence[str]) -> list[list[Any]]:
    """These columns of a CSV file; those of text as they are. Raises UserError if it is damaged."""
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            return [[_value(name, row[name]) for name in columns] for row in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError, csv.Error):
        raise UserError("damaged-file", f"{path} is damaged; profile again, or remove the file") from None


def _value(column: str, cell: str) -> Any:
    if column == "share_of_floor" and not cell:
        return None
    return cell if column in ("name", "part", "bound_by") else check_value(float(cell), Finite)


# --- the page -----------------------------------------------------------------------------------------


def page(sets: Sequence[ProfileSet], found: Variability) -> str:
    names = [parts.run_name(index, str(one.folder)) for index, one in enumerate(sets)]
    legend = parts.legend(names, is_sticky=len(sets) <= NUM_COLORS)  # a longer one would cover the page
    plots = [plot_durations(sets), plot_steps(sets), *(plot_telemetry(sets, column) for column in TIME_LINES)]
    sections = {
        "Variability": [*_facts(found), *_devices(found)],
        "Sets": [legend, _sets(found)],
        "Curves": [parts.plots(plots)],
        "Roofline": _rooflines(sets),
        "Kernels": [_kernels(sets)],
        "What is missing": [_missing(sets)],
    }
    heading = found.devices[0].device if len(found.devices) == 1 else f"{len(found.devices)} devices"
    source = f"a profile of {counted(len(sets), 'set')}"
    return render_page(heading, heading, sections, kind=KIND, source=source)


def _facts(found: Variability) -> list[Markup]:
    """The metrics at the head, and the verdict."""
    energy = found.joules_per_million_tokens
    several = len(found.devices) > 1
    entries = [
        ("Step", f"{1e3 * found.median_s:,.2f} ms", "median of the devices' medians" if several else "median"),
        ("Devices", f"{len(found.devices)}", counted(len(found.sets), "set")),
        ("Energy", "unknown" if energy is None else f"{energy:,.0f} J", "for a million tokens"),
    ]
    if several:
        entries.insert(1, ("Spread", f"{found.spread:.1%}", "of the devices, between the whiskers, over the median"))
    entries += [
        (f"Duration with {name}", _format(value, "+.2f"), "correlation across sets")
        for name, value in found.correlations.items()
        if value is not None
    ]
    verdict = f"{found.verdict[:1].upper()}{found.verdict[1:]}."
    is_uneven = found.slow_repeats or any(device.is_outlier for device in found.devices)
    return [parts.facts(entries), parts.sentences([verdict], "warning" if is_uneven else "notes")]


def _devices(found: Variability) -> list[Markup]:
    columns: dict[str, Callable[[DeviceSummary], str]] = {
        "device": lambda one: one.uuid or one.device,
        "which": lambda one: one.device,
        "host": lambda one: one.host,
        "repeats": lambda one: f"{one.repeats}",
        "median, ms": lambda one: f"{1e3 * one.median_s:,.3f}",
        "over the median": lambda one: f"{one.over_median:.3f}",
        "between repeats": lambda one: f"{one.between_repeats:.1%}" if one.repeats > 1 else UNKNOWN,
        "": lambda one: "outlier" if one.is_outlier else "",
    }
    hosts = [[host, f"{ratio:.3f}"] for host, ratio in found.hosts.items()]
    return [
        _table("Devices, the slowest first", columns, found.devices),
        parts.table("Hosts: the median of their devices", ["host", "over the median"], hosts if len(hosts) > 1 else []),
    ]


def _sets(found: Variability) -> Markup:
    columns: dict[str, Callable[[SetSummary], str]] = {
        "set": lambda one: f"{found.sets.index(one) + 1}",
        "device": lambda one: one.uuid or one.device,
        "repeat": lambda one: f"{one.repeat}",
        "median, ms": lambda one: f"{1e3 * one.median_s:,.3f}",
        "spread": lambda one: f"{one.spread:.1%}",
        "outliers": lambda one: f"{one.outliers} of {one.steps}",
        "tokens/s": lambda one: f"{one.tokens_per_s:,.0f}",
        "J/M tokens": lambda one: _format(one.joules_per_million_tokens, ",.0f"),
        "clock, MHz": lambda one: _format(one.clock_mhz, ",.0f"),
        "power, W": lambda one: _format(one.power_w, ",.0f"),
        "temperature": lambda one: _format(one.temperature_c, ",.0f"),
        "held back by": lambda one: one.throttled_by or UNKNOWN,
        "with clock": lambda one: _format(one.with_clock, "+.2f"),
        "with power": lambda one: _format(one.with_power, "+.2f"),
        "with temperature": lambda one: _format(one.with_temperature, "+.2f"),
    }
    return _table("Each set; the last three are correlations of its steps' durations", columns, found.sets)


def _rooflines(sets: Sequence[ProfileSet]) -> list[Markup]:
    """The roofline of the first set of each kind of device."""
    columns: dict[str, Callable[[Row], str]] = {
        "part": lambda row: row.part,
        "GFLOP": lambda row: f"{row.gflop:,.4g}",
        "MB": lambda row: f"{row.megabytes:,.4g}",
        "floor, ms": lambda row: f"{row.floor_ms:,.3f}",
        "set by": lambda row: row.bound_by or UNKNOWN,
        "measured, ms": lambda row: f"{row.measured_ms:,.3f}",
        "share of floor": lambda row: _format(row.share_of_floor, ".0%"),
        "share of step": lambda row: f"{row.share_of_step:.1%}",
    }
    tables: dict[str, Markup] = {}
    for found in sets:
        name = str(found.facts.get("device", {}).get("name", ""))
        if name not in tables and (found.folder / "roofline.csv").is_file():
            rows, facts = read_roofline(found.folder)
            tables[name] = _table(f"{describe_ceilings(facts)}, measured in the same run", columns, rows)
    return list(tables.values())


def _kernels(sets: Sequence[ProfileSet]) -> Markup:
    """The kernels that take longest: their median over the sets, and its spread."""
    by_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for path in (found.folder / "kernels.csv" for found in sets):
        if path.is_file():
            for name, median_us, share in _read_rows(path, ("name", "median_us", "share")):
                by_name[name].append((median_us, share))
    largest = sorted(by_name.items(), key=lambda item: -sum(share for _, share in item[1]))[:MAX_KERNELS]
    rows = []
    for name, measured in largest:
        box = box_of([median for median, _ in measured])
        share = sum(share for _, share in measured) / len(sets)
        shortened = name if len(name) <= 90 else name[:87] + "..."
        rows.append([shortened, f"{share:.1%}", f"{box.median:,.2f}", f"{box.spread:.1%}", f"{len(measured)}"])
    headings = ["kernel", "share of the time", "median, us", "spread of the sets", "sets"]
    return parts.table(f"The {len(rows)} that take longest", headings, rows)


def _missing(sets: Sequence[ProfileSet]) -> Markup:
    """The measurements that failed, once for each reason."""
    reasons = Counter(f"{what}: {why}" for found in sets for what, why in found.missing.items())
    return parts.sentences([f"{reason} ({count} of {len(sets)} sets)" for reason, count in reasons.items()], "notes")


def _table(caption: str, columns: dict[str, Callable[[T], str]], entries: Iterable[T]) -> Markup:
    return parts.table(caption, list(columns), [[show(entry) for show in columns.values()] for entry in entries])


def _format(value: float | None, style: str) -> str:
    return UNKNOWN if value is None else f"{value:{style}}"


# --- plots --------------------------------------------------------------------------------------------


def plot_durations(sets: Sequence[ProfileSet]) -> Plot:
    """A box plot of the step times of each set."""
    boxplot_stats = import_extra("matplotlib.cbook").boxplot_stats
    figure, axes = blank_axes("set", "{:,.4g}".format)
    drawn = boxplot_stats([1e3 * found.seconds for found in sets])
    num_beyond = max(len(box["fliers"]) for box in drawn)
    for box in drawn:
        box["fliers"] = few_marks(np.sort(box["fliers"])[::-1].tolist())  # the slowest step is always drawn
    boxes = axes.bxp(
        drawn,
        positions=range(1, len(sets) + 1),
        widths=0.6,
        patch_artist=True,
        manage_ticks=False,  # it would label every set, even hundreds
        flierprops={"marker": "o", "markersize": 3, "markeredgewidth": 0.8},
    )
    axes.set_xlim(0.25, len(sets) + 0.75)
    for number in range(len(sets)):
        color = RUN_COLORS[number % NUM_COLORS]
        boxes["boxes"][number].set(facecolor=SURFACE, edgecolor=color, linewidth=1.4)
        boxes["medians"][number].set(color=color, linewidth=2)
        boxes["fliers"][number].set(markeredgecolor=color, markerfacecolor=SURFACE)
        for part in ("whiskers", "caps"):
            for line in boxes[part][2 * number : 2 * number + 2]:
                line.set(color=color, linewidth=1.2)
    label = "; ".join(f"set {number + 1} {1e3 * np.median(one.seconds):.4g}" for number, one in enumerate(sets))
    rings = "some of the steps beyond, evenly picked" if num_beyond > MAX_MARKS else "steps beyond"
    note = f"Milliseconds. Box: quartiles; whiskers: 1.5 times the box; rings: {rings}."
    return Plot("Duration of a step", note, to_svg(figure, f"Duration of a step, median in ms: {label}"))


def plot_steps(sets: Sequence[ProfileSet]) -> Plot:
    figure, axes = blank_axes("step", "{:,.4g}".format)
    for number, found in enumerate(sets):
        values = thin(1e3 * found.seconds)
        group = group_size(len(found.seconds))
        axes.plot(np.arange(len(values)) * group + 1, values, linewidth=1.1, color=RUN_COLORS[number % NUM_COLORS])
    groups = max(group_size(len(found.seconds)) for found in sets)
    note = "Milliseconds, in order." + (f" Each point is the mean of up to {groups} steps." if groups > 1 else "")
    return Plot("Steps in order", note, to_svg(figure, f"Duration of each step of {counted(len(sets), 'set')}"))


def plot_telemetry(sets: Sequence[ProfileSet], column: str) -> Plot | None:
    """A column of the telemetry over time; None if no set has it, and for the core clock beside the GPU's."""
    title, unit = TIME_LINES[column]
    having = [one for one in sets if np.isfinite(one.telemetry.get(column, np.array([np.nan]))).any()]
    if not having or (column == "clock_mhz" and any("sm_clock_mhz" in one.telemetry for one in having)):
        return None
    figure, axes = blank_axes("seconds after the first timed step", compact)
    for found in having:
        values, times = found.telemetry[column], found.telemetry["time"] - found.started[0]
        there = np.isfinite(values)
        color = RUN_COLORS[[id(one) for one in sets].index(id(found)) % NUM_COLORS]
        axes.plot(thin(times[there]), thin(values[there]), linewidth=1.1, color=color)
    note = f"{unit[:1].upper()}{unit[1:]}."
    return Plot(title, note, to_svg(figure, f"{title} over time, of {counted(len(having), 'set')}"))
