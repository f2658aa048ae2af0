"""`bertrain profile`: times a fixed number of steps on each device, then runs some more under the profiler.

A profile set is one measurement of one device; a device measured several times (`repeat`) has a set for each. It is a
folder, renamed into place when it is complete:

iterations.csv      each timed step: its start, its duration and that of its phases on the device
launches.csv.gz     each kernel launch of the recorded steps (on a CPU each operator), by time
kernels.csv         the same, summed by name
roofline.csv        the same, summed by part of the model, with the operations and bytes of the part
telemetry.csv       clocks, power, temperature ... throughout; telemetry.json lists what is missing
device.json         the device, versions, settings, and which steps were recorded
trace.json.gz       with `trace`: for Perfetto or chrome://tracing
"""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bertrain.base import clock
from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.base.files import new_folder, refuse_occupied, write_atomically
from bertrain.base.machine import cpu_name
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, Step
from bertrain.data.formats.source import DataSource
from bertrain.planning.costs import required_costs
from bertrain.planning.memory_fit import oom_as_user_error
from bertrain.planning.speed import measure_ceilings
from bertrain.profiling import roofline
from bertrain.profiling import trace as kineto
from bertrain.profiling.sets import ITERATION_COLUMNS, LAUNCH_COLUMNS, read_set, write_objects, write_table
from bertrain.profiling.synthetic import write_synthetic
from bertrain.profiling.variability import summarize
from bertrain.ranks import parallel
from bertrain.run.folder import describe_environment
from bertrain.run.metrics import PendingStep, Stopwatch
from bertrain.run.sensors import uuid_of
from bertrain.run.telemetry import TelemetryWriter, device_sensors
from bertrain.training import engine
from bertrain.training.benchmark import only_steps
from bertrain.training.loop import train_step
from bertrain.training.precision import make_deterministic, set_precision
from bertrain.training.replacing_engine import read_generator
from bertrain.training.resolve_auto import check_memory, find_token_budget, fit_to_data, resolve_auto
from bertrain.training.resolved_run import open_for
from bertrain.training.state import TrainState

EAGER_WARM_UP = 3  # steps before the eager recording: the first two compile kernels and calibrate FP8's scales


@dataclass(frozen=True)
class MeasurementPlan:
    """How to measure a device."""

    steps: int
    warm_up: int
    recorded: int
    telemetry_ms: int
    with_trace: bool

    @property
    def max_steps(self) -> int:
        return EAGER_WARM_UP + 2 * self.recorded + self.warm_up + self.steps


