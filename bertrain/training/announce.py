"""The summary that a run prints before it starts, and `--dry-run`, which prints it and stops."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bertrain.base.console import Console, warn
from bertrain.base.formatting import GIB, counted, duration, wrap
from bertrain.config.model_size import count_parameters, training_flops
from bertrain.config.settings import Settings
from bertrain.data.feed.balance import REPORTED_IDLE_SHARE, better_budget, describe_balance, mean_idle_share
from bertrain.data.feed.loader import Loader, Step, training_examples
from bertrain.data.formats.source import DataSource
from bertrain.planning.devices import gpu_like
from bertrain.planning.memory_fit import smallest_budget, with_budget
from bertrain.planning.plan import AnyInts
from bertrain.planning.prediction import BinTime, Prediction, predict_on_cpu, predict_run
from bertrain.planning.speed import training_speed
from bertrain.ranks import parallel, preload
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run, describe_environment
from bertrain.training import engine
from bertrain.training.precision import warn_of_emulation
from bertrain.training.replacing_engine import settings_of_generator
from bertrain.training.resolve_auto import estimate_token_budget, place_for
from bertrain.training.resolved_run import resolve_run
from bertrain.training.state import TrainState
from bertrain.weights.source import open_source

MANY_EPOCHS, MANY_DAYS = 200, 30
MEASURED_TOKENS = 1024  # of a bin that measures a CPU
NO_PREDICTION = "no prediction for this device; `bertrain plan RECIPE --data DIR --gpu NAME --count N` has one for GPUs"


def announce(
    run: Run, loader: Loader, ranks: parallel.Ranks, progress: Progress, console: Console, notes: Sequence[str]
) -> None:
    """Print what was chosen and why, and record the environment."""
    data, settings = loader.data, run.settings
    _, reason = parallel.choose_device(settings.train.device)
    threads = torch.get_num_threads()
    millions = count_parameters(settings.model)[0] / 1e6
    per_step, _ = loader.sizes_ahead(progress.samples)[0]
    epochs_per_step = len(per_step) / data.texts_per_example / len(training_examples(data, settings))
    if settings.batch.ramp_tokens:
        epochs_per_step = _mean_epochs(loader, settings)
    console.say(f"run {run.folder}: {_describe_length(settings, epochs_per_step)}")
    console.say(f"data {data.folder} ({data.layout}): {_describe_rows(data, settings)}")
    console.say(f"model: {millions:.1f} M parameters, {settings.optimizer.name}; {_describe_step(settings)}")
    console.say(f"device {ranks.device} ({reason}), {counted(ranks.world, 'rank')} of {counted(threads, 'thread')}")
    computing, *details = engine.choose(settings, ranks.device)[1].split("; ")
    console.say(f"computing with {computing}")
    if settings.model.rtd:
        _announce_generator(run, ranks.device, console)
    details += [f"local rank {number} keeps to {binding.describe()}" for number, binding in enumerate(ranks.bindings)]
    for detail in [*details, *([preload.describe()] if ranks.device.type == "cpu" else [])]:
        console.detail(detail)
    for note in [*notes, *remarks(settings, epochs_per_step)]:
        console.say(note)
    if data.predictions is not None and not settings.task.name:
        console.say("masks: those of the data, the same in every epoch; masking settings have no effect")
    warn_of_warm_up(settings)
    warn_of_emulation(settings.train, ranks.device)
    if progress.step:
        console.say(f"continuing after step {progress.step} ({progress.samples:,} samples)")
    if ranks.world > 1:
        console.say(f"balance: {_describe_balance(loader, settings, progress)}")
    run.note_environment(describe_environment(ranks.world, str(ranks.device), threads) | {"predicted_step_ms": None})


def _announce_generator(run: Run, device: torch.device, console: Console) -> None:
    model = open_source(run.computed().data.generator, hashes=False).settings
    assert model is not None
    shape = f"{model.num_layers} x {model.hidden_size}"
    computing = engine.choose(settings_of_generator(run.settings, model), device)[1].partition("; ")[0]
    console.say(f"words are replaced by {run.settings.data.generator} ({shape}), computing with {computing}")


def announce_time(
    run: Run, loader: Loader, ranks: parallel.Ranks, console: Console, step: Step, warm_up_s: tuple[float, float]
) -> None:
    """Print and record the step time that `bertrain plan` predicts; on a CPU from the warm-up with a bin of `step`."""
    settings, data, measured = run.settings, loader.data, None
    if ranks.device.type == "cpu":
        name, _ = engine.choose(settings, ranks.device)
        measured = BinTime.of(settings, step.bins[0], name, *warm_up_s)
    part = training_examples(data, settings)
    prediction = predict_here(settings, data.lengths[part.start : part.stop], ranks.world, ranks.local_world, measured)
    if prediction is not None:
        console.say(prediction.text())
        run.add_to_environment({"predicted_step_ms": round(1e3 * prediction.step_s, 3)})


def warn_of_warm_up(settings: Settings) -> None:
    steps, schedule = settings.train.last_step(), settings.schedule
    if steps is not None and steps <= schedule.warmup_steps + schedule.start_warmup_step:
        warn(f"the run of {steps} steps ends within its warm-up of {schedule.warmup_steps}")


def remarks(settings: Settings, epochs_per_step: float) -> list[str]:
    """What looks wrong about the length of a run."""
    epochs = (settings.train.last_step() or 0) * epochs_per_step
    found = []
    if epochs_per_step > 1:
        found.append(f"remark: a step takes {epochs_per_step:.1f} times all examples; set a smaller batch.sequences")
    if epochs > MANY_EPOCHS:
        found.append(f"remark: {epochs:,.0f} times through the data; take more data, or a smaller train.max_steps")
    return found


def _mean_epochs(loader: Loader, settings: Settings) -> float:
    """The mean share of the data in a step, over all steps of a run, or in a full one if their number is not known."""
    sizes, steps = loader.step_size, settings.train.last_step()
    examples = sizes.examples_in(steps) / steps if steps else float(sizes.full / sizes.per_example)
    return examples / len(training_examples(loader.data, settings))


def _estimate_time(
    settings: Settings, step: Step, world: int, growth: float, prediction: Prediction | None
) -> Iterator[str]:
    """Time of the run: as predicted, or else from the operations of a step and the speed of a matrix product here.

    `growth`: how much larger than `step` steps are on average.
    """
    if prediction is not None:
        yield prediction.text()
    elif not settings.task.name:
        yield NO_PREDICTION
    speed = training_speed(parallel.choose_device(settings.train.device)[0], settings.train.precision)
    pairs = sum(step.balance.attention)
    per_step = training_flops(settings.model, step.num_tokens, step.num_predictions, pairs) / (world * speed)
    days = growth * (settings.train.last_step() or 0) * per_step / 86400
    if prediction is None and not settings.train.budget:
        each = f"{per_step:.3g} s a step" if growth == 1 else f"{per_step:.3g} s for the first step"
        yield f"time: about {duration(86400 * days)}, {each}; a rough estimate"
    if days > MANY_DAYS:
        yield f"remark: about {days:,.0f} days on this machine; take a smaller model or fewer steps"


def predict_here(
    settings: Settings, lengths: AnyInts, world: int, per_node: int, measured: BinTime | None = None
) -> Prediction | None:
    """What `bertrain plan` predicts for ranks of this machine's kind; None if it does not know their speed.

    A GPU's is in the table, a CPU's was `measured`. A run must not fail of it: if anything is wrong, there is none.
    """
    device, _ = parallel.choose_device(settings.train.device)
    with suppress(Exception):
        if device.type == "cpu":
            return predict_on_cpu(settings, lengths, world, measured) if measured else None
        gpu = gpu_like(torch.cuda.get_device_name(device)) if per_node <= torch.cuda.device_count() else None
        return predict_run(settings, lengths, gpu, world, per_node) if gpu else None
    return None


def measure_bin(settings: Settings, data: DataSource, world: int) -> BinTime | None:
    """The time of one bin of a model of two layers on this CPU, in the threads of one of `world` ranks.

    Two layers, because BERT-Large takes minutes, and of one our kernels compute only what the heads read. None where
    ranks share cores, and for the compiled engine, which takes a minute to compile.
    """
    device, _ = parallel.choose_device(settings.train.device)
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if device.type != "cpu" or world > cores or settings.task.name:
        return None
    layers, budget = min(2, settings.model.num_layers), settings.batch.token_budget
    small = with_budget(settings, min(budget, max(smallest_budget(settings), MEASURED_TOKENS)))
    batch = replace(small.batch.without_ramp(), sequences=0, tokens=small.batch.token_budget, shares="")
    small = replace(small, batch=batch, model=replace(small.model, num_layers=layers, rtd=0.0))
    small = replace(small, data=replace(small.data, generator=""))  # a prediction does not count it
    name, _ = engine.choose(small, device)
    if name == "compiled":
        return None
    torch.set_num_threads(settings.train.threads or max(1, cores // world))
    try:
        step = Loader(data, small).rehearsal(0, 0)
        seconds, _ = TrainState.build(small, parallel.Ranks(0, 1, device)).warm_up(step)
        return BinTime.of(small, step.bins[0], name, seconds, None)
    finally:
        torch.set_num_threads(threads)


def _describe_rows(data: DataSource, settings: Settings) -> str:
    if not settings.data.slice:
        return counted(data.num_examples, "example")
    part = training_examples(data, settings)
    return f"{len(part):,} of {data.num_examples:,} examples (data.slice {settings.data.slice})"


def _describe_step(settings: Settings) -> str:
    batch = settings.batch
    size = f"{batch.sequences:,} sequences" if batch.sequences else f"{batch.tokens:,} tokens"
    if batch.ramp_tokens:
        size = f"{batch.ramp_from:,} to {size}, growing over the first {batch.ramp_tokens:,} tokens"
    policy = f"{batch.policy}, {batch.packing}" if batch.policy == "packed" else batch.policy
    other = "" if policy == "budget" else f" (batch.policy {policy})"
    bins = "" if batch.auto else f", in bins of up to {batch.token_budget:,}"  # batch.auto has a line of its own
    return f"a step is {size}{bins}{other}"


def _describe_balance(loader: Loader, settings: Settings, progress: Progress) -> str:
    """How idle the ranks will be; before the first step also a better token budget, which can still be chosen."""
    steps, budget = loader.sizes_ahead(progress.samples), settings.batch.token_budget
    ahead, better = loader.balances(steps, budget), None
    if progress.step == 0 and mean_idle_share(ahead) > REPORTED_IDLE_SHARE:
        better = better_budget(partial(loader.balances, steps), budget, settings.data.max_seq_length)
    return describe_balance(ahead, better)


def dry_run(
    settings: Settings, data: str | Path, *, run: str | Path | None = None, world: int = 1, init: str = ""
) -> str:
    """The size, memory and steps of a run, then its settings, as text; nothing is written."""
    resolved = resolve_run(settings, data, run, init=init, world=world)
    settings, source, notes = resolved.settings, resolved.data, list(resolved.notes)
    place = place_for(settings, source, world)
    if settings.batch.auto and resolved.begun is None:
        settings = with_budget(settings, estimate_token_budget(settings, place) or settings.batch.token_budget)
        notes.append(f"batch.auto: bins of up to {settings.batch.token_budget:,} tokens, by the estimate alone")
    warn_of_emulation(settings.train, parallel.choose_device(settings.train.device)[0])
    resolved.warn_of_rate()
    needed = place.needs(settings)
    loader = Loader(source, settings, world=world)
    step, part = loader.step(0, 0), training_examples(source, settings)
    num_tokens = int(source.example_lengths[part.start : part.stop].sum())
    measured = None
    with suppress(Exception):  # as in predict_here
        measured = measure_bin(settings, source, world) if place.holds(settings) else None
    prediction = predict_here(settings, source.lengths[part.start : part.stop], world, world, measured)
    epochs_per_step = first_epochs = step.num_sequences / len(part)
    if settings.batch.ramp_tokens:
        epochs_per_step = _mean_epochs(loader, settings)
    fill = step.num_tokens / (step.num_bins * settings.batch.token_budget)
    lines = [
        *notes,
        f"parameters: {count_parameters(settings.model)[0]:,}",
        f"memory on each rank: about {needed.total / GIB:.2f} GiB of {place.bytes / GIB:.2f} {place.label}",
        f"  in GiB: {needed.text()}",
        *([] if place.holds(settings) else ["  that is too much: this run would be refused"]),
        f"data: {_describe_rows(source, settings)}, {num_tokens:,} tokens",
        f"first step: {step.num_sequences:,} sequences, {step.num_tokens:,} tokens, "
        f"{step.num_predictions:,} words to predict, in {counted(step.num_bins, 'bin')} ({fill:.1%} full) for "
        f"{counted(world, 'rank')}",
        *([f"balance: {_describe_balance(loader, settings, Progress())}"] if world > 1 else []),
        *([_describe_step(settings)] if settings.batch.ramp_tokens else []),
        _describe_length(settings, epochs_per_step),
        *remarks(settings, epochs_per_step),
        *_estimate_time(settings, step, world, epochs_per_step / first_epochs, prediction),
        "",
        *(f"{name} = {value}" for name, value in settings.dotted().items()),
    ]
    return wrap("\n".join(lines))


def _describe_length(settings: Settings, epochs_per_step: float) -> str:
    train = settings.train
    steps = train.last_step()
    if steps is None:
        return f"steps: as many as fit into train.budget {train.budget}, by their measured speed"
    earlier = [f"train.{name} {value}" for name in ("max_samples", "max_time") if (value := getattr(train, name))]
    if settings.evaluate.target_accuracy:
        earlier.append(f"evaluate.target_accuracy {settings.evaluate.target_accuracy:g}")
    until = f"; fewer if {' or '.join(earlier)} comes first" if earlier else ""
    epochs = steps * epochs_per_step
    return f"steps: {steps:,}, about {f'{epochs:,.1f}' if epochs >= 1 else f'{epochs:.1g}'} epochs{until}"
