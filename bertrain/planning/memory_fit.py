"""How much memory a rank has, which token budget fits into it, and which settings make a run fit.

Activation checkpointing and, on several ranks, a sharded optimizer save memory without changing the training. A smaller
token budget changes dropout, so a run that has begun must keep its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Literal

import torch

from bertrain.base.errors import UserError
from bertrain.base.formatting import GIB
from bertrain.base.machine import free_memory
from bertrain.config.choices import EngineName
from bertrain.config.settings import Settings
from bertrain.data.formats.source import DataSource
from bertrain.planning.memory import BinSize, Estimate, estimate

BUDGET_STEP = 64  # token budgets found here are multiples of it, as 8-bit matrix products need


def available_memory(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """Bytes that each rank of this machine may use, and a label that says of which memory."""
    if device.type == "cuda":
        sharing, label = -(-local_ranks // torch.cuda.device_count()), f"of {torch.cuda.get_device_name(device)}"
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        free = free_memory()
        if free is None:
            return 1 << 62, "unknown here"
        sharing, label, there = local_ranks, "free", free
    return there // sharing, f"{label}, shared by {sharing} ranks" if sharing > 1 else label


@dataclass(frozen=True)
class Place:
    """The memory of one rank, and what a run's need of it depends on."""

    data: DataSource
    ranks: int
    engine: EngineName
    on_gpu: bool
    bytes: int
    """What one rank may use."""
    label: str
    """Which memory that is, for messages."""

    def needs(self, settings: Settings) -> Estimate:
        size = BinSize.of(settings, self.data)
        return estimate(settings, size, ranks=self.ranks, engine=self.engine, on_gpu=self.on_gpu)

    def holds(self, settings: Settings) -> bool:
        return self.needs(settings).total <= self.bytes


def smallest_budget(settings: Settings) -> int:
    """The smallest token budget to propose: it holds the longest example."""
    return -(-settings.data.max_seq_length // BUDGET_STEP) * BUDGET_STEP


def largest_budget(settings: Settings, place: Place, limit: int) -> int:
    """The largest token budget up to `limit`, both multiples of 64, that the estimate allows; 0 if none does."""
    low, high = smallest_budget(settings) // BUDGET_STEP - 1, limit // BUDGET_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if place.holds(with_budget(settings, middle * BUDGET_STEP)):
            low = middle
        else:
            high = middle - 1
    return low * BUDGET_STEP if low * BUDGET_STEP >= smallest_budget(settings) else 0


def with_budget(settings: Settings, token_budget: int) -> Settings:
    return replace(settings, batch=replace(settings.batch, token_budget=token_budget))


def refuse_too_little(settings: Settings, place: Place, *, is_begun: bool) -> None:
    """Refuse a run that does not fit, and name settings with which it does; a begun run keeps its token budget."""
    needed = place.needs(settings)
    if needed.total <= place.bytes:
        return
    ways = _ways_to_fit(settings, place, is_begun)
    advice = f"set {', or '.join(ways)}" if ways else "use a smaller model or a machine with more memory"
    need, there = (
        f"{needed.total / GIB:.1f} GiB on each rank",
        f"{place.bytes / GIB:.1f} GiB are available ({place.label})",
    )
    parts = f"the largest parts in GiB: {needed.text()}"
    raise UserError("out-of-memory", f"this run needs about {need}, but {there}; {parts}; {advice}")


def _ways_to_fit(settings: Settings, place: Place, is_begun: bool) -> list[str]:
    """Settings with which the run fits, each by itself; if none is enough, all together."""

    def smaller_budget(tried: Settings) -> list[str]:
        limit = settings.batch.token_budget // BUDGET_STEP * BUDGET_STEP
        budget = 0 if is_begun else largest_budget(tried, place, limit)
        return [f"--batch.token_budget {budget}"] if budget else []

    changes = _savings(settings, place.ranks)
    ways = smaller_budget(settings) + [option for option, changed in changes if place.holds(changed)]
    if ways or not changes:
        return ways
    options = [option for option, _ in changes if not option.endswith("selective")]  # full saves more
    train, optimizer = replace(settings.train, activation_checkpointing="full"), settings.optimizer
    smallest = replace(settings, train=train, optimizer=replace(optimizer, sharded=place.ranks > 1))
    if place.holds(smallest):
        return [" ".join(options)]
    return [" ".join([*options, option]) for option in smaller_budget(smallest)]


def _savings(settings: Settings, ranks: int) -> list[tuple[str, Settings]]:
    """Options that save memory without changing the training, each with the settings that have it."""
    found = []
    modes: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    for mode in modes[modes.index(settings.train.activation_checkpointing) + 1 :]:
        train = replace(settings.train, activation_checkpointing=mode)
        found.append((f"--train.activation_checkpointing {mode}", replace(settings, train=train)))
    if ranks > 1 and not settings.optimizer.sharded:
        optimizer = replace(settings.optimizer, sharded=True)
        found.append(("--optimizer.sharded true", replace(settings, optimizer=optimizer)))
    return found


@contextmanager
def oom_as_user_error(settings: Settings, ranks: int, folder: Path | None) -> Iterator[None]:
    """Turn an out-of-memory error into a UserError that names settings to change; `folder` can be resumed."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors, and printing takes memory too
        savings = " ".join(option for option, _ in _savings(settings, ranks)[-1:])
        again = f"continue with `bertrain resume {quote(str(folder))} {savings}`" if folder else f"try {savings}"
        advice = f"{again}, or start a new run with" if savings else "start a new run with"
        budget = f"a --batch.token_budget under {settings.batch.token_budget}"
        raise UserError("out-of-memory", f"out of memory ({_first_line(error)}); {advice} {budget}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; on a CPU PyTorch raises a plain RuntimeError, in words that differ by processor."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory"))


def _first_line(error: BaseException) -> str:
    """The allocator's message, without its advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = text.rsplit("DefaultCPUAllocator: ", 1)[-1]
    return text.split(". ")[0].rstrip(".") or type(error).__name__
