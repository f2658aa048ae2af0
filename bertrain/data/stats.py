"""`bertrain data stats`: what a prepared folder holds, and what each batching policy makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertrain.data.batching import POLICIES, capacity_for, step_by_sequences
from bertrain.data.masking import Ints, count_predictions
from bertrain.data.source import DataSource, open_data
from bertrain.errors import UserError

STEPS_SAMPLED = 20


@dataclass(frozen=True)
class PolicyStats:
    """One policy over some steps. Fill is the share of computed tokens that are real; the others are max over mean."""

    policy: str
    fill: float
    bins_per_step: float
    token_imbalance: float
    attention_imbalance: float


@dataclass(frozen=True)
class DataStats:
    """Counts of a prepared folder, its length histogram, and its policies."""

    folder: str
    examples: int
    tokens: int
    mean_length: float
    median_length: float
    longest: int
    random_next_share: float
    vocabulary: int
    histogram: dict[int, int]
    """Number of examples up to each length, by sixteenths of the longest."""
    policies: list[PolicyStats]


def data_stats(
    folder: str | Path,
    *,
    ranks: int = 8,
    sequences: int = 256,
    token_budget: int = 0,
    seed: int = 1,
    vocab: str | Path | None = None,
) -> DataStats:
    """Describe a prepared folder, and its policies for steps of `sequences` examples on `ranks` ranks.

    Without `token_budget`, a bin holds a rank's even share of a step, rounded up to whole examples of the longest.
    """
    if ranks < 1 or sequences < 1:
        raise UserError("--ranks and --sequences must be at least 1")
    shards = open_data(folder, vocab=vocab, verify="size")
    lengths = shards.lengths
    longest, mean = int(lengths.max()), float(lengths.mean())
    budget = token_budget or max(longest, int(-(-sequences * mean // ranks) // longest + 1) * longest)
    if budget < longest:
        raise UserError(f"--token-budget {budget} cannot hold the longest example, of {longest} tokens")
    edges = np.unique(np.linspace(0, longest, 17).astype(int))
    counts, _ = np.histogram(lengths, bins=np.append(edges[:-1] + 1, longest + 1))
    return DataStats(
        folder=str(folder),
        examples=len(shards),
        tokens=int(lengths.sum(dtype=np.int64)),
        mean_length=mean,
        median_length=float(np.median(lengths)),
        longest=longest,
        random_next_share=float(shards.is_random(np.arange(len(shards))).mean()),
        vocabulary=len(shards.vocabulary.words),
        histogram=dict(zip(edges[1:].tolist(), counts.tolist(), strict=True)),
        policies=[_policy(name, shards, ranks, sequences, budget, longest, seed) for name in POLICIES],
    )


def _policy(
    name: str, shards: DataSource, ranks: int, sequences: int, budget: int, longest: int, seed: int
) -> PolicyStats:
    policy = POLICIES[name]
    mean = longest if policy.pads_each else float(shards.lengths.mean())
    capacity = capacity_for(budget, bin_sequences=0, mean_length=mean, max_predictions=longest, mask_probability=0.15)
    real = computed = bins_made = 0
    token_worst, attention_worst = [], []
    for step in range(STEPS_SAMPLED):
        _, rows = step_by_sequences(step * sequences, sequences, len(shards), seed)
        lengths = shards.lengths[rows].astype(np.int64)
        predictions = count_predictions(lengths, longest, 0.15)
        bins = policy.deal(lengths, predictions, capacity, longest)
        real += int(lengths.sum())
        computed += sum(
            policy.shape_of(lengths[members], predictions[members], capacity, longest).tokens for members in bins
        )
        bins_made += len(bins)
        token_worst.append(_imbalance(bins, lengths, ranks))
        attention_worst.append(_imbalance(bins, lengths**2, ranks))
    return PolicyStats(
        policy=name,
        fill=real / computed,
        bins_per_step=bins_made / STEPS_SAMPLED,
        token_imbalance=float(np.mean(token_worst)),
        attention_imbalance=float(np.mean(attention_worst)),
    )


def _imbalance(bins: list[Ints], cost: Ints, ranks: int) -> float:
    """The busiest rank's cost over the mean, bins going round the ranks."""
    per_rank = np.zeros(ranks)
    for number, members in enumerate(bins):
        per_rank[number % ranks] += cost[members].sum()
    return float(per_rank.max() / per_rank.mean())
