"""What can end a run early: a signal, a failed save, too many steps that are not finite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bertrain.errors import AgreedError

GO_ON, SAVE, END, STOP, FAIL = range(5)
"""What a rank brings to the agreement after each step; the largest decides for all. SAVE and END are of the clock."""


class StopSignal:
    """Notes SIGINT and SIGTERM, so that the step in hand is finished and saved. A second SIGINT is not waited on."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Listen while the body runs; put the old handlers back after it."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)


class SkippedSteps:
    """Counts steps that were not applied, and ends the run when there are too many in a row."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row = limit, 0

    def note(self, applied: list[bool], last_step: int) -> None:
        """Take note of the newest steps, in order, the last of them being `last_step`."""
        for step, was_applied in enumerate(applied, start=last_step - len(applied) + 1):
            self.in_a_row = 0 if was_applied else self.in_a_row + 1
            if self.in_a_row >= self.limit:
                raise AgreedError(
                    f"the loss or its gradient was not finite in {self.in_a_row} steps in a row, the last of them "
                    f"step {step}; none of them was applied: lower optimizer.learning_rate, lengthen "
                    "schedule.warmup_steps, or check the data"
                )
