"""How much memory a run needs on each rank, from its settings alone; how much there is; what to say if it is too little.

`estimate` counts what is there all the time and what a bin or an update needs on top, by kind. Activations are counted
as the two paths keep them: `tests/unit/test_memory.py` compares every term of the plain path with the bytes of live
tensors, `benchmarks/memory.py` whole runs with the size of their processes, `benchmarks/gpu_memory.py` those on a GPU.

Letters as in bert.py: T tokens of a bin, P predictions, E hidden size, F intermediate size, H heads, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bertrain.data.batching import capacity_for
from bertrain.data.source import DataSource
from bertrain.errors import UserError
from bertrain.settings import ModelSettings, Settings

GIB = 1 << 30
BUDGET_STEP = 64  # token budgets that are found here; 8-bit products want no less
PROCESS = 480 << 20  # Python with torch and the loader's batches, on a CPU
CONTEXT = 1 << 30  # CUDA's context, libraries and their work space, what the allocator cannot use


@dataclass(frozen=True)
class BinSize:
    """What the memory of a bin depends on."""

    tokens: int
    predictions: int
    attended: float
    """To how many tokens one attends, on average."""

    @staticmethod
    def of(settings: Settings, shards: DataSource) -> BinSize:
        """The largest bin that these settings make of this data."""
        data, batch, lengths = settings.data, settings.batch, shards.lengths.astype(float)
        pads = batch.policy == "padded"
        capacity = capacity_for(
            batch.token_budget,
            bin_sequences=batch.bin_sequences,
            mean_length=data.max_seq_length if pads else float(lengths.mean()),
            max_predictions=data.max_predictions,
            mask_probability=data.mask_probability,
        )
        # Padding and the junk at a bin's end are sequences too, of up to max_seq_length.
        attended = data.max_seq_length if pads else float((lengths**2).sum() / lengths.sum())
        return BinSize(batch.token_budget, capacity.predictions, attended)


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank: what is always there, what a bin adds, what an update adds once the bins are done."""

    always: dict[str, int]
    bin: dict[str, int]
    update: int

    @property
    def total(self) -> int:
        return sum(self.always.values()) + max(sum(self.bin.values()), self.update)

    def text(self) -> str:
        """The items, largest first."""
        items = self.always | (self.bin if sum(self.bin.values()) >= self.update else {"the update": self.update})
        by_size = sorted(items.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in by_size if size >= 0.005 * GIB)


def count_parameters(model: ModelSettings) -> tuple[int, int]:
    """Parameters of the whole model, and those of the matrices of its encoder layers."""
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    embeddings = (vocab + model.max_positions + model.num_segments + 2) * width
    matrices = model.num_layers * (4 * width * width + 2 * width * inner)
    other = model.num_layers * (9 * width + inner)
    heads = width * width + 3 * width + vocab + (width * width + 3 * width + 2 if model.nsp else 0)
    return embeddings + matrices + other + heads, matrices


