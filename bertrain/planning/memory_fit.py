"""How much memory there is, which token budget fits into it, and what to say where a run does not.

Settings that spare memory without changing the training are activation checkpointing and, on several ranks, a sharded
optimizer; a smaller token budget draws other dropout, so a run that has begun cannot take it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Literal

import torch

from bertrain.base.errors import UserError
from bertrain.base.machine import free_memory
from bertrain.config.settings import Settings
from bertrain.data.formats.source import DataSource
from bertrain.planning.memory import GIB, BinSize, Estimate, estimate

BUDGET_STEP = 64  # token budgets that are found here are multiples of it; 8-bit products want no less


def room(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """Bytes that each rank of this machine may take, and of what."""
    if device.type == "cuda":
        sharing = -(-local_ranks // torch.cuda.device_count())
        name = torch.cuda.get_device_name(device)
        return torch.cuda.get_device_properties(device).total_memory // sharing, _shared_by(f"of {name}", sharing)
    free = [bytes for bytes in (free_memory(), cgroup_room(Path("/sys/fs/cgroup"))) if bytes is not None]
    if not free:
        return 1 << 62, "unknown here"
    return min(free) // local_ranks, _shared_by("free", local_ranks)


def _shared_by(what: str, ranks: int) -> str:
    return f"{what}, shared by {ranks} ranks" if ranks > 1 else what


def cgroup_room(root: Path, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the tightest cgroup around this process, as a container has one, leaves it; None where there is no limit."""
    try:
        path = next(line.split("::", 1)[1] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        path = "/"
    folder = root / path.lstrip("/")
    rooms = [_room_in(place) for place in (folder, *folder.parents) if place.is_relative_to(root)]
    return min((bytes for bytes in rooms if bytes is not None), default=None)


def _room_in(cgroup: Path) -> int | None:
    try:
        limit, used = (cgroup / "memory.max").read_text(), int((cgroup / "memory.current").read_text())
        if limit.strip() == "max":
            return None
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(statistics["inactive_file"]))  # file pages make way
    except (OSError, ValueError, KeyError):
        return None


def count_local_ranks(world: int) -> int:
    """Ranks on this machine: all of `world` where no launcher says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


# --- what fits, and what to say if it does not -------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a run is to fit in."""

    shards: DataSource
    ranks: int
    is_fused: bool
    on_gpu: bool
    bytes: int
    """What one rank may take."""
    words: str

    def needs(self, settings: Settings) -> Estimate:
        size = BinSize.of(settings, self.shards)
        return estimate(settings, size, ranks=self.ranks, is_fused=self.is_fused, on_gpu=self.on_gpu)

    def holds(self, settings: Settings) -> bool:
        return self.needs(settings).total <= self.bytes


def smallest_budget(settings: Settings) -> int:
    """The smallest token budget to offer: it holds the longest example."""
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
    """Refuse a run that does not fit, and say what would; a run that is begun keeps what shapes its training."""
    needed = place.needs(settings)
    if needed.total <= place.bytes:
        return
    ways = _ways_to_fit(settings, place, is_begun)
    advice = f"set {', or '.join(ways)}" if ways else "use a smaller model or a machine with more memory"
    raise UserError(
        f"this run needs about {needed.total / GIB:.1f} GiB on each rank, and {place.bytes / GIB:.1f} GiB are there "
        f"({place.words}); the largest parts in GiB: {needed.text()}; {advice}"
    )


def _ways_to_fit(settings: Settings, place: Place, is_begun: bool) -> list[str]:
    """Settings with which the run fits, each by itself; if none does, all together."""
    ways = []
    budget = (
        0 if is_begun else largest_budget(settings, place, settings.batch.token_budget // BUDGET_STEP * BUDGET_STEP)
    )
    if budget:
        ways.append(f"--batch.token_budget {budget}")
    changes = _savings(settings, place.ranks)
    ways += [words for words, changed in changes if place.holds(changed)]
    if ways or not changes:
        return ways
    sparing, words = settings, []
    for word, _ in changes:
        if word != "--train.activation_checkpointing selective":  # full spares more
            sparing = next(changed for other, changed in _savings(sparing, place.ranks) if other == word)
            words.append(word)
    if place.holds(sparing):
        return [" ".join(words)]
    budget = 0 if is_begun else largest_budget(sparing, place, settings.batch.token_budget // BUDGET_STEP * BUDGET_STEP)
    return [" ".join([*words, f"--batch.token_budget {budget}"])] if budget else []


def _savings(settings: Settings, ranks: int) -> list[tuple[str, Settings]]:
    """What can be changed without changing the training, and the settings with it."""
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
    """Turn running out of memory into a sentence that says what to change; what `folder` holds of the run is whole."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors, and to speak takes memory too
        savings = " ".join(words for words, _ in _savings(settings, ranks)[-1:])
        again = f"continue with `bertrain resume {quote(str(folder))} {savings}`" if folder else f"try {savings}"
        advice = f"{again}, or begin anew with" if savings else "begin anew with"
        raise UserError(
            f"out of memory ({_first_line(error)}); {advice} a --batch.token_budget under {settings.batch.token_budget}"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    """What the allocator says, without its advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = text.rsplit("DefaultCPUAllocator: ", 1)[-1]
    return text.split(". ")[0].rstrip(".") or type(error).__name__
