"""Padding and imbalance of each batching policy on Wikipedia's lengths, 16 sequences for each of 8, 64 and 1,024 ranks.

    python benchmarks/balance.py

Lengths are drawn from the published histogram at 512 tokens (benchmarks/wikipedia-512.csv). The policies that deal out
sequences put 16 into a bin, those that deal out tokens as many as it holds. Each policy gets the smallest token budget,
in steps of 16, with which none of the sampled steps takes more bins than there are ranks: no rank computes two while
the others wait. nnlshp, which packs whole data sets, is left out. Writes benchmarks/results/balance.json and .md.
"""

from __future__ import annotations

import csv
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.data.feed.batching import Policy, choose_policy
from bertrain.data.feed.stats import PolicyStats, measure_policy

HERE = Path(__file__).parent
MAX_SEQ_LENGTH = 512
SEQUENCES_PER_RANK = 16
RANKS = (8, 64, 1024)
STEPS = 10
GRAIN = 16
DEALS_OUT_SEQUENCES = ("padded", "bins", "exchange")
POLICIES: dict[str, Policy] = {
    "padded": choose_policy("padded"),
    "bins": choose_policy("bins"),
    "exchange, groups of 8": choose_policy("exchange", group_size=8),
    "exchange, all ranks": choose_policy("exchange"),
    "packed, lpfhp": choose_policy("packed", packing="lpfhp"),
    "packed, spfhp": choose_policy("packed", packing="spfhp"),
    "budget": choose_policy("budget"),
}


@dataclass(frozen=True)
class Entry:
    """A policy on so many ranks, at the budget it needs."""

    ranks: int
    token_budget: int
    stats: PolicyStats


def draw_steps(ranks: int) -> list[Any]:
    """Steps of lengths from the published histogram; the few under five tokens cannot hold a pair."""
    with open(HERE / "wikipedia-512.csv") as file:
        rows = [(int(row["length"]), int(row["sequences"])) for row in csv.DictReader(file)]
    lengths, weights = np.array([row for row in rows if row[0] >= 5], dtype=np.float64).T
    draw = np.random.default_rng(ranks)
    size = (STEPS, SEQUENCES_PER_RANK * ranks)
    return list(draw.choice(lengths.astype(np.int64), size, p=weights / weights.sum()))


def measure(name: str, ranks: int) -> Entry:
    """The policy at the smallest budget that gives each rank one bin at the most, found by bisection."""
    steps = draw_steps(ranks)
    mean = float(np.mean(steps))

    def stats_at(grains: int) -> PolicyStats:
        return measure_policy(
            name,
            POLICIES[name],
            steps,
            ranks=ranks,
            token_budget=grains * GRAIN,
            max_seq_length=MAX_SEQ_LENGTH,
            mean_length=mean,
            bin_sequences=SEQUENCES_PER_RANK if name.startswith(DEALS_OUT_SEQUENCES) else 0,
        )

    def fits(grains: int) -> bool:
        return stats_at(grains).most_bins <= ranks

    too_small = int(0.9 * mean * SEQUENCES_PER_RANK) // GRAIN
    enough = SEQUENCES_PER_RANK * MAX_SEQ_LENGTH // GRAIN
    while enough - too_small > 1:
        middle = (enough + too_small) // 2
        too_small, enough = (too_small, middle) if fits(middle) else (middle, enough)
    return Entry(ranks, enough * GRAIN, stats_at(enough))


def table(entries: list[Entry]) -> str:
    lines = [
        f"Wikipedia at {MAX_SEQ_LENGTH} tokens, {SEQUENCES_PER_RANK} sequences for each rank, {STEPS} steps. Imbalance",
        "is the busiest rank over the mean of all, in real tokens and in the squares of lengths; ranks without a bin",
        "count. A padded rank computes its whole rectangle, so there the padding is what costs. Written by",
        "`python benchmarks/balance.py`.",
        "",
        "| ranks | policy | token budget | bins | padding | token imbalance | attention imbalance |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for entry in entries:
        stats = entry.stats
        figures = f"{stats.padding:.1%} | {stats.token_imbalance:.3f} | {stats.attention_imbalance:.3f}"
        size = f"{entry.token_budget:,} | {stats.bins_per_step:,.1f}"
        lines.append(f"| {entry.ranks:,} | {stats.policy} | {size} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    entries = []
    for ranks in RANKS:
        for name in POLICIES:
            entries.append(measure(name, ranks))
            print(f"{ranks} ranks, {name}: {entries[-1]}", flush=True)
    result = {
        "what": "padding and imbalance of each policy, one bin for each rank",
        "sequences_per_rank": SEQUENCES_PER_RANK,
        "steps": STEPS,
        "entries": [{"ranks": one.ranks, "token_budget": one.token_budget} | asdict(one.stats) for one in entries],
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }
    (HERE / "results" / "balance.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "results" / "balance.md").write_text(f"# Balance\n\n{table(entries)}")
    print(table(entries))


if __name__ == "__main__":
    main()
