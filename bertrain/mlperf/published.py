"""Published MLPerf results of BERT: which of them a recipe or a log corresponds to, and how bertrain compares.

published.csv has the results with their sources. bertrain has been measured on one GPU only, so beside a result
stand the rate of that GPU and the prediction of `bertrain plan`, with the command that repeats it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.resolve import resolve
from bertrain.planning.convergence import TARGET
from bertrain.planning.devices import find_gpu, find_network, gpu_names
from bertrain.planning.plan import MLPERF_LENGTHS, Plan, Wish, lengths_of, make_plan, time_text
from bertrain.planning.step_time import Cluster

MEASURED = {("h200", "fp8"): 1331.4, ("h200", "bf16"): 1001.8}
"""Sequences/s of bertrain on a GPU, bins of 24,576 tokens of MLPerf's lengths: benchmarks/results/gpu_pretrain.json."""
CPU_TOKENS_PER_S = 286.5
"""bertrain's on two cores with AMX, in bf16 and up to 512 tokens: benchmarks/results/cpu_pretrain.json."""


@dataclass(frozen=True)
class Result:
    """A published result; None for what was not published."""

    round: str
    system: str
    recipe: str
    """The recipe of bertrain with this configuration; empty if there is none."""
    gpu: str
    """Its name in `bertrain plan`'s table, or another accelerator."""
    count: int
    per_node: int
    network: str
    batch: int
    minutes: float
    samples: int | None
    sequences_per_s: float | None
    source: str

    @property
    def is_cpu(self) -> bool:
        """Then `count` is of ranks, each a part of a machine."""
        return self.gpu == "xeon"

    def text(self) -> str:
        devices = "ranks" if self.is_cpu else self.gpu
        rate = "" if self.sequences_per_s is None else f", {self.sequences_per_s / self.count:,.1f} sequences/s on each"
        return f"{time_text(60 * self.minutes)} on {self.count:,} {devices} ({self.system}, {self.round}){rate}"


@dataclass(frozen=True)
class Comparison:
    """bertrain beside a published result; None for what is not known."""

    published: Result
    measured_sequences_per_s: float | None
    """Of one such GPU, which exchanges gradients with no other."""
    predicted_s: float | None
    predicted_sequences_per_s: float | None
    command: str
    """That prints the prediction; empty if there is none."""

    def lines(self) -> Iterator[str]:
        result = self.published
        yield f"published: {result.text()}"
        if not result.recipe:
            yield "  not compared: bertrain has no recipe with its settings"
            return
        if result.is_cpu:
            yield f"  measured: {CPU_TOKENS_PER_S:g} tokens/s on two AMX cores; see docs/from-intel-cpu.md"
        elif self.measured_sequences_per_s is None:
            yield f"  measured: nothing on {result.gpu}"
        else:
            each = (result.sequences_per_s or math.nan) / result.count
            times = f", {self.measured_sequences_per_s / each:.2f} times the published rate" if each > 0 else ""
            rate = f"{self.measured_sequences_per_s:,.1f} sequences/s on one {result.gpu} in bins of 24,576 tokens"
            yield f"  measured: {rate}, without an exchange of gradients{times}"
        if self.predicted_s is None:
            yield "  predicted: nothing; `bertrain plan` knows GPUs only"
        else:
            rate = f"{(self.predicted_sequences_per_s or 0) / result.count:,.1f} sequences/s on each"
            yield f"  predicted, never run: {time_text(self.predicted_s)}, {rate}: {self.command}"


@cache
def published_results() -> tuple[Result, ...]:
    """Those with a time to train."""
    text = files("bertrain.mlperf").joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(_parse(row) for row in csv.DictReader(text.splitlines()) if row["minutes"])


def _parse(row: dict[str, str]) -> Result:
    """A row of published.csv, whose columns have the names of our fields; it has others too."""
    kinds = {"count": int, "per_node": int, "batch": int, "minutes": float, "samples": int, "sequences_per_s": float}
    given: dict[str, Any] = {item.name: row[item.name] for item in fields(Result)}
    return Result(**given | {name: kind(row[name]) if row[name] else None for name, kind in kinds.items()})


def headlines(*, recipe: str = "", batch: int | None = None, count: int | None = None) -> list[Result]:
    """The fastest result of each GPU with this recipe, or of this global batch size on `count` accelerators."""
    fastest: dict[str, Result] = {}
    for one in published_results():
        fits = one.recipe == recipe if recipe else (one.batch, one.count) == (batch, count)
        if fits and (one.gpu not in fastest or one.minutes < fastest[one.gpu].minutes):
            fastest[one.gpu] = one
    return sorted(fastest.values(), key=lambda one: one.minutes)


@cache
def compare(result: Result) -> Comparison:
    """What bertrain's own measurements and its planner say about a result."""
    if not result.recipe or result.gpu not in gpu_names():
        return Comparison(result, None, None, None, "")
    settings = resolve(result.recipe)
    plan, command = _predict(result)
    measured = MEASURED.get((result.gpu, settings.train.precision))
    return Comparison(result, measured, plan.seconds, plan.sequences_per_s, command)


def _predict(result: Result) -> tuple[Plan, str]:
    """The plan of a result's recipe on its machines, and the command that prints it.

    MLPerf's convergence points are those of the closed division; elsewhere the run takes the published samples.
    """
    settings, gpu = resolve(result.recipe), find_gpu(result.gpu)
    target, until = TARGET, f"--target {TARGET:g}"
    if settings.mlperf.division == "open" and result.samples:
        steps = math.ceil(result.samples / result.batch)
        settings = replace(settings, train=replace(settings.train, max_steps=steps))
        target, until = 0.0, f"--lengths mlperf --max-steps {steps}"
    cluster = Cluster(gpu, find_network(result.network, gpu, result.per_node), result.count, result.per_node)
    wish = Wish(settings, lengths_of(MLPERF_LENGTHS, settings.data.max_seq_length), cluster, target)
    machines = f"--gpu {result.gpu} --count {result.count} --per-node {result.per_node} --network {result.network}"
    return make_plan(wish, result.count), f"bertrain plan {result.recipe} {machines} {until}"


def compare_batch(batch: int | None, count: int | None) -> list[Comparison]:
    """The results of this global batch size on `count` accelerators."""
    return [compare(one) for one in headlines(batch=batch, count=count)]


def compare_recipe(name: str) -> list[Comparison]:
    """The results with this recipe."""
    found = headlines(recipe=name)
    if not found:
        known = sorted({one.recipe for one in published_results() if one.recipe})
        raise UserError(
            "no-published-result", f"there is no published MLPerf result for {name}; choose one of {', '.join(known)}"
        )
    return [compare(one) for one in found]
