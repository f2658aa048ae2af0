"""How evenly the work of a step lies on the ranks, worked out from its bins alone.

Every rank knows all bins, so nobody is asked. What counts is what is computed: the tokens of a bin's shape and the
squares of all its sequences, junk included. The ranks wait for the busiest of them, so the share of time that they
idle is 1 - mean / max of their work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from bertrain.config.settings import ModelSettings
from bertrain.data.feed.batching import Capacity, Policy
from bertrain.data.formats.masking import Ints

WORTH_MENDING = 0.05  # an idle share above this is explained, with a way out if there is one
GRAIN = 64  # a token budget that is a multiple of this is replaced by another such (8-bit products want it)
MOST_GROWTH = 8  # a token budget more than so many times the present one is not looked for


Sizes = tuple[Ints, Ints]  # lengths and numbers of predictions of a step's examples


@dataclass(frozen=True)
class Balance:
    """What each rank computes in a step."""

    num_bins: int
    tokens: list[int]
    """Rows that each rank computes, junk included."""
    attention: list[int]
    """Squares of the lengths of each rank's sequences, junk included, added up."""
    work: list[int]
    """Multiply-adds of each rank's forward passes."""

    @property
    def idle_share(self) -> float:
        return 1 - 1 / imbalance(self.work)


def per_rank(of_bins: npt.ArrayLike, ranks: int) -> Ints:
    """Sums over each rank's bins, which go round the ranks; a rank without one has 0."""
    of_bins = np.asarray(of_bins, dtype=np.int64)
    sums = np.zeros((ranks, *of_bins.shape[1:]), dtype=np.int64)
    np.add.at(sums, np.arange(len(of_bins)) % ranks, of_bins)
    return sums


def imbalance(of_ranks: npt.ArrayLike) -> float:
    """The busiest rank over the mean of all."""
    of_ranks = np.asarray(of_ranks)
    return float(of_ranks.max() / of_ranks.mean())


def multiply_adds(model: ModelSettings, tokens: Ints, attention: Ints, predictions: Ints) -> Ints:
    """Of a forward pass, in matrix products; a backward pass has twice as many.

    A token passes four matrices of width squared and two of the feed-forward layer, a pair of tokens two products of
    its heads, a prediction the transform and the vocabulary. The rest (next sentence, LayerNorm) is too little.
    """
    width = model.hidden_size
    layer = tokens * width * (4 * width + 2 * model.intermediate_size) + attention * 2 * width
    return model.num_layers * layer + predictions * width * (width + model.padded_vocab_size)


def weigh(
    bins: Sequence[Ints],
    lengths: Ints,
    predictions: Ints,
    *,
    policy: Policy,
    capacity: Capacity,
    max_seq_length: int,
    model: ModelSettings,
    ranks: int,
) -> Balance:
    """The balance of a step whose bins hold these indices into `lengths` and `predictions`."""
    of_bins = []
    for members in bins:
        shape = policy.shape_of(lengths[members], predictions[members], capacity, max_seq_length)
        boundaries = policy.lay_out(lengths[members], shape.tokens, max_seq_length).boundaries
        of_bins.append((shape.tokens, int(np.square(np.diff(boundaries)).sum()), shape.predictions))
    tokens, attention, slots = per_rank(of_bins, ranks).T
    work = multiply_adds(model, tokens, attention, slots)
    return Balance(len(bins), tokens.tolist(), attention.tolist(), work.tolist())


# --- what to say of it ------------------------------------------------------------------------------


def mean_idle_share(ahead: Sequence[Balance]) -> float:
    """Over some steps."""
    return float(np.mean([balance.idle_share for balance in ahead]))


def better_budget(
    balances_at: Callable[[int], Sequence[Balance]], token_budget: int, smallest: int
) -> tuple[int, Sequence[Balance]] | None:
    """A token budget that leaves the ranks at most half as idle as `token_budget`, and the balances it makes.

    `balances_at` gives some steps' balances for a budget. Tried are the smallest budgets with which no rank has more
    bins than the busiest has now, and with which none has as many; the faster one is taken, or none.
    """
    now = balances_at(token_budget)
    ranks, grain = len(now[0].work), gcd(token_budget, GRAIN)
    rounds = -(-most_bins(now) // ranks)
    budgets = range(-(-smallest // grain) * grain, MOST_GROWTH * token_budget, grain)
    found = []
    for most in range(rounds * ranks, 0, -ranks)[:2]:
        place = bisect_left(budgets, True, key=lambda budget: most_bins(balances_at(budget)) <= most)
        found += [(budget, balances_at(budget)) for budget in budgets[place : place + 1]]
    best = min(found, key=lambda pair: sum(max(balance.work) for balance in pair[1]), default=None)
    return best if best is not None and mean_idle_share(best[1]) <= mean_idle_share(now) / 2 else None


def most_bins(ahead: Sequence[Balance]) -> int:
    """In any of some steps."""
    return max(balance.num_bins for balance in ahead)


def describe_balance(ahead: Sequence[Balance], better: tuple[int, Sequence[Balance]] | None = None) -> str:
    """How idle the ranks will be in some steps, why, and what would be better."""
    idle, ranks = mean_idle_share(ahead), len(ahead[0].work)
    told = f"{_count_bins(ahead)} on {ranks} ranks: {idle:.1%} of the ranks' time is idle (estimated from lengths)"
    if idle <= WORTH_MENDING:
        return told
    if better is not None:
        budget, then = better
        return f"{told}; --batch.token_budget {budget} makes {_count_bins(then)}, {mean_idle_share(then):.1%} idle"
    if most_bins(ahead) < ranks:
        return f"{told}; {most_bins(ahead)} ranks would be as fast"
    return told


def _count_bins(ahead: Sequence[Balance]) -> str:
    least, most = min(balance.num_bins for balance in ahead), most_bins(ahead)
    return f"{least} to {most} bins" if least < most else f"{most} bin{'' if most == 1 else 's'}"
