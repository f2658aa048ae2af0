"""What a round of trouble comes to, and what holds after each: a command ends in a sentence and leaves no process."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.launched import Launched
from tests.soak.jobs import Ended, Scene, assert_all_ended


class Unavailable(Exception):
    """This machine cannot make this kind of trouble; says what it lacks."""


@dataclass
class Outcome:
    """How often trouble was found (an error with its code, or a warning), and how often the result was equal."""

    found: int = 0
    harmless: int = 0
    shown: int = 0
    """Flips that changed only what a page or a log shows: records carry no checksum."""
    note: str = ""


Trouble = Callable[[random.Random, Scene, Path], Outcome]


def end_clearly(launched: Launched, marked_as: str) -> Ended:
    """Wait for a disturbed command: it ends by itself, in a sentence and not in a traceback, and leaves no process."""
    try:
        code = launched.wait()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end:\n{launched.err[-2000:]}") from None
    finally:
        launched.kill()
    assert_all_ended(marked_as)
    ended = Ended(code, launched.err)
    assert "Traceback" not in ended.err, f"exit code {code}\n{ended.err[-3000:]}"
    return ended


def assert_user_error(ended: Ended) -> None:
    assert ended.code == 2, f"exit code {ended.code}, not 2:\n{ended.err[-2000:]}"
    assert len(ended.sentences) == 1, f"not one sentence with a code:\n{ended.err[-2000:]}"
