"""Writes the table of README.md from benchmarks/results/speedrun.json: `python benchmarks/speedrun/table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "speedrun.json"
BEGIN, END = "<!-- table.py writes from here -->\n", "<!-- to here -->\n"


def row(record: dict[str, Any]) -> str:
    held_out, minutes = record["held_out"], f"{record['seconds'] / 60:.1f}"
    tokens = f"{record['tokens'] / 1e6:,.0f} M"
    # A run beside another one has no speed of its own.
    start_up = f"{record['start_up_s']:.0f}" if "start_up_s" in record else "-"
    times = ["-", "-"] if record.get("note") else [minutes, start_up]
    cells = [record["date"], record["name"], *times, f"{record['steps']:,}", tokens]
    accuracy = f"{held_out['mlm_accuracy']:.1%}" if "mlm_accuracy" in held_out else "-"
    cells += [f"{held_out['mlm_loss']:.3f}", accuracy, mean_of(record.get("tasks"))]
    return f"| {' | '.join(cells)} |\n"


def mean_of(tasks: dict[str, list[float]] | None) -> str:
    return f"{100 * fmean(map(fmean, tasks.values())):.1f}" if tasks else "-"


def main() -> None:
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    head = "| date | recipe | minutes | of it start-up, s | steps | tokens | held-out loss | accuracy | six tasks |\n"
    rows = [row(record) for record in json.loads(RESULTS.read_text())]
    page.write_text(before + BEGIN + head + "|---|---|---|---|---|---|---|---|---|\n" + "".join(rows) + END + after)


if __name__ == "__main__":
    main()
