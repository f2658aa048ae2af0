"""Format numbers, durations and names of metrics for people."""

from __future__ import annotations

import re
from collections.abc import Iterable

GIB = 1 << 30
COLUMNS = 100  # of everything that a command prints, but paths and commands
TITLES = {
    "mlm_loss": "masked-word loss",
    "mlm_accuracy": "masked-word accuracy",
    "nsp_loss": "next-sentence loss",
    "nsp_accuracy": "next-sentence accuracy",
    "hidden_accuracy": "accuracy at [MASK]",
    "constant_accuracy": "most frequent word",
}
BASELINE = "baseline_"  # before the name of a task's main metric: its value for the same answer to every example
THRESHOLD = "threshold_"  # before a label: the probability from which on the label applies, as a task fitted it
YARDSTICKS = ("constant_accuracy", "hidden_accuracy", BASELINE, THRESHOLD)  # beginnings of names; never the main metric


def is_speed(name: str) -> bool:
    return name.endswith("_per_s") or name.startswith("latency")


def title_of(metric: str) -> str:
    return TITLES.get(metric, metric.replace("_", " "))


def heading_of(metric: str) -> str:
    title = title_of(metric)
    return title[:1].upper() + title[1:]


def is_share(metric: str) -> bool:
    """Whether it is a share of one, to be written in percent."""
    return metric.endswith(("accuracy", "_share"))


def is_better_low(metric: str) -> bool:
    return "loss" in metric or "perplexity" in metric


def headline_of(metrics: list[str]) -> str | None:
    """The main metric of a run: masked-word accuracy, else the first that is not a loss, else the first."""
    judging = [metric for metric in metrics if not metric.startswith(YARDSTICKS)]
    others = [metric for metric in judging if not is_better_low(metric)]
    return "mlm_accuracy" if "mlm_accuracy" in judging else next(iter(others or judging), None)


def show(metric: str, value: float | None) -> str:
    """A share in percent, a loss in four decimals; a dash where it is not finite or not there."""
    if value is None or value != value:
        return "–"
    return f"{value:.2%}" if is_share(metric) else f"{value:.4f}"


def show_brief(metric: str, value: float, digits: int = 4) -> str:
    """A share in percent, anything else with `digits` significant digits."""
    return f"{value:.2%}" if is_share(metric) else f"{value:.{digits}g}"


def compact(value: float) -> str:
    """A number in at most four digits: 0.25, 9,870, 45.6 k, 1.59 M, 3.3 B."""
    if float(f"{value:.4g}") < 1e4:
        return f"{value:,.4g}"
    return amount(value, "").replace("G", "B")


def counted(count: int, what: str) -> str:
    """1 line, 2 lines, 3,000 lines."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def few(names: Iterable[str], most: int = 4) -> str:
    """The first `most` different names in their order."""
    different = list(dict.fromkeys(names))
    return ", ".join(different[:most]) + (", …" if len(different) > most else "")


def amount(value: float, unit: str) -> str:
    """A quantity in three digits with its unit: 356 J, 9.57 MJ, 1.2 GB."""
    rounded = float(f"{value:.3g}")
    scale, prefix = next(
        (pair for pair in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if rounded >= pair[0]), (1, "")
    )
    return f"{rounded / scale:.3g} {prefix}{unit}"


def duration(seconds: float) -> str:
    """0.8 s, 45 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = round(seconds)
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {part}"
    return f"{whole} s" if whole >= 10 else f"{f'{seconds:.1f}'.removesuffix('.0')} s"


def wrap(text: str, indent: int = 2) -> str:
    """Text wrapped at COLUMNS; further lines are indented.

    A path, and a command in backticks, are not broken: one that is too long has a line of its own.
    """
    return "\n".join(_wrap_line(line, indent) for line in text.split("\n"))


def _wrap_line(line: str, indent: int) -> str:
    if len(line) <= COLUMNS:
        return line
    margin = " " * (len(line) - len(line.lstrip()))
    lines = [margin]
    for word in re.findall(r"(?:`[^`]*`|\S)+ *", line.lstrip()):
        if len(lines[-1]) + len(word.rstrip()) > COLUMNS and lines[-1].strip():
            lines.append(margin + " " * indent)
        lines[-1] += word
    return "\n".join(one.rstrip() for one in lines)
