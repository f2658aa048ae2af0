"""The clock that steps, samples and kernel launches are joined by: the wall's, but it never runs backwards.

It is read off the wall once, when the process begins, and then goes on with the monotonic clock. What this process
writes can be joined exactly, whatever happens to the system's time meanwhile.
"""

from __future__ import annotations

import time

_WALL_AT_ZERO = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds."""
    return _WALL_AT_ZERO + time.monotonic()


def stepped() -> float:
    """Seconds by which the system's clock has been set since this process began; negative: back."""
    return time.time() - time.monotonic() - _WALL_AT_ZERO
