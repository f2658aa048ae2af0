"""The picture of a plan: time over the number of GPUs, and where the time of each step goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.planning.plan import Plan, shown_parts

FORMATS = (".svg", ".png", ".pdf")
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
WIDE = 10  # times the shortest, at which the longest makes a logarithmic axis
CROWDED = 6  # counts, at which their labels are turned


def draw_plans(plans: Sequence[Plan], gpu: str, path: Path) -> None:
    """Write the picture to `path`, in the format of its suffix."""
    if path.suffix not in FORMATS:
        raise UserError("bad-picture", f"--plot {path} must end in {', '.join(FORMATS)}")
    figure = import_extra("matplotlib.figure").Figure(figsize=(11, 4.2), layout="constrained")
    time, parts = figure.subplots(1, 2)
    counts = [plan.count for plan in plans]
    longest = max(plan.seconds for plan in plans)
    unit, size = next(unit for unit in UNITS if longest >= 2 * unit[1] or unit is UNITS[-1])
    time.plot(counts, [plan.seconds / size for plan in plans], "o-")
    time.set(xscale="log", xlabel=f"number of {gpu}", ylabel=unit, title="predicted time to train")
    turned = 90 if len(counts) > CROWDED else 0
    time.set_xticks(counts, [f"{count:,}" for count in counts], rotation=turned)
    if longest > WIDE * min(plan.seconds for plan in plans):
        time.set_yscale("log")
        time.yaxis.set_major_formatter("{x:g}")
    else:
        time.set_ylim(0, 1.05 * longest / size)
    time.minorticks_off()
    time.grid(alpha=0.3)
    places, below = range(len(plans)), [0.0] * len(plans)
    for name in shown_parts(plans):
        heights = [100 * max(0.0, plan.step.parts[name]) / plan.step.seconds for plan in plans]
        parts.bar(places, heights, bottom=below, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    steps = [f"{plan.count:,}: {1e3 * plan.step.seconds:,.1f} ms" for plan in plans]
    parts.set_xticks(places, steps, rotation=turned)
    parts.set(xlabel=f"number of {gpu}, and a step", ylabel="% of a step", title="where a step's time goes")
    parts.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UserError("bad-picture", f"cannot write --plot {path}: {error.strerror}; give another file") from None
