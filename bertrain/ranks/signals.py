"""Reasons to stop a run early: a signal, a failed save, too many steps that are not finite."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from bertrain.base.errors import DivergedError, UserError
from bertrain.base.machine import is_first_rank

CONTINUE, SAVE, FIT, END, STOP, REQUEUE, FAIL = range(7)
"""Requests of a rank after each step; all ranks act on the largest. SAVE, FIT and END come from the clock."""

LAUNCHER = "BERTRAIN_LAUNCHER"
"""Variable with the process number of the launcher that starts this process directly."""
PR_SET_PDEATHSIG = 1  # of prctl(2)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
INTERRUPTS: list[int] = []
"""What `note_interrupt` has noted."""


def note_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Ctrl-C before training listens. It is noted, because a library's import may swallow the exception."""
    INTERRUPTS.append(number)
    raise KeyboardInterrupt


def end_with_launcher() -> None:
    """Have the system send SIGTERM, upon which ranks save and exit, when the launcher of this process is killed."""
    launcher = int(os.environ.pop(LAUNCHER, "0"))
    if launcher:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != launcher and _has_ended(launcher):  # before the line above
            os.kill(os.getpid(), signal.SIGTERM)


def _has_ended(process: int) -> bool:
    """Whether a process is gone, or a zombie that its parent has not asked for yet."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[dict[signal.Signals, Any]]:
    """Handle these signals while the body runs; yields the handlers before, which it then restores."""
    before: dict[signal.Signals, Any] = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, restored in before.items():
            signal.signal(number, restored)


class StopSignal:
    """Records SIGINT, SIGTERM and SIGUSR1, so that the step is finished and saved; a second SIGINT interrupts it."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @property
    def request(self) -> int:
        """The request of this rank. A person who presses Ctrl-C wants the prompt back, not a requeue."""
        if self.received is None:
            return CONTINUE
        return STOP if self.received == signal.SIGINT else REQUEUE

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Listen while the body runs, then restore the old handlers."""
        with handling(STOP_SIGNALS, self._note) as before:
            try:
                if INTERRUPTS:
                    raise KeyboardInterrupt
                yield self
            except UserError:
                # When the first rank has ended, the launcher sends SIGTERM to the others: let this one print its error.
                if "RANK" in os.environ:
                    before[signal.SIGTERM] = signal.SIG_IGN
                raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if number == signal.SIGINT and is_first_rank():
            os.write(2, b"\nstopping after this step; Ctrl-C again to quit now\n")  # print may not be entered twice


NEVER = StopSignal()
"""No signal."""


class SkippedSteps:
    """Counts steps that were not applied, and raises when there are too many in a row."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row = limit, 0

    def note(self, applied: list[bool], last_step: int) -> None:
        """Count the newest steps, in order; the last of them is `last_step`."""
        for step, was_applied in enumerate(applied, start=last_step - len(applied) + 1):
            self.in_a_row = 0 if was_applied else self.in_a_row + 1
            if self.in_a_row >= self.limit:
                found = f"the loss or its gradient was not finite in {self.in_a_row} steps in a row"
                cure = "lower optimizer.learning_rate, lengthen schedule.warmup_steps, or check the data"
                last = f"the last of them step {step}; none of them was applied"
                raise DivergedError("diverged", f"{found}, {last}: {cure}")
