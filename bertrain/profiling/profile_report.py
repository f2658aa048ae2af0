"""`bertrain profile report` and `bertrain profile roofline`: the results of profiles as a page, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.base.formatting import compact, counted
from bertrain.profiling.roofline import Row
from bertrain.profiling.sets import ProfileSet, find_sets
from bertrain.profiling.variability import SetSummary, Variability, box_of, compare
from bertrain.reports.history import group_size, thin
from bertrain.reports.page import (
    NUM_COLORS,
    Facts,
    Legend,
    Part,
    Plot,
    Plots,
    RunName,
    Section,
    Sentences,
    Table,
    render_page,
)
from bertrain.reports.plots import RUN_COLORS, SURFACE, blank_axes, few_marks, to_svg

MOST_KERNELS = 15
TIME_LINES = {
    "sm_clock_mhz": ("SM clock", "MHz"),
    "clock_mhz": ("Core clock", "MHz, mean of the cores"),
    "power_w": ("Power", "W"),
    "temperature_c": ("Temperature", "degrees Celsius"),
    "gpu_utilisation": ("GPU utilisation", "share of time in which any kernel ran"),
    "rss_bytes": ("Process memory", "bytes"),
}


def profile_report(folders: Sequence[str | Path], *, out: str | Path | None = None) -> tuple[Path, Variability]:
    """Write the variability of the profile sets in `folders`: a page, and the same as CSV and JSON beside it.

    `folders` are those of `bertrain profile`, or runs with telemetry. The page goes to `out`, or to
    profile-report.html in the first folder. Raises UserError for a folder without a set, or a path that cannot be
    written.
    """
    sets = find_sets(folders)
    found = compare(sets)
    path = Path(out) if out is not None else Path(folders[0]) / "profile-report.html"
    if path.is_dir():
        raise UserError("out-is-folder", f"cannot write the report to {path}, which is a folder; name a file")
    if path.suffix in (".json", ".csv"):
        raise UserError(
            "out-not-html", f"--out names the page, not {path}; its numbers go into .json and .csv files beside it"
        )
    try:
        write_atomically(path, page(sets, found))
        write_atomically(path.with_suffix(".json"), json.dumps(asdict(found), indent=1) + "\n")
        write_atomically(path.with_suffix(".csv"), sets_as_csv(found.sets))
    except OSError as error:
        raise UserError("cannot-write", f"cannot write the report to {path}: {error.strerror or error}") from None
    return path, found


def read_roofline(folder: str | Path) -> tuple[list[Row], dict[str, Any]]:
    """The roofline of a set, or of the first set under a folder, and the facts of that set."""
    (found, *_) = find_sets([folder])
    path = found.folder / "roofline.csv"
    if not path.is_file():
        raise UserError("missing-file", f"there is no roofline.csv in {found.folder}; `bertrain profile` makes it")
    if "ceilings" not in found.facts:
        raise UserError("damaged-file", f"{found.folder / 'device.json'} is damaged: it has no ceilings")
    return _read_rows(path, _row), found.facts


def _read_rows(path: Path, make: Callable[[dict[str, str]], Any]) -> list[Any]:
    """The rows of a CSV file. Raises UserError if it is damaged."""
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            return [make(cells) for cells in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError):
        raise UserError("damaged-file", f"{path} is damaged; profile again, or remove the file") from None


def _row(cells: dict[str, str]) -> Row:
    values: dict[str, Any] = {}
    for item in fields(Row):
        text = cells[item.name]
        is_text = item.name in ("part", "bound_by")
        values[item.name] = text if is_text else (float(text) if text else None)
    return Row(**values)


def sets_as_csv(summaries: Sequence[SetSummary]) -> str:
    """CSV with a row for each set."""
    written = io.StringIO()
    columns = [item.name for item in fields(SetSummary)]
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(summary) for summary in summaries)
    return written.getvalue()


# --- the page -----------------------------------------------------------------------------------------


def page(sets: Sequence[ProfileSet], found: Variability) -> str:
    """The whole report."""
    plots = [plot_durations(sets), plot_steps(sets), *(plot_telemetry(sets, column) for column in TIME_LINES)]
    sections = [
        Section("Variability", [*_facts(found), *devices_tables(found)]),
        Section("Sets", [_legend(sets), sets_table(found)]),
        Section("Curves", [Plots([plot for plot in plots if plot is not None])]),
        Section("Roofline", roofline_tables(sets)),
        Section("Kernels", kernels_table(sets)),
        Section("What is missing", missing_list(sets)),
    ]
    heading = found.devices[0].device if len(found.devices) == 1 else f"{len(found.devices)} devices"
    source = f"a profile of {counted(len(sets), 'set')}"
    return render_page(heading, heading, sections, kind="profile report", source=source)


def _facts(found: Variability) -> list[Part]:
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
        (f"Duration with {name}", _signed(value), "correlation across sets")
        for name, value in found.correlations.items()
        if value is not None
    ]
    verdict = f"{found.verdict[:1].upper()}{found.verdict[1:]}."
    is_uneven = found.slow_repeats or any(device.is_outlier for device in found.devices)
    return [Facts(entries), Sentences([verdict], "warning" if is_uneven else "notes")]


def devices_tables(found: Variability) -> list[Part]:
    rows = [
        [
            device.uuid or device.device,
            device.device,
            device.host,
            f"{device.repeats}",
            f"{1e3 * device.median_s:,.3f}",
            f"{device.over_median:.3f}",
            f"{device.between_repeats:.1%}" if device.repeats > 1 else "–",
            "outlier" if device.is_outlier else "",
        ]
        for device in found.devices
    ]
    headings = ["device", "which", "host", "repeats", "median, ms", "over the median", "between repeats", ""]
    hosts = [[host, f"{ratio:.3f}"] for host, ratio in found.hosts.items()]
    of_hosts = Table("Hosts: the median of their devices", ["host", "over the median"], hosts)
    return [Table("Devices, the slowest first", headings, rows), *([of_hosts] if len(hosts) > 1 else [])]


def sets_table(found: Variability) -> Table:
    rows = [
        [
            f"{number + 1}",
            summary.uuid or summary.device,
            f"{summary.repeat}",
            f"{1e3 * summary.median_s:,.3f}",
            f"{summary.spread:.1%}",
            f"{summary.outliers} of {summary.steps}",
            f"{summary.tokens_per_s:,.0f}",
            _number(summary.joules_per_million_tokens),
            _number(summary.clock_mhz),
            _number(summary.power_w),
            _number(summary.temperature_c),
            summary.throttled_by or "–",
            _signed(summary.with_clock),
            _signed(summary.with_power),
            _signed(summary.with_temperature),
        ]
        for number, summary in enumerate(found.sets)
    ]
    headings = [
        "set", "device", "repeat", "median, ms", "spread", "outliers", "tokens/s", "J/M tokens", "clock, MHz",
        "power, W", "temperature", "held back by", "with clock", "with power", "with temperature",
    ]  # fmt: skip
    caption = "Each set; the last three are correlations of its steps' durations"
    return Table(caption, headings, rows)


def roofline_tables(sets: Sequence[ProfileSet]) -> list[Table]:
    """The roofline of the first set of each kind of device."""
    tables: list[Table] = []
    seen: set[str] = set()
    for found in sets:
        name = str(found.facts.get("device", {}).get("name", ""))
        if name in seen or not (found.folder / "roofline.csv").is_file():
            continue
        seen.add(name)
        rows, facts = read_roofline(found.folder)
        ceilings = facts["ceilings"]
        caption = (
            f"{name}: {ceilings['operations_per_s'] / 1e12:,.4g} TFLOP/s in a product of {ceilings['product']}, "
            f"{ceilings['bytes_per_s'] / 1e9:,.4g} GB/s in a copy, measured in the same run"
        )
        cells = [
            [
                row.part,
                f"{row.gflop:,.4g}",
                f"{row.megabytes:,.4g}",
                f"{row.floor_ms:,.3f}",
                row.bound_by or "–",
                f"{row.measured_ms:,.3f}",
                "–" if row.share_of_floor is None else f"{row.share_of_floor:.0%}",
                f"{row.share_of_step:.1%}",
            ]
            for row in rows
        ]
        headings = ["part", "GFLOP", "MB", "floor, ms", "set by", "measured, ms", "share of floor", "share of step"]
        tables.append(Table(caption, headings, cells))
    return tables


def kernels_table(sets: Sequence[ProfileSet]) -> list[Table]:
    """The kernels that take longest: their median over the sets, and its spread."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for found in sets:
        path = found.folder / "kernels.csv"
        if path.is_file():
            for name, median_us, share in _read_rows(path, _kernel):
                by_name.setdefault(name, []).append((median_us, share))
    largest = sorted(by_name.items(), key=lambda item: -sum(share for _, share in item[1]))[:MOST_KERNELS]
    rows = []
    for name, measured in largest:
        box = box_of([median for median, _ in measured])
        share = sum(share for _, share in measured) / len(sets)
        rows.append([shortened(name), f"{share:.1%}", f"{box.median:,.2f}", f"{box.spread:.1%}", f"{len(measured)}"])
    headings = ["kernel", "share of the time", "median, us", "spread of the sets", "sets"]
    return [Table(f"The {len(rows)} that take longest", headings, rows)] if rows else []


