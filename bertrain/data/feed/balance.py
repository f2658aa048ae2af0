"""The load balance of a step, computed from its bins alone.

Every rank knows all bins, so ranks need not communicate. The work of a bin is the tokens of its shape and the squared
lengths of its sequences, padding included. All ranks wait for the busiest, so the idle share is 1 - mean / max of their
work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from bertrain.data.formats.masking import Ints

REPORTED_IDLE_SHARE = 0.05  # an idle share above this is reported with advice, if there is any
GRAIN = 64  # a token budget that is a multiple of this is replaced by another multiple (FP8 products need it)
MOST_GROWTH = 8  # the largest token budget to try, as a multiple of the present one

Sizes = tuple[Ints, Ints]  # lengths and numbers of predictions of a step's examples


@dataclass(frozen=True)
class Balance:
    num_bins: int
    tokens: list[int]  # tokens that each rank computes, padding included
    attention: list[int]  # sum of the squared lengths of each rank's sequences, padding included
    work: list[int]  # multiply-adds of each rank's forward passes

    @property
    def idle_share(self) -> float:
        return 1 - 1 / imbalance(self.work)


def per_rank(of_bins: npt.ArrayLike, ranks: int) -> Ints:
    """Sums over each rank's bins, which are dealt round-robin; a rank without bins has 0."""
    of_bins = np.asarray(of_bins, dtype=np.int64)
    sums = np.zeros((ranks, *of_bins.shape[1:]), dtype=np.int64)
    np.add.at(sums, np.arange(len(of_bins)) % ranks, of_bins)
    return sums


def imbalance(of_ranks: npt.ArrayLike) -> float:
    of_ranks = np.asarray(of_ranks)
    return float(of_ranks.max() / of_ranks.mean())


def mean_idle_share(ahead: Sequence[Balance]) -> float:
    return float(np.mean([balance.idle_share for balance in ahead]))


def better_budget(
    balances_at: Callable[[int], Sequence[Balance]], token_budget: int, smallest: int
) -> tuple[int, Sequence[Balance]] | None:
    """A token budget with at most half the idle share of `token_budget`, and its balances.

    `balances_at` returns some steps' balances for a budget. Tries the smallest budget with which no rank has more bins
    than the busiest has now, and the smallest with which every rank has fewer; returns the faster one, or None.
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
    return max(balance.num_bins for balance in ahead)


def describe_balance(ahead: Sequence[Balance], better: tuple[int, Sequence[Balance]] | None = None) -> str:
    """The expected idle share of the ranks in some steps, and a better setting if there is one."""
    idle, ranks = mean_idle_share(ahead), len(ahead[0].work)
    summary = f"{_count_bins(ahead)} on {ranks} ranks: {idle:.1%} of the ranks' time is idle (estimated from lengths)"
    if idle <= REPORTED_IDLE_SHARE:
        return summary
    if better is not None:
        budget, then = better
        return f"{summary}; --batch.token_budget {budget} makes {_count_bins(then)}, {mean_idle_share(then):.1%} idle"
    if most_bins(ahead) < ranks:
        return f"{summary}; {most_bins(ahead)} ranks would be as fast"
    return summary


def _count_bins(ahead: Sequence[Balance]) -> str:
    least, most = min(balance.num_bins for balance in ahead), most_bins(ahead)
    return f"{least} to {most} bins" if least < most else f"{most} bin{'' if most == 1 else 's'}"
