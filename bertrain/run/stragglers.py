"""Measures each rank's own time, and warns of a rank that the others wait for.

In synchronous training all ranks take the same time for a step: a slow one computes, the others wait in the all-reduce.
So a rank's own time is that before the all-reduce: waiting for data, forward and backward. It is taken per token, since
ranks may have different numbers of bins, and between the stopwatch's marks: on a GPU by events.

This does not delay a step: a thread writes each rank's means to the launcher's store, and a thread of the first rank
collects them; they are in the metrics one log line later.
"""

from __future__ import annotations

import json
import platform
import queue
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from torch.distributed.distributed_c10d import Store

from bertrain.base.console import PHASES, warn
from bertrain.run.records import RankMeans, RanksRecord

IN_A_ROW, LEAST_S = 3, 5.0
"""Log lines and seconds that a rank must be slow for before it is warned of: it may be disturbed once."""
KEY = "bertrain/times"
MOST_WAIT_S, LAST_WAIT_S = 60.0, 2.0  # for the other ranks, while training and at its end


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
    """Gathers the means of every rank over each `every_steps` steps.

    Each rank adds its steps with `note`; the first one takes complete records with `arrived`.
    """

    def __init__(self, *, rank: int, world: int, store: Store, every_steps: int, factor: float) -> None:
        self._rank, self._world, self._every_steps, self._factor = rank, world, every_steps, factor
        self._store: Store = store.clone()  # type: ignore[attr-defined] # a connection of its own: another's may be busy
        self._waiting: list[tuple[dict[str, float], int]] = []
        self._complete: queue.SimpleQueue[RanksRecord] = queue.SimpleQueue()
        self._slow_for = dict.fromkeys(range(world), (0, 0.0))  # log lines, seconds
        self._warned: set[int] = set()
        self._ending = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bertrain-times")

    def note(self, step: int, seconds: dict[str, float], tokens: int) -> None:
        """One step of this rank: seconds of each phase, and its own tokens."""
        self._waiting.append((seconds, tokens))
        if step % self._every_steps == 0:
            mean_tokens = statistics.fmean(tokens for _, tokens in self._waiting)
            means = {phase: statistics.fmean(seconds[phase] for seconds, _ in self._waiting) for phase in PHASES}
            self._thread.submit(self._exchange, step, RankMeans(self._rank, platform.node(), mean_tokens, means))
            self._waiting = []

    def arrived(self) -> Iterator[RanksRecord]:
        """On the first rank: the records that are complete, in order; warns of slow ranks."""
        while not self._complete.empty():
            record = self._complete.get()
            self._warn(record.ranks)
            yield record

    def close(self) -> Iterator[RanksRecord]:
        """End the thread, after a moment to collect the last records; returns those."""
        self._ending.set()
        self._thread.shutdown(wait=True)
        return self.arrived()

    def _exchange(self, step: int, times: RankMeans) -> None:
        keys = [f"{KEY}/{step}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], json.dumps(asdict(times)))
        if self._rank > 0 or not self._wait_for(keys):
            return
        gathered = tuple(RankMeans(**json.loads(self._store.get(key))) for key in keys)
        for key in keys:
            self._store.delete_key(key)
        self._complete.put(RanksRecord(step, gathered))

    def _wait_for(self, keys: list[str]) -> bool:
        """Whether all ranks have written. An interval that a rank does not report is left out."""
        a_while, waited = 0.1, 0.0
        while not self._store.check(keys):  # PyTorch warns of every wait of a store that times out
            if waited >= (LAST_WAIT_S if self._ending.is_set() else MOST_WAIT_S):
                return False
            time.sleep(a_while)
            waited += a_while
        return True

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
