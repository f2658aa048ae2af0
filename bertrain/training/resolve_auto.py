"""Resolves `auto` and 0: once, when a run begins. The values are kept in its config.json and printed with the reason.

`train.precision auto` follows the hardware. `batch.auto` follows the memory: the largest bin of the estimate, which a
GPU then tries out. `train.seed -1` draws from the system's entropy.
"""

from __future__ import annotations

import gc
import os
import secrets
from dataclasses import replace

import torch

from bertrain.base.errors import AgreedError
from bertrain.base.formatting import GIB
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.source import DataSource
from bertrain.planning import memory_fit
from bertrain.planning.time_budget import with_fits
from bertrain.ranks import parallel
from bertrain.run.folder import Run
from bertrain.training import engine
from bertrain.training.precision import choose_precision
from bertrain.training.state import TrainState
from bertrain.training.task_settings import in_steps

SEED_BITS = 31  # fits a signed 32-bit integer
FILLED = 0.9  # of a CPU's free memory
FILLED_GPU = 0.97  # of a GPU's: its allocator loses the rest to the holes between tensors
STEP_DOWN = 1 / 8  # of the estimate's budget, after each trial that did not fit


def resolve_auto(settings: Settings, begun: Run | None = None) -> tuple[Settings, list[str]]:
    """Settings without `train.precision auto`, and notes to print about them.

    A `begun` run keeps its precision, its seed, its token budget and, under `train.budget`, its number of steps.
    """
    notes = []
    if settings.train.precision == "auto":
        if begun is not None:
            precision, reason = begun.settings.train.precision, "as the run began"
        else:
            device, _ = parallel.choose_device(settings.train.device)
            precision, reason = choose_precision(settings.train, device)
        settings = replace(settings, train=replace(settings.train, precision=precision))
        notes.append(f"train.precision auto: {precision} ({reason})")
    if begun is None:
        return settings, notes
    if settings.train.seed < 0:
        settings = replace(settings, train=replace(settings.train, seed=begun.settings.train.seed))
    if settings.batch.auto:
        token_budget = begun.settings.batch.token_budget
        settings = memory_fit.with_budget(settings, token_budget)
        notes.append(f"batch.auto: bins of up to {token_budget:,} tokens, as the run began")
    return with_fits(settings, begun), notes


def fit_to_data(settings: Settings, data: DataSource) -> tuple[Settings, list[str]]:
    """Settings of pre-training with sizes and epochs taken from the data, and a note about them."""
    model, sizes, taken = settings.model, settings.data, []
    if not model.vocab_size:
        model = replace(model, vocab_size=len(data.vocabulary.words))
        taken.append(f"model.vocab_size {model.vocab_size:,}")
    if not sizes.max_seq_length:
        sizes = replace(sizes, max_seq_length=data.max_seq_length)
        taken.append(f"data.max_seq_length {data.max_seq_length}")
    if not sizes.max_predictions:
        sizes = replace(sizes, max_predictions=data.max_predictions or sizes.usual_predictions())
        taken.append(f"data.max_predictions {sizes.max_predictions}")
    settings = replace(settings, model=model, data=sizes)
    if settings.train.epochs:
        settings = in_steps(settings, len(sizes.rows(len(data))), float(data.lengths.mean()))
        taken.append(f"train.max_steps {settings.train.max_steps:,} ({settings.train.epochs:g} epochs)")
    return settings.check(), [f"from the data: {', '.join(taken)}"] if taken else []


def draw_seed(settings: Settings, ranks: parallel.Ranks) -> tuple[Settings, list[str]]:
    """Under `train.seed -1`, settings with a seed that the first rank draws, and a note about it."""
    if settings.train.seed >= 0:
        return settings, []
    seed = ranks.broadcast_int(secrets.randbits(SEED_BITS))
    settings = replace(settings, train=replace(settings.train, seed=seed))
    return settings, [f"train.seed -1: {seed} (drawn from the system's entropy)"]


