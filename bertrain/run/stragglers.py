"""Measures each rank's own time, and warns of a rank that the others wait for.

In synchronous training all ranks take the same time for a step: a slow one computes, the others wait in the all-reduce.
So a rank's own time is the time before the all-reduce: waiting for data, forward and backward. It is divided by the
rank's tokens, since ranks may have different numbers of bins. On a GPU it is measured with events.

Ranks exchange their means for a log line, before which they wait for their devices anyway.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from torch.distributed.distributed_c10d import Store

from bertrain.base.console import PHASES, warn
from bertrain.config.settings import LogSettings
from bertrain.run.records import RankMeans, RanksRecord

IN_A_ROW, LEAST_S = 3, 5.0
"""Log lines and seconds that a rank must be slow for before a warning: a single disturbance does not count."""
HOST = "bertrain/host"
Gather = Callable[[Sequence[float]], list[list[float]]]
"""Returns the numbers of every rank, in order."""


def slow_ranks(times: Sequence[RankMeans], factor: float) -> dict[int, float]:
    """Ranks whose own time per token is more than `factor` times the median of all ranks, with their ratio to it.

    For an even number it is the lower median: of two ranks, the slower is compared with the faster.
    """
    paces = {entry.rank: entry.own_seconds / entry.tokens for entry in times if entry.tokens}
    if not paces:
        return {}
    median = max(statistics.median_low(paces.values()), 1e-12)
    return {rank: pace / median for rank, pace in paces.items() if pace > factor * median}


class RankTimes:
    """Gathers the means of every rank over each `every_steps` steps. All ranks must add the same steps."""

    def __init__(self, rank: int, world: int, store: Store, gather: Gather, log: LogSettings) -> None:
        self._gather, self._every_steps, self._factor = gather, log.every_steps, log.straggler_factor
        store.set(f"{HOST}/{rank}", platform.node())
        self._hosts = [store.get(f"{HOST}/{other}").decode() for other in range(world)] if rank == 0 else []
        self._waiting: list[list[float]] = []
        self._slow_for = dict.fromkeys(range(world), (0, 0.0))  # log lines, seconds
        self._warned: set[int] = set()

    def add(self, step: int, seconds: dict[str, float], tokens: int) -> RanksRecord | None:
        """Add a step of this rank: seconds of each phase, and its own tokens.

        At the end of an interval the first rank gets the record of all ranks, and warns of slow ones.
        """
        self._waiting.append([tokens, *(seconds[phase] for phase in PHASES)])
        if step % self._every_steps:
            return None
        rows, self._waiting = self._gather(np.mean(self._waiting, axis=0).tolist()), []
        means = [
            RankMeans(rank, host, rows[rank][0], dict(zip(PHASES, rows[rank][1:], strict=True)))
            for rank, host in enumerate(self._hosts)
        ]
        self._warn(means)
        return RanksRecord(step, tuple(means)) if means else None

    def _warn(self, times: Sequence[RankMeans]) -> None:
        slow = slow_ranks(times, self._factor) if self._factor else {}
        for entry in times:
            rank, (lines, seconds) = entry.rank, self._slow_for[entry.rank]
            if rank not in slow:
                self._slow_for[rank] = 0, 0.0
                self._warned.discard(rank)
                continue
            lines, seconds = lines + 1, seconds + self._every_steps * sum(entry.seconds.values())
            self._slow_for[rank] = lines, seconds
            if lines >= IN_A_ROW and seconds >= LEAST_S and rank not in self._warned:
                self._warned.add(rank)
                slower = f"takes {slow[rank]:.1f} times as long per token as the median of the ranks"
                waits = f"the others wait for it (log.straggler_factor {self._factor:g})"
                warn(f"rank {rank} on host {entry.host} {slower}, for {lines} log lines in a row; {waits}")
