"""The time of a training step on any number of GPUs, from the bins of its ranks.

Assumptions:
- A bin's time is linear in its tokens, pairs of tokens, predictions and sequences. Products take their operations at
  the rate of one large product and 45 % of their bytes on top; attention its operations and its bytes; LayerNorm, GELU
  and the optimizer their bytes. Every kernel takes 3.1 us more (launch, filling and draining the GPU), a product half a
  wave of its tiles. The shares are measured on an H200 and taken for all GPUs; a measured step of the same GPU scales
  all of them by one factor.
- bertrain's attention fills the GPU.
- Without CUDA graphs the host launches every kernel, ahead of the GPU: a rank takes the longer of its computation and
  of its launches. Their time is that of Transformers' Trainer where its step does not grow with the batch, for each
  kernel that bertrain has in such a step. It depends on the program: NVIDIA's takes less than half as long.
- A backward pass takes twice as long as a forward pass, and completes gradients at an even rate. Buckets are exchanged
  one after another while it runs, without slowing it. Clipping of each rank's own gradient waits for its end.
- Activation checkpointing: `full` adds a forward pass of the layers; `selective` adds that of GELU and of one LayerNorm
  and, in FP8, the 8-bit copies. What it adds runs in the backward pass.
- NCCL reaches 80 % of a link's stated bandwidth, and takes the fastest of ring, tree and hierarchy. Links are shared
  with nobody.
- All ranks wait for the slowest. Its bins are known; the rest is drawn for every rank and step: from the steps of a
  profile, or from a normal distribution of a given width.
- Reading data, logging and checkpoints are hidden behind computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from bertrain.config.choices import EngineName
from bertrain.config.model_size import attended_pairs, count_parameters
from bertrain.config.settings import Settings
from bertrain.planning import costs
from bertrain.planning.collectives import Group, all_reduce, finish_exchange, gather
from bertrain.planning.devices import Gpu, Network
from bertrain.planning.kernel_limits import has_kernels

Floats = npt.NDArray[np.float64]
Jitter = float | tuple[float, ...]
"""Of a rank's times: the width of a normal distribution, as a share of them, or measured times as multiples of one."""
RANKS_DRAWN = 20_000  # times of ranks in a step, but at least one for each rank: the mean of their slowest
FORWARD = 1 / 3  # of the time of a bin
LAUNCHES = 34, 128, 30
"""Launches of a layer and of the rest of a bin, both ways; and of an update: the 974 of BERT-Large in bf16 in
tests/data/profile-h200. In a layer 26 compute, 8 clear memory for a product."""
FP8_LAUNCHES = 13  # more in a layer in FP8: casts, transposes and scales (tests/data/kineto-h200)
LAYER_PRODUCTS = 12  # of them: four matrices, forward and two gradients
SCORE_COLUMNS = 96  # of a head: as long as their products take softmax and dropout of a score (gpu_sizes.json)
SCATTERED = 10  # times the time of their bytes, that embeddings take: their gradients go to scattered rows
COMPILED = {"bf16": 1.39, "fp16": 1.43, "tf32": 1.75, "fp32": 1.03}
"""Times the fused engine's time, that the compiled engine takes where ours has no kernels: BERT-Base's steps in
benchmarks/results/gpu_portable.json."""
HOST_LAUNCHES = 40, 15, 30  # by which the time of the host is stated, as LAUNCHES
HOST_S = {"eager": 97e-6, "compiled": 54e-6}
"""Seconds of the host for each of HOST_LAUNCHES without CUDA graphs: steps of Transformers' Trainer with a 6-layer
MiniLM on an H200, the same for 32 and 128 sequences (benchmarks/results/gpu_finetune.json)."""
KINDS = "products", "attention", "memory", "launches"
PRODUCTS = (costs.QKV, costs.ATTENTION_OUT, costs.FEED_FORWARD, costs.HEADS)
CHEAP = {costs.GELU: 2 / 5, costs.NORM: FORWARD / 2}  # by tensors: two of GELU's five, one LayerNorm of two
COSTLY = dict.fromkeys((costs.QKV, costs.ATTENTION, costs.ATTENTION_OUT, costs.FEED_FORWARD, costs.NORM), FORWARD)
RECOMPUTED: dict[str, dict[str, float]] = {"none": {}, "selective": CHEAP, "full": CHEAP | COSTLY}
"""Share of each part that the backward pass computes again, by train.activation_checkpointing."""
RECOMPUTED_LAUNCHES = {"none": 0.0, "selective": 2 / LAUNCHES[0], "full": FORWARD}


