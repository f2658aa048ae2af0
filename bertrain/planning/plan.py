"""A run planned before anybody pays: step time, steps, hours and money for some number of GPUs, and backwards.

bertrain's bins are a pure function of the lengths, so what each of thousands of ranks computes is known without them.
step_time.py has the model and its assumptions. A run is its steps, the evaluations between them, and a start-up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.config.choices import MASK_PROBABILITY, EngineName, PolicyName
from bertrain.config.settings import BatchSettings, Settings
from bertrain.data.feed.balance import per_rank
from bertrain.data.feed.batching import bin_capacity, choose_policy, step_rows, strata_of
from bertrain.data.feed.step_size import StepSize
from bertrain.data.formats.masking import Ints, count_predictions
from bertrain.data.formats.pack import read_lengths
from bertrain.data.formats.source import DataSource
from bertrain.planning.convergence import mlperf_interval, refuse_other_model, samples_to_target
from bertrain.planning.kernel_limits import has_kernels
from bertrain.planning.memory_fit import BUDGET_STEP, Place, refuse_too_little, smallest_budget, with_budget
from bertrain.planning.step_time import (
    FORWARD,
    Cluster,
    Design,
    Jitter,
    Load,
    StepTime,
    compute_seconds,
    host_seconds,
    step_time,
)

AnyInts = npt.NDArray[np.signedinteger[Any]]
STEPS = 3  # that are dealt into bins for a plan
DRAWN = 200_000  # lengths drawn from a histogram
START_UP_S = 0.6  # within the run: the first 150,000 samples of NVIDIA's 8 H200 take that much longer than the next
TUNED_POLICIES: tuple[PolicyName, ...] = ("budget", "exchange", "packed")
TUNED = "token_budget", "policy", "group_size", "shares", "bin_sequences"
"""The settings of the batch that `best_batching` sets."""
MUCH_IDLE = 0.25  # of the ranks' time
SAME_BATCH = 0.05  # by which a step's sequences may differ from their nominal number
EVALUATED = 10_000  # MLPerf's evaluation set
MLPERF_LENGTHS = Path(str(files("bertrain.planning").joinpath("mlperf-lengths.csv")))
"""The published histogram of the lengths of MLPerf's Wikipedia at 512 tokens."""


def lengths_of(table: Path, longest: int) -> Ints:
    """Lengths drawn from a .csv with the columns length and sequences, of those up to `longest`."""
    histogram = read_lengths(table)[: longest + 1]
    if not histogram.sum():
        raise UserError("empty-data", f"{table} has no sequence of {longest} tokens or fewer")
    return np.random.default_rng(0).choice(len(histogram), DRAWN, p=histogram / histogram.sum())


def mean_of(lengths: Ints) -> Fraction:
    return Fraction(int(lengths.sum()), len(lengths))


def deal_steps(settings: Settings, lengths: Ints, ranks: int, steps: int = STEPS) -> tuple[list[Load], float]:
    """What each rank computes in some full steps, by the recipe's policy, and the mean sequences of a step."""
    batch, data = settings.batch, settings.data
    policy = choose_policy(batch.policy, group_size=batch.group_size, packing=batch.packing)
    mean = float(mean_of(lengths))
    capacity, narrow = bin_capacity(settings, mean), lengths.astype(np.int32)
    strata = strata_of(narrow, settings)
    loads, position = list[Load](), 0
    for _ in range(steps):
        _, rows = step_rows(position, settings, narrow, mean, strata)
        position += len(rows)
        sizes = lengths[rows], count_predictions(lengths[rows], data.max_predictions, data.mask_probability)
        bins = policy.deal(*sizes, capacity, data.max_seq_length)
        of_bins = [(1, *measured) for measured in policy.measure(bins, *sizes, capacity, data.max_seq_length)]
        loads.append(Load(*per_rank(of_bins, ranks).T.astype(float)))
    return loads, position / steps


def global_batch(settings: Settings, sequences: float) -> float:
    """Sequences of a step: the nominal number, unless examples of other lengths make it `sequences`."""
    nominal = settings.nominal_sequences
    return nominal if nominal and abs(sequences / nominal - 1) < SAME_BATCH else sequences


def steps_of(settings: Settings, sizes: StepSize) -> int | None:
    """Those of the recipe, or fewer for train.max_samples; None for as many as fit into train.budget."""
    steps, most = settings.train.last_step(), settings.train.max_samples
    return min(steps, math.ceil(sizes.steps_for(most))) if steps and most else steps


def full_bins(settings: Settings, tokens: float, bins: float, lengths: Ints) -> Load:
    """One rank's full bins of examples of these lengths, as `bertrain profile` computes them."""
    squares = float((lengths.astype(float) ** 2).sum() / lengths.sum())
    sizes = bins, tokens, tokens * squares, settings.data.mask_probability * tokens, tokens / float(lengths.mean())
    return Load(*(np.array([float(size)]) for size in sizes))


