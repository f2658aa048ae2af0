"""Writes what speedrun.json says into README.md (the table) and the recipes that ran to their end (`about`).

python benchmarks/speedrun/table.py
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from bertrain.config.resolve import flatten_recipe

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "speedrun.json"
RECIPES = HERE.parents[1] / "bertrain" / "config" / "recipes"
RUN_TO_THE_END = {
    "bert-mini": "bert-mini, 30 % masked",
    "bert-base-minutes": "16 minutes: AdamW 5e-4, 30 % of the words, half of them replaced by bert-mini",
}
"""The name of the record of each recipe."""
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


def outcome(record: dict[str, Any], recipe: str) -> str:
    """Three lines of a recipe's `about`."""
    held_out, words = record["held_out"], record["request"][1:]
    sections = tomllib.loads(flatten_recipe(recipe))
    known = {f"--{section}.{key} {value}" for section, keys in sections.items() for key, value in keys.items()}
    pairs = [f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True) if "--log" not in name]
    given = [pair for pair in pairs if pair not in known]
    return (
        f"Run to the end on one {record['gpu']}: {record['seconds'] / 60:.1f} minutes, {record['tokens'] / 1e6:,.0f} M "
        f"tokens of Wikipedia, held-out loss {held_out['mlm_loss']:.3f},\n{held_out['mlm_accuracy']:.1%} of the masked "
        f"words, six tasks of GLUE {mean_of(record['tasks'])}. These settings were added:\n  {' '.join(given)}\n"
    )


def write_table(records: list[dict[str, Any]]) -> None:
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    head = "| date | recipe | minutes | of it start-up, s | steps | tokens | held-out loss | accuracy | six tasks |\n"
    rows = "".join(map(row, records))
    page.write_text(before + BEGIN + head + "|---|---|---|---|---|---|---|---|---|\n" + rows + END + after)


def write_recipes(records: list[dict[str, Any]]) -> None:
    for recipe, name in RUN_TO_THE_END.items():
        (record,) = [one for one in records if one["name"] == name]
        path = RECIPES / f"{recipe}.toml"
        path.write_text(re.sub(r"Run to the end on one .*\n.*\n.*\n", outcome(record, recipe), path.read_text()))


def main() -> None:
    records = json.loads(RESULTS.read_text())
    write_table(records)
    write_recipes(records)


if __name__ == "__main__":
    main()
