"""How parts of the rows, stretches of time and steps are written in settings."""

from __future__ import annotations

import re
from fractions import Fraction

from bertrain.base.errors import UserError

SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_slice(text: str) -> tuple[Fraction, Fraction]:
    """Begin and end of a slice such as 0:0.9, exactly as they were written; nothing written is the whole."""
    parts = (text or "0:1").split(":")
    if len(parts) == 2 and all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part, re.ASCII) for part in parts):
        begin, end = map(Fraction, parts)
        if begin < end <= 1:
            return begin, end
    raise UserError(f"data.slice is {text!r}; give where to begin and end, from 0 to 1, such as 0:0.9 or 0.9:1")


def parse_duration(text: str, key: str) -> float:
    """Seconds in a stretch of time such as 20m, 1h30m or 90s; 0 where nothing is written."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text, re.ASCII)
    seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or (text and seconds == 0):
        raise UserError(f"{key} is {text!r}; give a stretch of time such as 20m, 1h30m or 90s")
    return seconds


def parse_steps(text: str, key: str) -> list[range]:
    """The steps in a list such as 1200-1210,1300, each stretch with its last; the first step of a run is 1."""
    stretches = []
    for part in text.split(",") if text else []:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise UserError(f"{key} is {text!r}; give steps, of which the first is 1, such as 1200-1210,1300")
        stretches.append(range(first, last + 1))
    return stretches
