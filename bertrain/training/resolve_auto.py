"""What `auto` means: settled once, when a run begins, kept in its config.json, and said with the reason.

`train.precision auto` goes by the hardware, `batch.auto` by the memory: the estimate's largest bin, on a GPU tried out.
`train.seed -1` is the system's entropy.
"""

from __future__ import annotations

import gc
import secrets
from dataclasses import replace
from pathlib import Path

import torch

from bertrain.base.errors import AgreedError
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.source import DataSource
from bertrain.planning.memory import GIB
from bertrain.planning.memory_fit import (
    BUDGET_STEP,
    Place,
    count_local_ranks,
    is_out_of_memory,
    largest_budget,
    refuse_too_little,
    room,
    smallest_budget,
    with_budget,
)
from bertrain.ranks import parallel
from bertrain.run.folder import Run
from bertrain.training import engine
from bertrain.training.precision import choose_precision
from bertrain.training.state import TrainState

SEED_BITS = 31  # so that every program that reads a log can hold it
FILLED = 0.9  # of a CPU's free memory
FILLED_GPU = 0.97  # of a GPU's: its allocator loses the rest to the holes between tensors
STEP_DOWN = 1 / 8  # of the estimate's budget, after each trial that did not fit


def settle(settings: Settings, run: str | Path | None) -> tuple[Settings, list[str]]:
    """Settings without `train.precision auto`, as this machine means it or as `run`, if it is there, was begun.

    A run that is there keeps the token budget that `batch.auto` found for it, too. Also returns what to say of it.
    """
    begun = Run.open(run).settings if run is not None and (Path(run) / "config.json").is_file() else None
    notes = []
    if settings.train.precision == "auto":
        device, _ = parallel.choose_device(settings.train.device)
        precision, reason = choose_precision(settings.train, device)
        chosen, why = (begun.train.precision, "as the run was begun") if begun else (precision, reason)
        settings = replace(settings, train=replace(settings.train, precision=chosen))
        notes.append(f"train.precision auto: {chosen} ({why})")
    if settings.train.seed < 0 and begun:
        settings = with_seed(settings, begun.train.seed)
    if settings.batch.auto and begun:
        settings = with_budget(settings, begun.batch.token_budget)
        notes.append(f"batch.auto: a token_budget of {begun.batch.token_budget:,}, as the run was begun")
    return settings, notes


def draw_seed(settings: Settings, ranks: parallel.Ranks) -> tuple[Settings, list[str]]:
    """Under `train.seed -1`, settings with a seed that the first rank drew from the system's entropy."""
    if settings.train.seed >= 0:
        return settings, []
    settings = with_seed(settings, ranks.broadcast_int(secrets.randbits(SEED_BITS)))
    return settings, [f"train.seed -1: {settings.train.seed} (drawn from the system's entropy)"]


def with_seed(settings: Settings, seed: int) -> Settings:
    return replace(settings, train=replace(settings.train, seed=seed))


def place_for(settings: Settings, shards: DataSource, world: int) -> Place:
    """Where each of `world` ranks is to fit in; a rank's own share of this machine's memory."""
    device, _ = parallel.choose_device(settings.train.device)
    bytes, words = room(device, count_local_ranks(world))
    is_fused, _ = engine.choose(settings, device)
    return Place(shards, world, is_fused, device.type == "cuda", bytes, words)


def check_memory(settings: Settings, shards: DataSource, world: int, *, is_begun: bool) -> None:
    """Refuse a run that does not fit into memory; one whose budget is still to be found, if not even the least does."""
    finds_budget = settings.batch.auto and not is_begun
    asked = with_budget(settings, smallest_budget(settings)) if finds_budget else settings
    refuse_too_little(asked, place_for(settings, shards, world), is_begun=is_begun or finds_budget)


def estimate_token_budget(settings: Settings, place: Place) -> int:
    """The largest token budget up to a rank's share of a step that the estimate says will fit; 0 if none does."""
    # There is no trial on a CPU, and others may want some of its memory.
    careful = replace(place, bytes=int((FILLED_GPU if place.on_gpu else FILLED) * place.bytes))
    return largest_budget(settings, careful, share_of_a_step(settings, place))


def find_token_budget(settings: Settings, shards: DataSource, ranks: parallel.Ranks) -> tuple[Settings, list[str]]:
    """Under `batch.auto`, settings with the largest token budget that every rank can compute, and what to say of it."""
    if not settings.batch.auto:
        return settings, []
    place = place_for(settings, shards, ranks.world)
    budget = expected = estimate_token_budget(settings, place)
    if place.on_gpu:
        while budget > 0 and not _is_computed(with_budget(settings, budget), shards, ranks.device):
            budget -= max(1, int(STEP_DOWN * expected) // BUDGET_STEP) * BUDGET_STEP
    budget = -ranks.all_max(-budget)
    if budget < settings.data.max_seq_length:
        raise AgreedError(
            "batch.auto found no token_budget that fits into memory; use --train.activation_checkpointing full, or a "
            "smaller model"
        )
    settings = with_budget(settings, budget)
    is_whole = budget == share_of_a_step(settings, place)
    limit = "a rank's share of a step" if is_whole else f"{place.bytes / GIB:.1f} GiB {place.words}"
    need = place.needs(settings).total / GIB
    return settings, [f"batch.auto: a token_budget of {budget:,}, about {need:.1f} GiB (limited by {limit})"]


def share_of_a_step(settings: Settings, place: Place) -> int:
    """Tokens that a rank has of a step, when they come out even, and one example more: a multiple of 64."""
    batch, longest = settings.batch, settings.data.max_seq_length
    of_an_example = longest if batch.policy == "padded" else float(place.shards.lengths.mean())
    tokens = (batch.tokens or batch.sequences * of_an_example) / place.ranks + longest
    return -(-int(tokens) // BUDGET_STEP) * BUDGET_STEP


def _is_computed(settings: Settings, shards: DataSource, device: torch.device) -> bool:
    """Try out a full bin on a GPU, forward and backward: as it is, as a CUDA graph, and as it is beside the graph."""
    tried = replace(settings, batch=replace(settings.batch, sequences=0, tokens=settings.batch.token_budget))
    step = Loader(shards, tried).step(0, 0)
    largest = max(step.bins, key=lambda batch: len(batch.input_ids))
    try:
        state: TrainState | None = TrainState.build(settings, parallel.Ranks(0, 1, device))
        assert state is not None
        state.engine.restore({})
        for bins in (1, 1, 2):
            state.engine.begin(bins)
            for _ in range(bins):
                state.engine.add_bin(largest, step, is_last=False)
            state.engine.update(0.0)
        torch.cuda.synchronize(device)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        state = None
        gc.collect()
        torch.cuda.empty_cache()