def estimate(settings: Settings, size: BinSize, *, ranks: int, is_fused: bool, on_gpu: bool) -> Estimate:
    """What a rank of this run needs, `size` being its largest bin."""
    parameters, matrices = count_parameters(settings.model)
    share = ranks if settings.optimizer.sharded else 1
    always = {"weights": 4 * parameters, "gradients": 4 * parameters, "moments": 8 * parameters // share}
    if is_fused:
        always["narrow copies of the weights"] = 2 * parameters
        if settings.train.precision == "fp8":
            always["narrow copies of the weights"] += 2 * matrices
    if on_gpu:
        always["the GPU's context"] = CONTEXT
    else:
        always["the process"] = PROCESS
        if settings.checkpoint.enabled:
            always["a checkpoint being written"] = 12 * parameters
    bin = _fused_bin(settings, size) if is_fused else _plain_bin(settings, size, on_gpu)
    return Estimate(always, bin, 0 if is_fused else 12 * parameters // share)


def _plain_bin(settings: Settings, size: BinSize, on_gpu: bool) -> dict[str, int]:
    """What autograd keeps of a forward pass, and what the backward pass needs beside it at its worst."""
    model, tokens = settings.model, size.tokens
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    narrow = settings.train.precision in ("bf16", "fp16")
    one = 2 if narrow else 4  # bytes of a product's operand
    attention = model.num_heads * size.attended
    # Inputs of the four products, queries, keys and values, GELU's input; two sums for LayerNorm; two masks.
    everything = one * (6 * width + 2 * inner) + 8 * width + 2 * width
    # Probabilities, what dropout leaves of them, its mask; a GPU computes the first in 32 bits and casts the second.
    everything += int(attention * (4 + one + 1 if on_gpu else 2 * one + 1))
    products = 4 * width + one * (5 * width + inner)
    kept = {"none": everything, "selective": products, "full": 4 * width}[settings.train.activation_checkpointing]
    again = everything - kept
    scores = size.predictions * vocab
    casts = 2 * count_parameters(model)[0] if narrow else 0
    return {"activations of a bin": tokens * (model.num_layers * kept + 9 * width) + casts} | _larger(
        backward=tokens * (again + max(one * inner + 8 * width, int(2 * one * attention))) + one * scores,
        # Scores, their logarithms, and the gradients of both; after them that of the words.
        scores=scores * (one + 12) + 4 * vocab * width,
    )


def _larger(*, backward: int, scores: int) -> dict[str, int]:
    """What comes on top of the activations: the two are not there at the same time."""
    return {"a layer's backward pass": backward} if backward > scores else {"scores of masked words": scores}


def _fused_bin(settings: Settings, size: BinSize) -> dict[str, int]:
    """The same on the kernels, which keep 16 bits, in fp8 two 8-bit copies beside some, and no probabilities."""
    model, tokens = settings.model, size.tokens
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    eight = settings.train.precision == "fp8"
    products = 14 * width + 2 * inner + 4 * model.num_heads + 8  # with the layer's input; attention's sums, LayerNorm's
    # The first step of fp8 measures: it computes in 16 bits, and casts for nothing.
    everything = products + 2 * width + 2 * inner + 8 + (6 * width + 2 * inner if eight else 0)
    kept = {"none": everything, "selective": products, "full": 2 * width}[settings.train.activation_checkpointing]
    # The last layer computes the rows alone that somebody reads, after attention.
    last = kept if settings.train.activation_checkpointing == "full" else 10 * width + 4 * model.num_heads
    again = everything - kept
    return {"activations of a bin": tokens * ((model.num_layers - 1) * kept + last + 4 * width)} | _larger(
        backward=tokens * (again + 24 * width + 4 * inner + (10 * width if eight else 0)),
        scores=size.predictions * (2 * vocab + 16 * width) + 4 * vocab * width,
    )


# --- how much there is ------------------------------------------------------------------------------


def room(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """Bytes that each rank of this machine may take, and of what."""
    if device.type == "cuda":
        sharing = -(-local_ranks // torch.cuda.device_count())
        name = torch.cuda.get_device_name(device)
        return torch.cuda.get_device_properties(device).total_memory // sharing, _shared_by(f"of {name}", sharing)
    free = [bytes for bytes in (_free_memory(), cgroup_room(Path("/sys/fs/cgroup"))) if bytes is not None]
    if not free:
        return 1 << 62, "unknown here"
    return min(free) // local_ranks, _shared_by("free", local_ranks)


def _shared_by(what: str, ranks: int) -> str:
    return f"{what}, shared by {ranks} ranks" if ranks > 1 else what


def _free_memory() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def cgroup_room(root: Path, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the tightest cgroup around this process, as a container has one, leaves it; None where there is no limit."""
    try:
        path = next(line.split("::", 1)[1] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        path = "/"
    folder = root / path.lstrip("/")
    rooms = []
    for place in (folder, *folder.parents):
        if place.is_relative_to(root):
            rooms.append(_room_in(place))
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
    modes = ("none", "selective", "full")
    for mode in modes[modes.index(settings.train.activation_checkpointing) + 1 :]:
        train = replace(settings.train, activation_checkpointing=mode)
        found.append((f"--train.activation_checkpointing {mode}", replace(settings, train=train)))
    if ranks > 1 and not settings.optimizer.sharded:
        optimizer = replace(settings.optimizer, sharded=True)
        found.append(("--optimizer.sharded true", replace(settings, optimizer=optimizer)))
    return found


@contextmanager
def explaining(settings: Settings, ranks: int, folder: Path | None) -> Iterator[None]:
    """Turn running out of memory into a sentence that says what to change; the run in `folder` stays as it was saved."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        savings = " ".join(words for words, _ in _savings(settings, ranks)[-1:])
        again = f"continue with `bertrain resume {folder} {savings}`" if folder else f"try {savings}"
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
    text = text.rsplit("] . ", 1)[-1].rsplit("DefaultCPUAllocator: ", 1)[-1]
    return text.split(". ")[0].rstrip(".") or type(error).__name__
