"""`bertrain data stats`: statistics of a data folder, and padding and balance of each batching policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertrain.base.errors import UserError
from bertrain.config.choices import MASK_PROBABILITY
from bertrain.data.feed.balance import imbalance, per_rank
from bertrain.data.feed.batching import POLICIES, Policy, capacity_for, choose_policy, step_by_sequences
from bertrain.data.formats.masking import Ints, count_predictions
from bertrain.data.formats.source import open_data

STEPS_SAMPLED = 20
SEED = 1  # of the order of examples; the default of train.seed
EXAMPLES_READ = 65_536  # for unknown_share, evenly strided


@dataclass(frozen=True)
class PolicyStats:
    policy: str
    padding: float  # share of the computed tokens that are padding
    bins_per_step: float
    most_bins: int  # the maximum over the steps
    token_imbalance: float  # the busiest rank's tokens over the mean
    attention_imbalance: float  # the same of the squared lengths


@dataclass(frozen=True)
class DataStats:
    """Counts and length histogram of a data folder, and its policies."""

    folder: str
    examples: int
    tokens: int
    mean_length: float
    median_length: float
    longest: int
    random_next_share: float
    unknown_share: float  # share of [UNK] among the tokens of up to EXAMPLES_READ examples
    vocabulary: int
    histogram: dict[int, int]  # number of examples up to each length, by sixteenths of the longest
    policies: list[PolicyStats]


def data_stats(
    folder: str | Path,
    *,
    ranks: int = 8,
    sequences: int = 256,
    token_budget: int = 0,
    vocab: str | Path | None = None,
) -> DataStats:
    """Statistics of a data folder, and of each policy for steps of `sequences` examples on `ranks` ranks.

    Without `token_budget`, a bin holds a rank's share of a step, rounded up to a multiple of the longest example.
    """
    if ranks < 1 or sequences < 1:
        raise UserError("option-out-of-range", "--ranks and --sequences must be at least 1")
    data = open_data(folder, vocab=vocab, verify="size")
    lengths = data.lengths
    longest, mean = int(lengths.max()), float(lengths.mean())
    budget = token_budget or max(longest, int(-(-sequences * mean // ranks) // longest + 1) * longest)
    if budget < longest:
        raise UserError(
            "example-too-long", f"--token-budget is {budget}, but an example has {longest} tokens; raise it"
        )
    edges = np.unique(np.linspace(0, longest, 17).astype(int))
    counts, _ = np.histogram(lengths, bins=np.append(edges[:-1] + 1, longest + 1))
    starts = range(0, STEPS_SAMPLED * sequences, sequences)
    steps = [lengths[step_by_sequences(start, sequences, len(data), SEED)[1]].astype(np.int64) for start in starts]
    count = min(len(data), EXAMPLES_READ)
    sample = data.read(np.arange(count) * len(data) // count).tokens
    return DataStats(
        folder=str(folder),
        examples=len(data),
        tokens=int(lengths.sum(dtype=np.int64)),
        mean_length=mean,
        median_length=float(np.median(lengths)),
        longest=longest,
        random_next_share=float(data.is_random(np.arange(len(data))).mean()),
        unknown_share=float((sample == data.vocabulary.id_of("[UNK]")).mean()),
        vocabulary=len(data.vocabulary.words),
        histogram=dict(zip(edges[1:].tolist(), counts.tolist(), strict=True)),
        policies=[
            measure_policy(
                name,
                choose_policy(name),
                steps,
                ranks=ranks,
                token_budget=budget,
                max_seq_length=longest,
                mean_length=mean,
            )
            for name in POLICIES
        ],
    )


def measure_policy(
    name: str,
    policy: Policy,
    steps: Iterable[Ints],
    *,
    ranks: int,
    token_budget: int,
    max_seq_length: int,
    mean_length: float,
    bin_sequences: int = 0,
) -> PolicyStats:
    """Statistics of a policy over some steps, each given by the lengths of its examples."""
    capacity = capacity_for(
        token_budget,
        bin_sequences=bin_sequences,
        mean_length=max_seq_length if policy.pads_each else mean_length,
        max_predictions=max_seq_length,
        mask_probability=MASK_PROBABILITY,
    )
    real = computed = 0
    bins_made, token_worst, attention_worst = [], [], []
    for lengths in steps:
        predictions = count_predictions(lengths, max_seq_length, MASK_PROBABILITY)
        bins = policy.deal(lengths, predictions, capacity, max_seq_length)
        real += int(lengths.sum())
        computed += sum(tokens for tokens, *_ in policy.measure(bins, lengths, predictions, capacity, max_seq_length))
        bins_made.append(len(bins))
        of_bins = [(lengths[members].sum(), np.square(lengths[members]).sum()) for members in bins]
        tokens, attention = per_rank(of_bins, ranks).T
        token_worst.append(imbalance(tokens))
        attention_worst.append(imbalance(attention))
    return PolicyStats(
        policy=name,
        padding=1 - real / computed,
        bins_per_step=float(np.mean(bins_made)),
        most_bins=max(bins_made),
        token_imbalance=float(np.mean(token_worst)),
        attention_imbalance=float(np.mean(attention_worst)),
    )