def place_for(settings: Settings, data: DataSource, world: int) -> memory_fit.Place:
    """The memory that each of `world` ranks has: its share of its device or of this machine."""
    device, _ = parallel.choose_device(settings.train.device)
    bytes, label = memory_fit.available_memory(device, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    name, _ = engine.choose(settings, device)
    return memory_fit.Place(data, world, name, device.type == "cuda", bytes, label)


def check_memory(settings: Settings, data: DataSource, world: int, *, is_begun: bool) -> None:
    """Refuse a run that does not fit into memory; under `batch.auto`, one that does not with the smallest budget."""
    finds_budget = settings.batch.auto and not is_begun
    tried = memory_fit.with_budget(settings, memory_fit.smallest_budget(settings)) if finds_budget else settings
    memory_fit.refuse_too_little(tried, place_for(settings, data, world), is_begun=is_begun or finds_budget)


def estimate_token_budget(settings: Settings, place: memory_fit.Place) -> int:
    """The largest token budget, up to a rank's share of a step, that fits by the estimate; 0 if none does."""
    # A CPU does not try it out, and other processes may need some of its memory.
    careful = replace(place, bytes=int((FILLED_GPU if place.on_gpu else FILLED) * place.bytes))
    return memory_fit.largest_budget(settings, careful, share_of_a_step(settings, place))


def find_token_budget(settings: Settings, data: DataSource, ranks: parallel.Ranks) -> tuple[Settings, list[str]]:
    """Under `batch.auto`, settings with the largest token budget that every rank can compute, and a note about it."""
    if not settings.batch.auto:
        return settings, []
    place = place_for(settings, data, ranks.world)
    budget = expected = estimate_token_budget(settings, place)
    if place.on_gpu:
        while budget > 0 and not _can_compute(memory_fit.with_budget(settings, budget), data, ranks.device):
            budget -= max(1, int(STEP_DOWN * expected) // memory_fit.BUDGET_STEP) * memory_fit.BUDGET_STEP
    budget = -ranks.all_max(-budget)
    if budget < settings.data.max_seq_length:
        cure = "use --train.activation_checkpointing full, or a smaller model"
        raise AgreedError("out-of-memory", f"batch.auto found no token_budget that fits into memory; {cure}")
    settings = memory_fit.with_budget(settings, budget)
    is_whole = budget == share_of_a_step(settings, place)
    limit = "a rank's share of a step" if is_whole else f"what fits into {place.bytes / GIB:.1f} GiB {place.label}"
    need = place.needs(settings).total / GIB
    return settings, [f"batch.auto: bins of up to {budget:,} tokens, {limit}; about {need:.1f} GiB"]


def share_of_a_step(settings: Settings, place: memory_fit.Place) -> int:
    """Tokens of an even share of a step for each rank, and of one example more; a multiple of 64."""
    batch, longest = settings.batch, settings.data.max_seq_length
    per_example = longest if batch.policy == "padded" else float(place.data.lengths.mean())
    tokens = (batch.tokens or batch.sequences * per_example) / place.ranks + longest
    return -(-int(tokens) // memory_fit.BUDGET_STEP) * memory_fit.BUDGET_STEP


def _can_compute(settings: Settings, data: DataSource, device: torch.device) -> bool:
    """Try a full bin on a GPU, forward and backward: without a CUDA graph, as one, and without beside the graph."""
    batch = settings.batch.without_ramp()
    tried = replace(settings, batch=replace(batch, sequences=0, tokens=batch.token_budget, shares=""))
    step = Loader(data, tried).step(0, 0)
    number = max(range(len(step.bins)), key=lambda number: len(step.bins[number].input_ids))
    largest, place = step.bins[number], step.places[number]
    try:
        state: TrainState | None = TrainState.build(settings, parallel.Ranks(0, 1, device))
        assert state is not None
        state.engine.restore({})
        for bins in (1, 1, 2):
            state.engine.begin(replace(step, bins=[largest] * bins, places=[place] * bins))
            for _ in range(bins):
                state.engine.add_bin(largest, step, is_last=False)
            state.engine.update(0.0)
        torch.cuda.synchronize(device)
        return True
    except RuntimeError as error:
        if not memory_fit.is_out_of_memory(error):
            raise
        return False
    finally:
        state = None
        gc.collect()
        torch.cuda.empty_cache()
