"""A clock for joining steps, samples and kernel launches: Unix time that never runs backwards.

It reads the system's time once, when the process starts, and then follows the monotonic clock. Timestamps of one
process can be joined exactly even if the system's time is changed meanwhile.
"""

from __future__ import annotations

import time

_WALL_AT_ZERO = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds."""
    return _WALL_AT_ZERO + time.monotonic()


def stepped() -> float:
    """Seconds by which the system's time was changed since this process started; negative: set back."""
    return time.time() - time.monotonic() - _WALL_AT_ZERO
