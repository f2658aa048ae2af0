"""Parse the values of settings: parts of the data, durations and lists of steps; check the ranges of options.

A whole number has at most 15 digits, a fraction 30: Python refuses to convert thousands of them.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import pairwise

from bertrain.base.errors import UserError

SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def check_ranges(*ranges: tuple[str, float, float, float]) -> None:
    """Refuse options that are not within their bounds: (option, value, minimum, maximum)."""
    for option, value, least, most in ranges:
        if not (least <= value <= most and math.isfinite(value)):
            bounds = f"at least {least:g}" if math.isinf(most) else f"{least:g} to {most:.9g}"
            raise UserError("option-out-of-range", f"{option} is {value}; it must be {bounds}")


def parse_slice(text: str) -> tuple[Fraction, Fraction]:
    """Begin and end of a slice such as 0:0.9, as exact fractions; an empty text is the whole."""
    parts = (text or "0:1").split(":")
    if len(parts) == 2 and all(re.fullmatch(r"\d{1,15}(\.\d{0,30})?|\.\d{1,30}", part, re.ASCII) for part in parts):
        begin, end = map(Fraction, parts)
        if begin < end <= 1:
            return begin, end
    raise UserError("invalid-slice", f"data.slice is {text!r}; give begin and end, from 0 to 1, such as 0:0.9 or 0.9:1")


def parse_shares(text: str) -> tuple[int, ...]:
    """The numbers of batch.shares, such as 6 3 2 5."""
    words = text.split()
    if not all(re.fullmatch(r"\d{1,15}", word, re.ASCII) for word in words) or (words and not any(map(int, words))):
        raise UserError("invalid-shares", f"batch.shares is {text!r}; give whole numbers such as 6 3 2 5")
    return tuple(map(int, words))


def parse_duration(text: str, key: str) -> float:
    """Seconds in a duration such as 20m, 1h30m or 90s; 0 for an empty text."""
    parts = re.findall(r"(\d{1,15}(?:\.\d{1,30})?)([dhms])", text, re.ASCII)
    seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or (text and seconds == 0):
        raise UserError("invalid-duration", f"{key} is {text!r}; give a duration such as 20m, 1h30m or 90s")
    return seconds


def parse_fits(text: str, key: str) -> list[tuple[int, int]]:
    """The pairs in a list such as 4:1530,25:1490: after this step, the run is to end with that one."""
    found = [re.fullmatch(r"(\d{1,15}):(\d{1,15})", part, re.ASCII) for part in text.split(",")] if text else []
    fits = [(int(one[1]), int(one[2])) for one in found if one]
    is_rising = all(earlier[0] < later[0] for earlier, later in pairwise(fits))
    if len(fits) < len(found) or not is_rising or not all(step <= last and last for step, last in fits):
        raise UserError(
            "invalid-fits", f"{key} is {text!r}; give STEP:LAST_STEP pairs in order, such as 4:1530,25:1490"
        )
    return fits


def parse_steps(text: str, key: str) -> list[range]:
    """The steps in a list such as 1200-1210,1300, last ones included; the first step of a run is 1."""
    steps = []
    for part in text.split(",") if text else []:
        found = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", part.strip(), re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise UserError("invalid-steps", f"{key} is {text!r}; give steps from 1, such as 1200-1210,1300")
        steps.append(range(first, last + 1))
    return steps