@dataclass(frozen=True)
class Wish:
    """What a plan is asked for."""

    settings: Settings
    lengths: Ints
    cluster: Cluster
    """Its `count` is replaced by each number of GPUs that is tried."""
    target: float = 0.0
    """Masked-word accuracy to train to, by MLPerf's convergence points; 0: the recipe's steps."""
    jitter: Jitter = 0.01
    price: float = 0.0
    """Of one GPU for an hour."""


@dataclass(frozen=True)
class Plan:
    """A run on `count` GPUs."""

    count: int
    batch: BatchSettings
    step: StepTime
    idle: float
    """Share of the ranks' time in which they wait for the busiest."""
    sequences_per_step: float
    steps: int
    start_up_s: float
    evaluation_s: float
    """Of all evaluations."""
    seconds: float
    gpu_hours: float
    price: float

    @property
    def sequences_per_s(self) -> float:
        """While it trains."""
        return self.sequences_per_step / self.step.seconds

    def facts(self) -> dict[str, Any]:
        parts = {name: round(1e3 * seconds, 4) for name, seconds in self.step.parts.items()}
        named = {name: value for name, value in self.__dict__.items() if name not in ("batch", "step")}
        return {name: getattr(self.batch, name) for name in TUNED} | named | {
            "step_ms": 1e3 * self.step.seconds, "parts_ms": parts, "sequences_per_s": self.sequences_per_s
        }  # fmt: skip


def make_plan(wish: Wish, count: int) -> Plan:
    """The run on `count` GPUs; refuses one that does not fit into their memory."""
    settings, cluster = wish.settings, replace(wish.cluster, count=count)
    design = Design.of(settings)
    refuse_too_little(settings, place_of(wish, count), is_begun=False)
    loads, sequences = deal_steps(settings, wish.lengths, count)
    step = step_time(settings, loads, cluster, design, jitter=wish.jitter)
    sizes = StepSize.of(settings.batch, mean_of(wish.lengths))
    batch = global_batch(settings, sequences)
    if wish.target:
        refuse_other_model(settings)
        samples = samples_to_target(batch, wish.target)
        steps = math.ceil(sizes.steps_for(samples) if settings.batch.ramp_tokens else samples / sequences)
        evaluations = samples / mlperf_interval(batch)
    else:
        steps = steps_of(settings, sizes) or 0
        if not steps:
            raise UserError("no-steps-to-plan", "the recipe trains for a time, not for steps; set --train.max_steps")
        evaluate = settings.evaluate
        every = mlperf_interval(settings.nominal_sequences) if evaluate.rule == "mlperf" else evaluate.every_samples
        evaluations = sizes.full_steps(steps) * sequences / every if settings.evaluates and every else 0.0
    examples = EVALUATED if wish.target else settings.evaluate.max_examples or EVALUATED
    evaluation = evaluations * evaluation_seconds(settings, cluster, design, examples)
    seconds = START_UP_S + sizes.full_steps(steps) * step.seconds + evaluation
    hours = count * seconds / 3600
    waiting = step.imbalance / (step.seconds - step.exchange - step.optimizer - step.stragglers)
    return Plan(count, settings.batch, step, waiting, sequences, steps, START_UP_S, evaluation, seconds, hours,
                hours * wish.price)  # fmt: skip


def place_of(wish: Wish, count: int) -> Place:
    """The memory of one of `count` GPUs."""
    source, gpu = DataSource(), wish.cluster.gpu
    source.lengths = wish.lengths.astype(np.int32)
    engine: EngineName = "fused" if has_kernels(wish.settings) else "compiled"
    return Place(source, count, engine, True, gpu.memory_bytes, f"of one {gpu.name}")


def covers_engine(settings: Settings) -> bool:
    """Whether step times are of the engine asked for: our kernels, or compiled for settings that these lack."""
    if has_kernels(settings):
        return settings.train.kernels in ("auto", "fused")
    return settings.train.kernels in ("auto", "compiled") and settings.train.precision != "fp8"


def evaluation_seconds(
    settings: Settings, cluster: Cluster, design: Design, examples: int, *, length: float = 0, at_once: int = 64
) -> float:
    """A forward pass over `examples` of `length` tokens each, shared by all GPUs; default: packed, of mean length."""
    settings = replace(settings, train=replace(settings.train, activation_checkpointing="none"))  # for no backward pass
    length = length or settings.data.max_seq_length / 2
    own = math.ceil(examples / cluster.count)
    bins = math.ceil(own / at_once)
    load = Load(
        *(np.array([number]) for number in (bins, own * length, own * length**2, own * MASK_PROBABILITY * length, own))
    )
    computing = float(compute_seconds(settings, load, cluster.gpu, design).sum())
    return FORWARD * max(computing, float(host_seconds(settings, load, design).sum()))