@dataclass(frozen=True)
class Load:
    """What each rank computes in one step, padding included: one number for each rank."""

    bins: Floats
    tokens: Floats
    pairs: Floats
    predictions: Floats
    sequences: Floats


@dataclass(frozen=True)
class Design:
    """How a program exchanges gradients and updates weights."""

    gradient_bytes: int = 4
    buckets: int = 1
    overlaps: bool = True
    """Whether buckets are exchanged during the backward pass."""
    sharded: Literal["no", "node", "all"] = "no"
    """Which ranks share the update: none, those of a machine, or all."""
    weight_bytes: int = 4
    """Of a parameter that is gathered after a sharded update."""
    copied_bytes: float = 0.0
    """Of each parameter, that every rank reads and writes in a step to copy gradients and weights."""
    is_fused: bool = True
    """Whether the last layer is computed only for the rows that the heads read."""
    launches: float = 1.0
    """Kernels of a bin, as a multiple of bertrain's."""
    slowdown: float = 1.0
    """Factor on the time of all computation, against bertrain's kernels."""
    host_s: float = 0.0
    """Seconds of the host for each of HOST_LAUNCHES, of HOST_S; 0: CUDA graphs replay them."""
    attention: Callable[[Floats, Floats], Floats] | None = None
    """Seconds of attention in each rank's bins and pairs, both passes of all layers; None: as bertrain's takes."""

    @staticmethod
    def of(settings: Settings, engine: EngineName | None = None) -> Design:
        """bertrain's own, with the engine that a GPU has for these settings or another."""
        train, engine = settings.train, engine or ("fused" if has_kernels(settings) else "compiled")
        width = 4 if train.exchange_precision == "fp32" else 2
        buckets = -(-4 * count_parameters(settings.model)[0] // (train.bucket_mb << 20))
        return Design(
            gradient_bytes=width,
            buckets=buckets,
            overlaps=settings.optimizer.clipping != "local",
            sharded="all" if settings.optimizer.sharded else "no",
            is_fused=engine == "fused",
            slowdown=COMPILED.get(train.precision, 1.0) if engine == "compiled" else 1.0,
            host_s=HOST_S["compiled"] if engine == "compiled" else 0.0,
        )


@dataclass(frozen=True)
class Cluster:
    """The devices of a run."""

    gpu: Gpu
    network: Network
    count: int
    per_node: int = 8

    @property
    def group(self) -> Group:
        inside = min(self.count, self.per_node)
        return Group(-(-self.count // inside), inside, self.network)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by where they go."""

    products: float
    attention: float
    memory: float
    launches: float
    host: float
    """In which the GPU waits for the host to launch kernels."""
    imbalance: float
    """The busiest rank's time beyond the mean."""
    stragglers: float
    exchange: float
    """Of gradients and weights, beyond the backward pass."""
    optimizer: float

    @property
    def parts(self) -> dict[str, float]:
        return dict(self.__dict__)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def count_launches(settings: Settings) -> float:
    """Kernels that bertrain launches for a bin."""
    layer = LAUNCHES[0] + (FP8_LAUNCHES if settings.train.precision == "fp8" else 0)
    return _over_layers(settings, layer) + LAUNCHES[1]


def _over_layers(settings: Settings, launches: int) -> float:
    """Launches of all layers, each with so many, and of what they recompute."""
    return (1 + RECOMPUTED_LAUNCHES[settings.train.activation_checkpointing]) * launches * settings.model.num_layers


def _score_time(head: int) -> float:
    """Time of attention's operations with this head size, as a multiple of that with heads of 64.

    Every score costs its products, which grow with the head, and its softmax and dropout, which do not.
    """
    return ((head + SCORE_COLUMNS) / head) / ((64 + SCORE_COLUMNS) / 64)


def _seconds_of(settings: Settings, size: costs.WorkSize, gpu: Gpu, design: Design) -> Floats:
    """Seconds of one bin of this size: products, attention, memory-bound kernels, launches."""
    precision, model = settings.train.precision, settings.model
    what = settings.train.activation_checkpointing
    once = costs.required_costs(settings, size, is_fused=design.is_fused)
    parts = {part: (1 + RECOMPUTED[what].get(part, 0.0)) * cost for part, cost in once.items()}
    wide = "bf16" if precision == "fp8" else precision
    products = 0.0
    for part in PRODUCTS:
        operations, moved = parts[part]
        is_heads = part == costs.HEADS
        rate = gpu.rate(wide if is_heads else precision)
        products += operations / rate + (1.0 if is_heads else gpu.exposed_bytes) * moved / gpu.memory
    operations, moved = parts[costs.ATTENTION]
    operations *= _score_time(model.hidden_size // model.num_heads)
    attention = operations / (gpu.attention_share * gpu.rate(wide)) + moved / gpu.memory
    moved = parts[costs.NORM][1] + parts[costs.GELU][1] + SCATTERED * parts[costs.EMBEDDINGS][1]
    memory = moved / gpu.memory
    if precision == "fp8":  # 8-bit copies, as they lie and transposed, of what products read
        forward = 6 * model.hidden_size + 2 * model.intermediate_size
        backward = 10 * model.hidden_size + 2 * model.intermediate_size + (forward if what != "none" else 0)
        memory += size.tokens * model.num_layers * (forward + backward) / gpu.memory
    products_run = LAYER_PRODUCTS * (1 + FORWARD if what == "full" else 1)
    tails = products_run * model.num_layers * (gpu.half_wave_s(precision) - gpu.fill_s)
    launches = design.launches * count_launches(settings) * (gpu.launch_s + gpu.fill_s) + tails
    return np.array([products, attention, memory, launches])


def compute_seconds(settings: Settings, load: Load, gpu: Gpu, design: Design) -> Floats:
    """Seconds of each rank's bins, one row for each rank: products, attention, memory-bound kernels, launches."""
    model = settings.model
    # Time is linear in the pairs that attend to each other, so those outside of windows are taken out first.
    pairs = attended_pairs(model, load.tokens, load.pairs) / model.num_layers
    settings = replace(settings, model=replace(model, global_every=1))
    empty = _seconds_of(settings, costs.WorkSize(), gpu, design)

    def each(size: costs.WorkSize) -> Floats:
        return _seconds_of(settings, size, gpu, design) - empty

    units = [each(costs.WorkSize(**{name: 1e6})) / 1e6 for name in ("tokens", "pairs", "predictions", "sequences")]
    sizes = (load.tokens, pairs, load.predictions, load.sequences)
    found = np.outer(load.bins, empty) + sum(np.outer(size, unit) for size, unit in zip(sizes, units, strict=True))
    if design.attention is not None:
        found[:, KINDS.index("attention")] = design.attention(load.bins, pairs)
    return np.asarray(gpu.slowdown * design.slowdown * found)


def host_seconds(settings: Settings, load: Load, design: Design) -> Floats:
    """Seconds in which the host launches the kernels of each rank's bins."""
    return design.host_s * (_over_layers(settings, HOST_LAUNCHES[0]) + HOST_LAUNCHES[1]) * load.bins


def optimizer_seconds(settings: Settings, cluster: Cluster, design: Design) -> float:
    """The update of a rank's share of the weights, the norm of the whole gradient, and copies."""
    operations, moved = costs.required_costs(settings, costs.WorkSize(), is_fused=design.is_fused)[costs.OPTIMIZER]
    share = {"no": 1, "node": cluster.group.per_node, "all": cluster.count}[design.sharded]
    wide = settings.train.precision if settings.train.precision in costs.NARROW else "fp32"
    work = operations / cluster.gpu.rate("bf16" if wide == "fp8" else wide) + moved / cluster.gpu.memory
    copies = design.copied_bytes * count_parameters(settings.model)[0] / cluster.gpu.memory
    on_gpu = work / share + copies + LAUNCHES[2] * (cluster.gpu.launch_s + cluster.gpu.fill_s)
    return max(on_gpu, HOST_LAUNCHES[2] * design.host_s)


def exchange_seconds(parameters: int, cluster: Cluster, design: Design, backward_s: float) -> float:
    """Seconds that the exchange of gradients, and of weights after a sharded update, adds to the computation."""
    group = cluster.group
    if group.size == 1:
        return 0.0
    bucket = design.gradient_bytes * parameters / design.buckets
    if design.sharded == "all" or (design.sharded == "node" and group.nodes == 1):
        each = gather(bucket, group)  # a reduce-scatter
    else:
        each = all_reduce(bucket, group)
    ready = [backward_s * (number + 1) / design.buckets if design.overlaps else backward_s
             for number in range(design.buckets)]  # fmt: skip
    exposed = finish_exchange(ready, each) - backward_s + all_reduce(0, group)  # of the norm and the sums of the loss
    holders = {"no": None, "node": group.machine, "all": group}[design.sharded]
    return exposed + (gather(design.weight_bytes * parameters, holders) if holders is not None else 0.0)


def _slowest(seconds: Floats, jitter: Jitter, draw: np.random.Generator) -> float:
    """The expected time of the slowest of these ranks."""
    if len(seconds) == 1:
        return float(seconds[0])
    shape = -(-RANKS_DRAWN // len(seconds)), len(seconds)
    factors = draw.choice(jitter, shape) if isinstance(jitter, tuple) else 1 + jitter * draw.standard_normal(shape)
    return float((seconds * factors).max(axis=1).mean())


def step_time(
    settings: Settings, loads: list[Load], cluster: Cluster, design: Design, *, jitter: Jitter, seed: int = 0
) -> StepTime:
    """The mean step over some steps' loads."""
    parameters, _ = count_parameters(settings.model)
    draw, found = np.random.default_rng(seed), []
    for load in loads:
        by_kind = compute_seconds(settings, load, cluster.gpu, design)
        computing = by_kind.sum(axis=1)
        own = np.maximum(computing, host_seconds(settings, load, design))
        slowest = _slowest(own, jitter, draw)
        backward = (1 - FORWARD) * slowest / max(1.0, float(load.bins.max()))  # of the last bin: only it sends
        found.append(
            StepTime(
                **dict(zip(KINDS, by_kind.mean(axis=0).tolist(), strict=True)),
                host=float((own - computing).mean()),
                imbalance=float(own.max() - own.mean()),
                stragglers=slowest - float(own.max()),
                exchange=exchange_seconds(parameters, cluster, design, backward),
                optimizer=optimizer_seconds(settings, cluster, design),
            )
        )
    return StepTime(**{name: float(np.mean([one.parts[name] for one in found])) for name in found[0].parts})


def calibrated(
    settings: Settings, loads: list[Load], cluster: Cluster, design: Design, measured_s: float, *, jitter: Jitter
) -> Gpu:
    """The GPU with the slowdown at which a step takes `measured_s`."""
    low, high = 0.05, 20.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        gpu = replace(cluster.gpu, slowdown=middle)
        took = step_time(settings, loads, replace(cluster, gpu=gpu), design, jitter=jitter).seconds
        low, high = (middle, high) if took < measured_s else (low, middle)
    return replace(cluster.gpu, slowdown=(low * high) ** 0.5)
