"""What the fields of settings have: a default, a range, a help text, and whether a resumed run may change them."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    or_zero: bool = False,
    shapes_training: bool = True,
    experimental: bool = False,
    family: str = "",
    tasks: tuple[str, ...] = (),
    is_list: bool = False,
) -> Any:
    """A dataclass field with a help text and an inclusive range; `or_zero` also allows 0 below it.

    A setting of one model `family`, or of some `tasks`, keeps its default in the others. Text that `is_list` has words
    between commas; a recipe may write it as a list.
    A setting that shapes the training is fixed once a run has begun. An experimental one is for benchmarks and
    comparisons: it works, but `bertrain settings` shows it only with --all.
    """
    flags = {"shapes_training": shapes_training, "experimental": experimental, "or_zero": or_zero, "is_list": is_list}
    help = f"{', '.join(tasks)}: {help}" if tasks else help
    owners = {"family": family, "tasks": tasks}
    return field(default=default, metadata={"help": help, "minimum": min, "maximum": max} | owners | flags)


changeable = partial(setting, shapes_training=False)
"""A setting that does not shape the training: a resumed run may change it."""