def fewest_gpus(wish: Wish, within_s: float, most: int) -> Plan:
    """The plan with the fewest GPUs that ends within `within_s`, each number with its best token budget.

    Numbers are whole machines, or powers of 2 of one.
    """
    for count in _counts(wish.cluster.per_node, most):
        if (plan := _try(best_batching, wish, count)) is not None and plan.seconds <= within_s:
            return plan
    late = f"no number of {wish.cluster.gpu.name} up to {most:,} finishes within {within_s:,.0f} s"
    raise UserError("no-such-plan", f"{late}; allow more time (--within)")


def fastest_for(wish: Wish, money: float, most: int) -> Plan:
    """The fastest plan that costs at most `money`, each number of GPUs with its best token budget."""
    if not wish.price:
        raise UserError("no-price", "--spend needs the price of one GPU for one hour; give --price")
    plans = (_try(best_batching, wish, count) for count in _counts(wish.cluster.per_node, most))
    affordable = [plan for plan in plans if plan is not None and plan.price <= money]
    if not affordable:
        raise UserError("no-such-plan", f"no number of GPUs up to {most:,} finishes for {money:g} EUR; raise --spend")
    return min(affordable, key=lambda plan: plan.seconds)


def best_batching(wish: Wish, count: int) -> Plan:
    """The plan with the most sequences per second on `count` GPUs: the recipe's, or with another policy and budget.

    Budgets: those with which each rank computes one, two or four bins, up to 10 % larger than necessary, for balance.
    """
    settings = wish.settings
    tokens = settings.batch.tokens or settings.batch.sequences * float(wish.lengths.mean())
    budgets = {
        max(smallest_budget(settings), math.ceil(slack * tokens / (bins * count) / BUDGET_STEP) * BUDGET_STEP)
        for bins in (1, 2, 4)
        for slack in (1.0, 1.02, 1.05, 1.1)
    }
    wishes = [wish]
    for budget, policy in itertools.product(sorted(budgets), TUNED_POLICIES):
        changed = with_budget(settings, budget)
        changed = replace(
            changed, batch=replace(changed.batch, policy=policy, group_size=0, shares="", bin_sequences=0)
        )
        wishes.append(replace(wish, settings=changed))
    found = [plan for one in wishes if (plan := _try(make_plan, one, count)) is not None]
    return max(found, key=lambda one: one.sequences_per_s) if found else make_plan(wish, count)  # which says why


def _try(make: Callable[[Wish, int], Plan], wish: Wish, count: int) -> Plan | None:
    """The plan, or None where it does not fit."""
    try:
        return make(wish, count)
    except UserError as error:
        if error.code != "out-of-memory":
            raise
        return None


def leave_idle(plans: Iterable[Plan]) -> str:
    """A note about plans whose bins are too few or too uneven for their GPUs; empty without any."""
    numbers = ", ".join(f"{plan.count:,}" for plan in plans if plan.idle > MUCH_IDLE)
    return f"the recipe's bins leave much of {numbers} GPUs idle; --tune finds a better token budget" if numbers else ""


def _counts(per_node: int, most: int) -> Iterable[int]:
    """1, 2, 4 ... a machine; then machines, each number at most an eighth above the last."""
    count = 1
    while count < per_node:
        yield count
        count *= 2
    nodes = 1
    while nodes * per_node <= most:
        yield nodes * per_node
        nodes = max(nodes + 1, nodes * 9 // 8)


def shown_parts(plans: Sequence[Plan]) -> list[str]:
    """Parts of a step that take time in some plan: not zero when rounded to 0.01 ms."""
    return [name for name in plans[0].step.parts if any(plan.step.parts[name] >= 5e-6 for plan in plans)]


def table_text(plans: Sequence[Plan], currency: str = "EUR") -> str:
    """A table of plans, with where each step's time goes."""
    parts = shown_parts(plans)
    heads = ["GPUs", "ms/step", *parts, "idle", "sequences/s", "steps", "start-up", "evaluation", "time", "GPU-hours",
             currency]  # fmt: skip
    rows = []
    for plan in plans:
        times = [f"{1e3 * plan.step.parts[name]:z.2f}" for name in parts]
        rows.append(
            [f"{plan.count:,}", f"{1e3 * plan.step.seconds:.2f}", *times, f"{plan.idle:.1%}",
             f"{plan.sequences_per_s:,.0f}", f"{plan.steps:,}", time_text(plan.start_up_s),
             time_text(plan.evaluation_s), time_text(plan.seconds), f"{plan.gpu_hours:,.2f}", f"{plan.price:,.2f}"]
        )  # fmt: skip
    if not any(plan.price for plan in plans):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)
    )


def time_text(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.2f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