def _kernel(cells: dict[str, str]) -> tuple[str, float, float]:
    return cells["name"], float(cells["median_us"]), float(cells["share"])


def shortened(name: str) -> str:
    """The first 90 characters of a kernel's name."""
    return name if len(name) <= 90 else name[:87] + "..."


def missing_list(sets: Sequence[ProfileSet]) -> list[Part]:
    """The measurements that failed, once for each reason."""
    reasons: dict[str, int] = {}
    for found in sets:
        for what, why in found.missing.items():
            reasons[f"{what}: {why}"] = reasons.get(f"{what}: {why}", 0) + 1
    texts = [f"{reason} ({count} of {len(sets)} sets)" for reason, count in reasons.items()]
    return [Sentences(texts, "notes")] if texts else []


# --- plots --------------------------------------------------------------------------------------------


def plot_durations(sets: Sequence[ProfileSet]) -> Plot:
    """A box plot of the step times of each set."""
    from matplotlib.cbook import boxplot_stats

    figure, axes = blank_axes("set", "{:,.4g}".format)
    drawn = boxplot_stats([1e3 * found.seconds for found in sets])
    picked = False
    for box in drawn:
        beyond = np.sort(box["fliers"])[::-1]  # the slowest step is always drawn
        box["fliers"] = few_marks(beyond.tolist())
        picked = picked or len(box["fliers"]) < len(beyond)
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
    rings = "some of the steps beyond, evenly picked" if picked else "steps beyond"
    note = f"Milliseconds. Box: quartiles; whiskers: 1.5 times the box; rings: {rings}."
    return Plot("Duration of a step", note, to_svg(figure, f"Duration of a step, median in ms: {label}"))


def plot_steps(sets: Sequence[ProfileSet]) -> Plot:
    """Step times in order."""
    figure, axes = blank_axes("step", "{:,.4g}".format)
    for number, found in enumerate(sets):
        values = thin(1e3 * found.seconds)
        group = group_size(len(found.seconds))
        axes.plot(np.arange(len(values)) * group + 1, values, linewidth=1.1, color=RUN_COLORS[number % NUM_COLORS])
    groups = max(group_size(len(found.seconds)) for found in sets)
    note = "Milliseconds, in order." + (f" Each point is the mean of up to {groups} steps." if groups > 1 else "")
    return Plot("Steps in order", note, to_svg(figure, f"Duration of each step of {len(sets)} set(s)"))


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
    return Plot(title, note, to_svg(figure, f"{title} over time, of {len(having)} set(s)"))


def _legend(sets: Sequence[ProfileSet]) -> Legend:
    runs = [RunName(index, str(found.folder)) for index, found in enumerate(sets)]
    return Legend(runs, is_sticky=len(sets) <= NUM_COLORS)  # a longer one would cover the page


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"
