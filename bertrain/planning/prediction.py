"""What is said of a run before it starts: its step time and its end, on GPUs of the table or on this CPU.

No table has the speed of a CPU. A product and a copy give its two rates, and one bin that the run's own engine has
computed scales the time of all computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from bertrain.base import isa
from bertrain.base.formatting import counted
from bertrain.config.choices import EngineName
from bertrain.config.settings import Settings
from bertrain.data.feed.step_size import StepSize
from bertrain.model.batch import Batch
from bertrain.planning.convergence import TARGET, has_points, is_mlperfs, samples_to_target
from bertrain.planning.devices import Gpu, find_gpu, find_network, with_ceilings
from bertrain.planning.plan import (
    DRAWN,
    START_UP_S,
    AnyInts,
    covers_engine,
    deal_steps,
    global_batch,
    mean_of,
    steps_of,
    time_text,
)
from bertrain.planning.speed import Ceilings, measure_ceilings
from bertrain.planning.step_time import Cluster, Design, Load, compute_seconds, step_time

JITTER = 0.01  # of the ranks' times
RATES_S = 0.02  # to measure each rate of a CPU


@dataclass(frozen=True)
class Prediction:
    """The step time and the end of a run."""

    devices: str
    step_s: float
    steps: int | None
    """None: as many as fit into train.budget."""
    full_steps: float
    """As many full steps as have the examples of all steps."""
    until: str = ""
    start_up_s: float = START_UP_S

    def text(self) -> str:
        seconds = self.start_up_s + self.full_steps * self.step_s
        end = f", {time_text(seconds)} for {self.steps:,} steps" if self.steps else ""
        return f"time by `bertrain plan` for {self.devices}: {1e3 * self.step_s:.1f} ms a step{end}{self.until}"


def predict_run(settings: Settings, lengths: AnyInts, gpu: Gpu, count: int, per_node: int) -> Prediction | None:
    """A run on `count` GPUs; None for one that plans do not cover. Memory is not checked.

    `lengths` are those of all examples.
    """
    train = settings.train
    if train.precision == "auto":
        train = replace(train, precision="bf16" if "bf16" in gpu.products else "fp32")
        settings = replace(settings, train=train)
    if settings.task.name or train.precision not in gpu.products or not covers_engine(settings):
        return None
    cluster = Cluster(gpu, find_network("", gpu, per_node), count, per_node)
    nodes = -(-count // per_node)
    devices = f"{count:,} {gpu.name}" + (
        f" in {nodes:,} machines over {cluster.network.name}, which is assumed" if nodes > 1 else ""
    )
    return _predict(settings, lengths, cluster, Design.of(settings), Prediction(devices, 0.0, None, 0.0))


@dataclass(frozen=True)
class BinTime:
    """One bin of a model, as one rank of this machine has computed it, and the rates of this rank's threads."""

    settings: Settings
    load: Load
    engine: EngineName
    rates: Ceilings
    seconds: float
    exchange_s: float | None = None
    """Seconds from its end to that of the exchange of gradients; None: there was no exchange."""

    @staticmethod
    def of(settings: Settings, batch: Batch, engine: EngineName, seconds: float, exchange_s: float | None) -> BinTime:
        pairs = sum(length**2 for length in batch.sequence_lengths)
        sizes = 1, len(batch.input_ids), pairs, len(batch.mlm_labels), len(batch.nsp_labels)
        load = Load(*(np.array([float(size)]) for size in sizes))
        rates = _rates(settings.train.precision, torch.get_num_threads())
        return BinTime(settings, load, engine, rates, seconds, exchange_s)

    @property
    def design(self) -> Design:
        """A CPU launches no kernels, so compiled and plain computation differ only by the measured time."""
        return Design.of(self.settings, "fused" if self.engine == "fused" else "plain")


def predict_on_cpu(settings: Settings, lengths: AnyInts, ranks: int, measured: BinTime) -> Prediction | None:
    """A run on ranks like the one that has computed a bin of it; None for fine-tuning."""
    if settings.task.name:
        return None
    cpu = cpu_like(settings.train.precision, measured.rates)
    expected = float(compute_seconds(measured.settings, measured.load, cpu, measured.design).sum())
    cpu = replace(cpu, slowdown=measured.seconds / expected)
    devices = f"{counted(ranks, 'rank')} on this CPU"
    if ranks > 1 and measured.exchange_s is None:
        devices += ", without their exchange"
    blank = Prediction(devices, 0.0, None, 0.0, start_up_s=0.0)
    cluster = Cluster(cpu, find_network("", cpu, ranks), ranks, ranks)
    return _predict(settings, lengths, cluster, measured.design, blank, exchange_s=measured.exchange_s or 0.0)


def cpu_like(precision: str, ceilings: Ceilings) -> Gpu:
    """A CPU of these rates; all else that a plan needs is an H200's, without launches, tiles or a limit of memory."""
    like = replace(find_gpu("h200"), name="CPU", launch_s=0.0, fill_s=0.0, processors=0, memory_bytes=1 << 62)
    like = replace(like, products=dict.fromkeys(like.products, ceilings.operations_per_s))
    return with_ceilings(like, precision, ceilings.operations_per_s, ceilings.bytes_per_s)


@cache
def _rates(precision: str, threads: int) -> Ceilings:
    """The rates of this process with `threads` threads; without AMX, measuring products in bf16 would take seconds."""
    fast = "bf16" if precision == "bf16" and isa.usable("auto") == "amx" else "fp32"
    return measure_ceilings(torch.device("cpu"), fast, seconds=RATES_S)


def _predict(
    settings: Settings, lengths: AnyInts, cluster: Cluster, design: Design, blank: Prediction,
    *, exchange_s: float | None = None,
) -> Prediction:  # fmt: skip
    """`blank` with its step time and end; a sample of the lengths is dealt into bins. `exchange_s`: as measured."""
    some = lengths[:: 1 + len(lengths) // DRAWN].astype(np.int64)
    loads, sequences = deal_steps(settings, some, cluster.count, steps=1)
    sizes = StepSize.of(settings.batch, mean_of(some))
    step = step_time(settings, loads, cluster, design, jitter=JITTER)
    if exchange_s is not None:
        step = replace(step, exchange=exchange_s)
    batch, steps, until = global_batch(settings, sequences), steps_of(settings, sizes), ""
    if settings.evaluate.target_accuracy == TARGET and is_mlperfs(settings) and has_points(batch):
        steps = math.ceil(samples_to_target(batch) / batch)
        until = f" to {TARGET:g} by MLPerf's convergence points"
    return replace(blank, step_s=step.seconds, steps=steps, full_steps=sizes.full_steps(steps or 0), until=until)