def profile(
    settings: Settings,
    out: str | Path,
    *,
    data: str | Path | None = None,
    steps: int = 250,
    warm_up: int = 10,
    repeat: int = 1,
    each_gpu: bool = False,
    cool_down: float = 0.0,
    bins: int = 1,
    recorded: int = 3,
    telemetry_ms: int = 50,
    trace: bool = False,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Time `steps` steps after `warm_up` on this rank's device, `repeat` times, into sets under the new folder `out`.

    A step has `bins` bins of batch.token_budget on each rank (0: as the recipe), of `data` or of synthetic examples of
    data.max_seq_length. `recorded` more steps follow under the profiler, which would slow down the timed ones.
    `each_gpu` measures the GPUs of this machine one after another; `cool_down` is a pause in seconds between two
    measurements. Returns the folders of the sets that this rank made.
    """
    settings, _ = resolve_auto(settings)
    plan = MeasurementPlan(steps, warm_up, recorded, telemetry_ms, trace)
    out = Path(out)
    with ExitStack() as stack:
        ranks = stack.enter_context(parallel.join(settings.train))
        if ranks.is_first:
            refuse_occupied(out)
        ranks.broadcast_int(0)
        devices = choose_devices(ranks, each_gpu=each_gpu)
        if data is not None:
            source = open_for(data, settings, ranks)
        else:
            source = write_synthetic(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "data", settings)
        settings, _ = fit_to_data(settings, source)
        if settings.model.rtd and data is not None:  # synthetic examples have no words to compare
            read_generator(settings, source)
        settings, _ = find_token_budget(settings, source, ranks)
        settings = settings_to_profile(settings, bins=bins * ranks.world, steps=plan.max_steps)
        check_memory(settings, source, ranks.world, is_begun=False)
        make_deterministic(settings.train)
        set_precision(settings.train)
        stack.enter_context(oom_as_user_error(settings, ranks.world, None))
        made: list[Path] = []
        for number, device in itertools.product(range(1, repeat + 1), devices):
            if made:
                _pause(cool_down, ranks)
            index = device.index or 0
            if ranks.world > 1:  # a rank may see only its own GPU, as 0
                index = ranks.local_rank if device.type == "cuda" else ranks.rank
            place = out / f"{platform.node()}-{device.type}{index}" / f"repeat-{number}"
            facts = {"repeat": number, "data": str(data) if data else "synthetic, all examples of data.max_seq_length"}
            _measure(place, settings, source, replace(ranks, device=device), plan, facts)
            made.append(place)
            if ranks.is_first:
                say(describe_set(place))
        return made


def choose_devices(ranks: parallel.Ranks, *, each_gpu: bool) -> list[torch.device]:
    """This rank's device, or every GPU that torch sees."""
    if not each_gpu:
        return [ranks.device]
    if ranks.device.type != "cuda":
        raise UserError("no-gpu", "--each-gpu needs GPUs, but this run computes on a CPU; leave it out")
    if ranks.world > 1:
        raise UserError("each-gpu-with-ranks", "--each-gpu measures all GPUs in one process; leave --nproc out")
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def settings_to_profile(settings: Settings, *, bins: int, steps: int) -> Settings:
    """The settings with steps of `bins` bins over all ranks (0: unchanged), without evaluation and checkpoints."""
    batch, longest = settings.batch, settings.data.max_seq_length
    if bins:
        rows = bins * (batch.token_budget // longest)
        is_padded = batch.policy == "padded"
        batch = replace(batch, sequences=rows if is_padded else 0, tokens=0 if is_padded else rows * longest)
    settings = replace(settings, batch=replace(batch, auto=False))
    return only_steps(settings, max(steps, settings.train.max_steps)).check()


def _pause(seconds: float, ranks: parallel.Ranks) -> None:
    """Let the devices cool down, with a heartbeat for the watchdog."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ranks.heartbeat.move()
        time.sleep(min(1.0, left))


# --- one set ------------------------------------------------------------------------------------------


def _measure(
    place: Path,
    settings: Settings,
    source: DataSource,
    ranks: parallel.Ranks,
    plan: MeasurementPlan,
    facts: dict[str, Any],
) -> None:
    device, missing = ranks.device, dict[str, str]()
    environment = describe_environment(ranks.world, str(device), torch.get_num_threads())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    state = TrainState.build(settings, ranks)
    state.engine.restore({})
    loader = Loader(source, settings, rank=ranks.rank, world=ranks.world, pin_memory=device.type == "cuda")
    with new_folder(place) as folder, ExitStack() as stack:
        steps = loader.steps(0, 0, plan.max_steps)
        stack.callback(steps.close)  # type: ignore[attr-defined] # a generator, whose thread prepares steps
        runner = StepRunner(state, settings, ranks, steps, Stopwatch(device))
        is_fused = engine.choose(settings, device)[0] == "fused"  # also below another one
        in_graphs = is_fused and device.type == "cuda"
        by_part: tuple[list[kineto.Launch], roofline.StepSize] | None = None
        if in_graphs:  # a graph hides which operator launches a kernel, so record without graphs first
            state.engine.uses_graphs = False
            runner.run(EAGER_WARM_UP)
            by_part = runner.record(plan.recorded, folder, with_sizes=True)
            state.engine.uses_graphs = True
        ceilings = measure_ceilings(device, settings.train.precision)
        runner.run(plan.warm_up)
        ranks.broadcast_int(0)
        telemetry = TelemetryWriter(folder, device_sensors(device), plan.telemetry_ms)
        try:
            telemetry.wait_until_begun()
            records = runner.run(plan.steps)
            iterations = runner.iteration_rows(records)
            recorded = runner.record(plan.recorded, folder, with_sizes=not in_graphs, keep=plan.with_trace)
        finally:
            telemetry.stop()
        launches, _ = recorded
        if not launches:
            missing["launches"] = "the profiler recorded none; on a GPU it needs CUPTI and the permission to use it"
            warn(f"{place}: {missing['launches']}")

        launches_by_part, size = by_part or recorded
        measured = roofline.measured_by_part(launches_by_part, settings.model, size, plan.recorded)
        if device.type == "cuda" and launches:
            step_ms = 1e3 * statistics.median(row[ITERATION_COLUMNS.index("seconds")] for row in iterations)
            measured[roofline.IDLE] = roofline.idle_ms(step_ms, launches, plan.recorded)
        rows = roofline.roofline(required_costs(settings, size, is_fused=is_fused), measured, ceilings)
        write_table(folder / "iterations.csv", ITERATION_COLUMNS, iterations)
        write_objects(folder / "launches.csv.gz", launches, LAUNCH_COLUMNS)
        write_objects(folder / "kernels.csv", kineto.total_by_name(launches))
        write_objects(folder / "roofline.csv", rows)
        first = runner.done - plan.recorded + 1
        content = facts | {
            "schema_version": 1,
            "device": device_facts(device),
            "environment": environment,
            "rank": ranks.rank,
            "ranks_on_machine": ranks.local_world,
            "computing_with": engine.choose(settings, device)[1],
            "timed_steps": [first - plan.steps, first - 1],
            "recorded_steps": [first, runner.done],
            "recorded_one_by_one": [EAGER_WARM_UP + 1, EAGER_WARM_UP + plan.recorded] if by_part else None,
            "telemetry_ms": plan.telemetry_ms,
            "ceilings": asdict(ceilings),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "missing": missing,
            "settings": settings.to_dict(),
        }
        write_atomically(folder / "device.json", json.dumps(content, indent=1) + "\n")
    del runner, state
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class StepRunner:
    """Runs steps of the training loop, a few at a time."""

    def __init__(
        self, state: TrainState, settings: Settings, ranks: parallel.Ranks, steps: Iterator[Step], stopwatch: Stopwatch
    ) -> None:
        self._state, self._settings, self._ranks = state, settings, ranks
        self._steps, self._stopwatch = steps, stopwatch
        self.done = 0

    def run(self, count: int, ranks: parallel.Ranks | None = None, kept: list[Step] | None = None) -> list[PendingStep]:
        """Run the next `count` steps; returns their records, which may be pending.

        Appends the steps themselves to `kept`, if given; keeping all of them would look like a memory leak.
        """
        ranks = ranks or self._ranks
        taken = []
        self._stopwatch.start()
        for _ in range(count):
            ranks.heartbeat.enter("data", self.done + 1)
            step = next(self._steps)
            self._stopwatch.mark()
            taken.append(train_step(self._state, step, self._settings, ranks, self._stopwatch))
            self.done += 1
            if kept is not None:
                kept.append(step)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return taken

    def iteration_rows(self, taken: list[PendingStep]) -> list[tuple[Any, ...]]:
        marks = [record.marks[0] for record in taken] + [taken[-1].marks[-1]]
        rows = []
        for record, started in zip(taken, self._stopwatch.moments(marks), strict=False):
            phases = self._stopwatch.seconds(record.marks)
            counts = (record.step.num_tokens, record.own_tokens, record.own_bins)
            rows.append((record.step.number + 1, f"{started:.6f}", sum(phases), *phases, *counts))
        return rows

    def record(
        self, count: int, folder: Path, *, with_sizes: bool, keep: bool = False
    ) -> tuple[list[kineto.Launch], roofline.StepSize]:
        """Run the next `count` steps under the profiler; returns launches and mean size. `keep` keeps the trace."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as recording

        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._ranks.device.type == "cuda")
        marks = kineto.RegionMarks(self._ranks.heartbeat)
        hooks = kineto.mark_forward(self._state.model)
        steps: list[Step] = []
        try:
            with recording(activities=kinds, record_shapes=with_sizes, acc_events=True) as profiler:
                self.run(count, replace(self._ranks, heartbeat=marks), steps)
                marks.close()
        finally:
            for hook in hooks:
                hook.remove()
        path = folder / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        try:
            with gzip.open(path) as recorded:
                content = json.load(recorded)
        except (ValueError, EOFError) as error:
            raise UserError("damaged-trace", f"torch.profiler wrote no whole trace ({error}); run it again") from None
        path.unlink()
        launches = kineto.launches_of(content, shift_s=-clock.stepped())
        if keep:
            content["traceName"] = path.name  # not that of a temporary file
            kineto.add_device_regions(content, launches)
            with gzip.open(path, "wt", compresslevel=6) as file:
                json.dump(content, file)
        return launches, roofline.StepSize.of(steps)


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"kind": "cpu", "name": cpu_name(), "uuid": None}
    name, uuid = torch.cuda.get_device_name(device), uuid_of(device.index)
    facts = {"kind": "cuda", "index": device.index, "name": name, "cuda": torch.version.cuda, "uuid": uuid}
    return facts | device_sensors(device).device


def describe_set(place: Path) -> str:
    summary = summarize(read_set(place))
    joules, spread = summary.joules_per_million_tokens, f"{summary.spread:.1%} between the whiskers"
    energy = "" if joules is None else f", {joules:,.0f} J per million tokens"
    step = f"{1e3 * summary.median_s:.2f} ms per step (median; {spread})"
    return f"{place}: {step}, {summary.tokens_per_s:,.0f} tokens/s{energy}"
