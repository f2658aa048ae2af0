"""`bertrain profile report` and `bertrain profile roofline`: what sets of a profile say, as a page, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from html import escape
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
from bertrain.reports.markup import figures, listed, table, whole_page
from bertrain.reports.plots import NUM_COLOURS, RUN_COLOURS, SURFACE, blank_axes, few_marks, framed, to_svg

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
    """Write what the sets in `folders` say about variability: a page, and the same as CSV and JSON beside it.

    `folders` are those of `bertrain profile`, or runs made with telemetry. The page goes to `out`, or to
    profile-report.html in the first folder. Raises UserError for a folder without a set, or a place that cannot be
    written.
    """
    sets = find_sets(folders)
    found = compare(sets)
    path = Path(out) if out is not None else Path(folders[0]) / "profile-report.html"
    if path.is_dir():
        raise UserError(f"cannot write the report to {path}, which is a folder; name a file")
    if path.suffix in (".json", ".csv"):
        raise UserError(f"--out is {path}, but names the page; its figures go into .json and .csv files beside it")
    try:
        write_atomically(path, page(sets, found).encode("ascii", "xmlcharrefreplace").decode())
        write_atomically(path.with_suffix(".json"), json.dumps(asdict(found), indent=1) + "\n")
        write_atomically(path.with_suffix(".csv"), sets_as_csv(found.sets))
    except OSError as error:
        raise UserError(f"cannot write the report to {path}: {error.strerror or error}") from None
    return path, found


def read_roofline(folder: str | Path) -> tuple[list[Row], dict[str, Any]]:
    """The table of a set, or of the first set under a folder, and the facts of that set."""
    (found, *_) = find_sets([folder])
    path = found.folder / "roofline.csv"
    if not path.is_file():
        raise UserError(f"there is no roofline.csv in {found.folder}; it is made by `bertrain profile`")
    if "ceilings" not in found.facts:
        raise UserError(f"{found.folder / 'device.json'} is damaged: it names no ceilings")
    return _read_rows(path, _row), found.facts


def _read_rows(path: Path, make: Callable[[dict[str, str]], Any]) -> list[Any]:
    """The lines of a table, or a sentence about it."""
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            return [make(cells) for cells in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is damaged; make the profile again, or remove the file to do without") from None


def _row(cells: dict[str, str]) -> Row:
    values: dict[str, Any] = {}
    for item in fields(Row):
        text = cells[item.name]
        is_text = item.name in ("part", "bound_by")
        values[item.name] = text if is_text else (float(text) if text else None)
    return Row(**values)


def sets_as_csv(summaries: Sequence[SetSummary]) -> str:
    """A line for each set."""
    written = io.StringIO()
    columns = [item.name for item in fields(SetSummary)]
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(summary) for summary in summaries)
    return written.getvalue()


# --- the page -----------------------------------------------------------------------------------------


def page(sets: Sequence[ProfileSet], found: Variability) -> str:
    """The whole report; it needs neither network nor scripts."""
    plots = [plot_durations(sets), plot_steps(sets), *(plot_telemetry(sets, column) for column in TIME_LINES)]
    sections = {
        "Variability": _facts(found) + devices_table(found),
        "Sets": _key(sets) + sets_table(found),
        "Curves": f'<div class="plots">{"".join(plots)}</div>',
        "Roofline": roofline_tables(sets),
        "Kernels": kernels_table(sets),
        "What is missing": missing_list(sets),
    }
    heading, source = _heading(found), f"a profile of {counted(len(sets), 'set')}"
    return whole_page(heading, heading, sections, kind="profile report", source=source)


def _heading(found: Variability) -> str:
    count = len(found.devices)
    return f"{found.devices[0].device}" if count == 1 else f"{count} devices"


def _facts(found: Variability) -> str:
    """The figures at the head, as far as there is something to compare, and the verdict."""
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
    kind = "warning" if is_uneven else "notes"
    return figures(entries) + listed([verdict], kind)


def devices_table(found: Variability) -> str:
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
    of_hosts = [[host, f"{ratio:.3f}"] for host, ratio in found.hosts.items()]
    hosts = table("Hosts: the median of their devices", ["host", "over the median"], of_hosts, kind="numbers")
    devices = table("Devices, the slowest first", headings, rows, kind="numbers")
    return devices + (hosts if len(of_hosts) > 1 else "")


def sets_table(found: Variability) -> str:
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
    return table(caption, headings, rows, kind="numbers")


def roofline_tables(sets: Sequence[ProfileSet]) -> str:
    """One for each kind of device: that of its first set."""
    tables, seen = [], set()
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
        tables.append(table(caption, headings, cells, kind="numbers"))
    return "".join(tables)


def kernels_table(sets: Sequence[ProfileSet]) -> str:
    """The kernels that take longest: their median in the sets, and how far the sets are apart."""
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
    if not rows:
        return ""
    headings = ["kernel", "share of the time", "median, us", "spread of the sets", "sets"]
    return table(f"The {len(rows)} that take longest", headings, rows, kind="numbers")


def _kernel(cells: dict[str, str]) -> tuple[str, float, float]:
    return cells["name"], float(cells["median_us"]), float(cells["share"])


def shortened(name: str) -> str:
    """A kernel's name without the tail of its template's arguments."""
    return name if len(name) <= 90 else name[:87] + "..."


def missing_list(sets: Sequence[ProfileSet]) -> str:
    """What could not be measured, once for each reason."""
    reasons: dict[str, int] = {}
    for found in sets:
        for what, why in found.missing.items():
            reasons[f"{what}: {why}"] = reasons.get(f"{what}: {why}", 0) + 1
    return listed([f"{reason} ({count} of {len(sets)} sets)" for reason, count in reasons.items()], "notes")


# --- plots --------------------------------------------------------------------------------------------


def plot_durations(sets: Sequence[ProfileSet]) -> str:
    """A box for each set."""
    from matplotlib.cbook import boxplot_stats

    figure, axes = blank_axes("set", "{:,.4g}".format)
    drawn = boxplot_stats([1e3 * found.seconds for found in sets])
    picked = False
    for box in drawn:
        beyond = np.sort(box["fliers"])[::-1]  # the slowest is always among those that are picked
        box["fliers"] = few_marks(beyond.tolist())
        picked = picked or len(box["fliers"]) < len(beyond)
    boxes = axes.bxp(
        drawn,
        positions=range(1, len(sets) + 1),
        widths=0.6,
        patch_artist=True,
        manage_ticks=False,  # which would write the number of every set, however many there are
        flierprops={"marker": "o", "markersize": 3, "markeredgewidth": 0.8},
    )
    axes.set_xlim(0.25, len(sets) + 0.75)
    for number in range(len(sets)):
        colour = RUN_COLOURS[number % NUM_COLOURS]
        boxes["boxes"][number].set(facecolor=SURFACE, edgecolor=colour, linewidth=1.4)
        boxes["medians"][number].set(color=colour, linewidth=2)
        boxes["fliers"][number].set(markeredgecolor=colour, markerfacecolor=SURFACE)
        for part in ("whiskers", "caps"):
            for line in boxes[part][2 * number : 2 * number + 2]:
                line.set(color=colour, linewidth=1.2)
    label = "; ".join(f"set {number + 1} {1e3 * np.median(one.seconds):.4g}" for number, one in enumerate(sets))
    rings = "some of the steps beyond, evenly picked" if picked else "steps beyond"
    note = f"Milliseconds. Box: quartiles; whiskers: 1.5 times the box; rings: {rings}."
    return framed("Duration of a step", note, to_svg(figure, f"Duration of a step, median in ms: {label}"))


def plot_steps(sets: Sequence[ProfileSet]) -> str:
    """Durations in their order."""
    figure, axes = blank_axes("step", "{:,.4g}".format)
    for number, found in enumerate(sets):
        values = thin(1e3 * found.seconds)
        group = group_size(len(found.seconds))
        axes.plot(np.arange(len(values)) * group + 1, values, linewidth=1.1, color=RUN_COLOURS[number % NUM_COLOURS])
    groups = max(group_size(len(found.seconds)) for found in sets)
    note = "Milliseconds, in order." + (f" Each point is the mean of up to {groups} steps." if groups > 1 else "")
    return framed("Steps in order", note, to_svg(figure, f"Duration of each step of {len(sets)} set(s)"))


def plot_telemetry(sets: Sequence[ProfileSet], column: str) -> str:
    """A column of the telemetry over time, nothing where no set has it; GPUs have a clock of their own name."""
    title, unit = TIME_LINES[column]
    having = [one for one in sets if np.isfinite(one.telemetry.get(column, np.array([np.nan]))).any()]
    if not having or (column == "clock_mhz" and any("sm_clock_mhz" in one.telemetry for one in having)):
        return ""
    figure, axes = blank_axes("seconds after the first timed step", compact)
    for found in having:
        values, times = found.telemetry[column], found.telemetry["time"] - found.started[0]
        there = np.isfinite(values)
        colour = RUN_COLOURS[[id(one) for one in sets].index(id(found)) % NUM_COLOURS]
        axes.plot(thin(times[there]), thin(values[there]), linewidth=1.1, color=colour)
    note = f"{unit[:1].upper()}{unit[1:]}."
    return framed(title, note, to_svg(figure, f"{title} over time, of {len(having)} set(s)"))


def _key(sets: Sequence[ProfileSet]) -> str:
    items = "".join(
        f'<li><i class="swatch run-{number % NUM_COLOURS}"></i>{number + 1} <span>{escape(str(one.folder))}</span></li>'
        for number, one in enumerate(sets)
    )
    kind = "key runs" if len(sets) <= NUM_COLOURS else "key"  # that of many would cover the page if it stayed in sight
    return f'<ul class="{kind}">{items}</ul>'


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"
