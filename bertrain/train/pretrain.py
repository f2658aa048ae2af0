"""Pre-training, from start to end: read it from top to bottom and you know what a run does.

pretrain / resume     open data and run folder, build, restore, loop, finish
train_step            forward and backward over a rank's bins, sum over ranks, clip, update
dry_run               what would happen, without doing it
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bertrain.config import override
from bertrain.data.batching import check_groups
from bertrain.data.loader import Loader, Step, check_data, training_rows
from bertrain.data.source import DataSource, open_data
from bertrain.errors import AgreedError, UserError
from bertrain.model.bert import Bert, split_parts
from bertrain.model.initial import initialise
from bertrain.observe.console import Console, warn
from bertrain.observe.metrics import Metrics, StepRecord, Stopwatch
from bertrain.optim.arena import Arena
from bertrain.optim.lamb import AdaptiveOptimizer
from bertrain.optim.schedules import learning_rate
from bertrain.settings import Settings
from bertrain.train import checkpoint, compute, parallel
from bertrain.train.checkpoint import Progress, Saver, Snapshot, copy_to_host
from bertrain.train.evaluate import evaluate_model
from bertrain.train.guard import FAIL, GO_ON, STOP, SkippedSteps, StopSignal
from bertrain.train.memory import GIB, count_parameters
from bertrain.train.precision import make_deterministic, set_precision
from bertrain.train.room import explaining, with_budget
from bertrain.train.runs import Run, check_free, describe_environment, refuse_other_vocabulary
from bertrain.train.settle import check_memory, estimate_token_budget, find_token_budget, place_for, settle
from bertrain.weights.source import check_fit, fill_in, read_weights


@dataclass
class TrainState:
    """All that a step changes."""

    model: Bert
    arena: Arena
    optimizer: AdaptiveOptimizer
    compute: compute.Compute
    progress: Progress

    def snapshot(self) -> Snapshot:
        """A copy off the device, which a checkpoint is written from."""
        return Snapshot(
            model=copy_to_host(self.arena.named(self.arena.values)),
            optimizer=copy_to_host(self.optimizer.state() | self.compute.state()),
            progress=replace(self.progress, updates=int(self.optimizer.num_applied.item())),
        )


def pretrain(settings: Settings, data: str | Path, run: str | Path, *, init: str = "") -> Progress:
    """Pre-train as `settings` say on the prepared folder `data`, into the run folder `run`.

    `init` names a run or a Hugging Face folder whose weights to begin with. If `run` holds this very run
    already, it is continued.
    """
    init = str(Path(init).resolve()) if init else ""
    settings, notes = settle(settings, run)
    fingerprint = preflight(settings, data, run, init=init, world=parallel.count_ranks())
    with parallel.join(settings.train) as ranks:
        shards = open_for(data, settings, ranks)
        is_new = not (Path(run) / "config.json").is_file()
        if ranks.from_first(is_new):
            settings, found = find_token_budget(settings, shards, ranks)
            notes += found
        if ranks.is_first and is_new:
            Run.create(run, settings, shards, init, fingerprint)
        ranks.from_first(0)
        return train(Run.open(run).continued(settings, shards.folder), shards, ranks, notes=notes)


def resume(run: str | Path, overrides: list[tuple[str, str]] | None = None) -> Progress:
    """Continue the run in the folder `run` from its newest whole checkpoint.

    `overrides` may change settings that do not shape the training: where and how it runs, what is said and saved.
    """
    opened = Run.open(run)
    settings = override(opened.settings, overrides or [])
    if not opened.data.exists():
        raise UserError(
            f"the data of this run is no longer at {opened.data}; put it back, or repeat the pretrain command with "
            "--data and its new place"
        )
    shards = open_data(opened.data, vocab=settings.data.vocab, verify="size")
    check_memory(settings, shards, parallel.count_ranks(), is_begun=True)
    with parallel.join(settings.train) as ranks:
        return train(opened.continued(settings, opened.data), open_for(opened.data, settings, ranks), ranks)


def preflight(settings: Settings, data: str | Path, run: str | Path, *, init: str = "", world: int = 1) -> str:
    """Refuse what can be refused before anything is written or any rank is started.

    Looks at the data, a run folder that is taken, the device, and the weights to begin with, whose fingerprint it
    returns (or nothing).
    """
    settings, _ = settle(settings, run)
    device, _ = parallel.choose_device(settings.train.device)
    compute.choose(settings, device)
    shards = open_data(data, vocab=settings.data.vocab, verify="size")
    check_data(shards, settings)
    training_rows(shards, settings)
    is_begun = (Path(run) / "config.json").is_file()
    check_memory(settings, shards, world, is_begun=is_begun)
    check_groups(settings.batch.group_size, world)
    if settings.evaluate.data:
        held_out = open_data(settings.evaluate.data, vocab=settings.data.vocab, verify="size")
        check_data(held_out, settings)
        refuse_other_vocabulary(held_out, shards.vocabulary.hash)
    if is_begun:
        Run.open(run).refuse_other(settings, init)
    else:
        check_free(Path(run))
    return _check_beginning(settings, shards, init)


def _check_beginning(settings: Settings, shards: DataSource, init: str) -> str:
    """Refuse weights to begin with that do not fit; returns their fingerprint, or nothing without `init`."""
    if not init:
        return ""
    weights = read_weights(init)
    if weights.vocabulary is not None:
        refuse_other_vocabulary(shards, weights.vocabulary.hash)
    with torch.device("meta"):
        check_fit(dict(Bert(settings.model).named_parameters()), weights)
    return weights.fingerprint


def open_for(folder: str | Path, settings: Settings, ranks: parallel.Ranks) -> DataSource:
    """The data of a run, whose hashes the first rank checks for all."""
    return open_data(folder, vocab=settings.data.vocab, verify=settings.data.verify if ranks.is_first else "size")


def train(
    run: Run, shards: DataSource, ranks: parallel.Ranks, *, saves: bool = True, notes: Sequence[str] = ()
) -> Progress:
    """The run from its newest checkpoint, or its beginning, to its end; a benchmark saves nothing.

    `notes` are said at the start: what `auto` was taken to mean.
    """
    settings, how = run.settings, run.settings.train
    run.refuse_other_data(shards)
    check_groups(settings.batch.group_size, ranks.world)
    make_deterministic(how)
    set_precision(how)
    with ExitStack() as stack:
        stack.enter_context(explaining(settings, ranks.world, run.folder if saves else None))
        is_ours = stack.enter_context(run.lock()) if ranks.is_first else True
        if not ranks.from_first(is_ours):
            raise AgreedError(f"another process is training in {run.folder}; wait for it or end it")

        # --- build, and restore ------------------------------------------------------------------
        model = Bert(settings.model)
        initialise(model, how.seed)
        model.to(ranks.device).train()
        arena = Arena(model, split_parts)
        optimizer = AdaptiveOptimizer(arena, settings.optimizer)
        state = TrainState(model, arena, optimizer, compute.build(model, arena, optimizer, settings), Progress())
        console = Console(settings.log.level, settings.log.style, is_speaker=ranks.is_first)
        _restore(state, run, ranks, console)
        first_step = state.progress.step
        loader = _loader(shards, settings, ranks)
        evaluation = _evaluation_loader(run, ranks)
        if ranks.is_first:
            run.write_config(run.folder)
            _announce(run, shards, ranks, state, console, notes)
        saver = Saver(run.checkpoints, settings.checkpoint.keep)
        stack.callback(saver.wait)
        skipped = SkippedSteps(how.max_skipped_steps)
        stopwatch = Stopwatch(ranks.device)
        metrics = Metrics(
            run.folder,
            stopwatch,
            console,
            first_step=first_step,
            last_step=how.max_steps,
            tensorboard=settings.log.tensorboard,
            is_writer=ranks.is_first,
        )
        stack.callback(metrics.close)
        console.start(first_step, how.max_steps)
        stack.callback(console.stop)
        stop_signal = stack.enter_context(StopSignal().listening())

        # --- the loop ----------------------------------------------------------------------------
        verdict = GO_ON
        for step in loader.steps(first_step, state.progress.samples, how.max_steps):
            stopwatch.mark()
            metrics.add(train_step(state, step, settings, ranks, stopwatch))
            done, is_last = state.progress.step, state.progress.step == how.max_steps
            evaluates = evaluation is not None and (is_last or _is_due(step, settings.evaluate.every_samples))
            is_due = is_last or (settings.checkpoint.every_steps > 0 and done % settings.checkpoint.every_steps == 0)

            if evaluates or is_due or done % settings.log.every_steps == 0:
                skipped.note(metrics.flush(), done)
            if evaluation is not None and evaluates:
                result = evaluate_model(model, evaluation, ranks, how, settings.evaluate.max_examples)
                metrics.evaluation(done, state.progress.samples, result)

            # Ranks agree on what comes next, so that none is left waiting for another.
            mine = FAIL if saver.failure or metrics.failure else STOP if stop_signal.received else GO_ON
            verdict = ranks.largest(mine)
            if verdict == FAIL:
                break
            if saves and (is_due or verdict == STOP):
                skipped.note(metrics.flush(), done)
                metrics.sync()  # what a checkpoint holds, the metrics hold too
                if ranks.is_first and metrics.failure is None:
                    saver.wait()  # a copy of the state is large: there is one at a time
                    saver.save(state.snapshot())
            if verdict == STOP:
                break
            stopwatch.start()

        # --- the end -----------------------------------------------------------------------------
        saver.wait()
        failure = saver.failure or metrics.failure
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        if ranks.largest(FAIL if failure else GO_ON) == FAIL:
            raise AgreedError(_failure_sentence(run, failure))
        if verdict == STOP and state.progress.step < how.max_steps:
            name = stop_signal.received.name if stop_signal.received else "a signal to another rank"
            kept = f", which is saved; continue with `bertrain resume {run.folder}`" if saves else ""
            raise AgreedError(f"stopped by {name} after step {state.progress.step}{kept}")
        return state.progress


def train_step(
    state: TrainState, step: Step, settings: Settings, ranks: parallel.Ranks, stopwatch: Stopwatch
) -> StepRecord:
    """One optimizer step: this rank's bins forward and backward, the sum over ranks, and the update.

    Nothing here waits for the device. A step whose loss or gradient is not finite leaves the state as it was.
    """
    work = state.compute
    work.begin(len(step.bins))
    for batch in step.bins:
        work.add_bin(batch, step)
    ranks.sum(state.arena.gradients, work.sums)
    ranks.maximum(*work.peaks)
    stopwatch.mark()

    rate = learning_rate(step.number, settings.optimizer.learning_rate, settings.schedule, settings.train.max_steps)
    verdict = work.update(rate)
    stopwatch.mark()

    state.progress = Progress(
        step=step.number + 1,
        samples=step.next_position,
        tokens=state.progress.tokens + step.num_tokens,
    )
    return StepRecord(
        step=step.number + 1,
        samples=step.next_position,
        tokens=step.num_tokens,
        num_predictions=step.num_predictions,
        num_sequences=step.num_sequences,
        nsp=settings.model.nsp,
        learning_rate=rate,
        sums=work.sums.clone(),
        verdict=verdict,
        marks=stopwatch.lap(),
    )


def _restore(state: TrainState, run: Run, ranks: parallel.Ranks, console: Console) -> None:
    """Bring back the newest whole checkpoint, or begin with the weights of `run.init`, or with fresh ones."""
    newest: Path | None = None
    if ranks.is_first:
        newest, warnings = checkpoint.newest_whole(run.checkpoints)
        for warning in warnings:
            warn(warning)
        checkpoint.tidy(run.checkpoints, newest)
    step = ranks.from_first(checkpoint.read_progress(newest).step if newest else -1)
    if step >= 0:
        snapshot = checkpoint.read_checkpoint(run.checkpoints / checkpoint.checkpoint_name(step))
        state.arena.load(state.arena.values, snapshot.model)
        state.optimizer.load(snapshot.optimizer, snapshot.progress.updates)
        state.compute.restore(snapshot.optimizer)
        state.progress = snapshot.progress
    else:
        if run.init:
            _begin_with(state, run, console)
        state.compute.restore({})


def _begin_with(state: TrainState, run: Run, console: Console) -> None:
    """Take the weights of another run or of a Hugging Face folder; the optimizer and the counters begin anew."""
    weights = read_weights(run.init)
    if weights.fingerprint != run.init_fingerprint:
        raise AgreedError(f"the weights of {run.init} have changed since this run was begun; start a new run")
    initialised = fill_in(state.arena.named(state.arena.values), weights)
    taken = len(state.arena.places) - len(initialised)
    console.say(f"beginning with the weights of {weights.origin}: {taken} tensors taken")
    left_over = [*weights.left_over, *(name for name in weights.tensors if name not in state.arena.places)]
    for kind, names in (("initialised afresh", initialised), ("left over", left_over)):
        if names:
            console.say(f"  {kind}: {', '.join(names)}")


def _loader(shards: DataSource, settings: Settings, ranks: parallel.Ranks) -> Loader:
    on_gpu = ranks.device.type == "cuda"
    return Loader(shards, settings, rank=ranks.rank, world=ranks.world, pin_memory=on_gpu)


def _evaluation_loader(run: Run, ranks: parallel.Ranks) -> Loader | None:
    if not run.settings.evaluate.data:
        return None
    shards = open_for(run.settings.evaluate.data, run.settings, ranks)
    refuse_other_vocabulary(shards, run.vocabulary_hash)
    return _loader(shards, run.settings, ranks)


def _is_due(step: Step, every_samples: int) -> bool:
    """Whether this step crossed a multiple of `every_samples` (0: never)."""
    return bool(every_samples) and step.next_position // every_samples > step.first_position // every_samples


def _failure_sentence(run: Run, failure: Exception | None) -> str:
    """Why nothing more could be written, and what is left to continue from. Only the first rank writes."""
    newest = checkpoint.whole_checkpoints(run.checkpoints)[-1:]
    kept = f"the last whole checkpoint is {newest[0]}" if newest else "there is no whole checkpoint yet"
    return (
        f"could not write into {run.folder}: {getattr(failure, 'strerror', None) or failure}; {kept}; make room and "
        f"continue with `bertrain resume {run.folder}`"
    )


def _announce(
    run: Run, shards: DataSource, ranks: parallel.Ranks, state: TrainState, console: Console, notes: Sequence[str]
) -> None:
    """Say what was chosen and why, and note the environment."""
    settings = run.settings
    _, reason = parallel.choose_device(settings.train.device)
    threads = torch.get_num_threads()
    console.say(f"run {run.folder}: {_count(state.model) / 1e6:.1f} M parameters, {settings.optimizer.name}")
    console.say(f"device {ranks.device} ({reason}), {ranks.world} rank(s) of {threads} thread(s)")
    console.say(f"computing with {compute.choose(settings, ranks.device)[1]}")
    for note in notes:
        console.say(note)
    console.say(
        f"data {shards.folder} ({shards.layout}): {_describe_rows(shards, settings)}; {_describe_step(settings)}"
    )
    if shards.predictions is not None:
        console.say("masks: those of the data, the same in every epoch; settings of masking have no effect")
    if settings.train.max_steps <= settings.schedule.warmup_steps + settings.schedule.start_warmup_step:
        warn(f"the run of {settings.train.max_steps} steps ends within its warm-up of {settings.schedule.warmup_steps}")
    if state.progress.step:
        console.say(f"continuing after step {state.progress.step} ({state.progress.samples:,} samples)")
    run.note_environment(describe_environment(ranks.world, str(ranks.device), threads))


def _describe_rows(shards: DataSource, settings: Settings) -> str:
    if not settings.data.slice:
        return f"{len(shards):,} examples"
    part = training_rows(shards, settings)
    return f"{len(part):,} of {len(shards):,} examples (data.slice {settings.data.slice})"


def _describe_step(settings: Settings) -> str:
    batch = settings.batch
    size = f"{batch.sequences:,} sequences" if batch.sequences else f"{batch.tokens:,} tokens"
    policy = f"{batch.policy}, {batch.packing}" if batch.policy == "packed" else batch.policy
    return f"a step is {size}, in bins of {batch.token_budget:,} tokens ({policy})"


def _count(model: Bert) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def dry_run(settings: Settings, data: str | Path, *, world: int = 1, init: str = "") -> str:
    """The resolved run, its size, memory and steps, as text; nothing is written."""
    settings, notes = settle(settings, None)
    shards = open_data(data, vocab=settings.data.vocab, verify="size")
    _check_beginning(settings, shards, init)
    check_groups(settings.batch.group_size, world)
    place = place_for(settings, shards, world)
    if settings.batch.auto:
        settings = with_budget(settings, estimate_token_budget(settings, place) or settings.batch.token_budget)
        notes.append(f"batch.auto: a token_budget of {settings.batch.token_budget:,}, by the estimate alone")
    needed = place.needs(settings)
    loader = Loader(shards, settings, world=world)
    step, part = loader.step(0, 0), training_rows(shards, settings)
    lines = [
        f"{section}.{name} = {value}"
        for section, fields in settings.to_dict().items()
        for name, value in fields.items()
    ]
    fill = step.num_tokens / (step.num_bins * settings.batch.token_budget)
    lines += [
        "",
        *notes,
        f"parameters: {count_parameters(settings.model)[0]:,}",
        f"memory on each rank: about {needed.total / GIB:.2f} GiB of {place.bytes / GIB:.2f} {place.words}",
        f"  in GiB: {needed.text()}",
        f"data: {_describe_rows(shards, settings)}, {int(shards.lengths[part.start : part.stop].sum()):,} tokens",
        f"first step: {step.num_sequences:,} sequences, {step.num_tokens:,} tokens, "
        f"{step.num_predictions:,} masked words, in {step.num_bins} bins ({fill:.1%} full) for {world} rank(s)",
        f"steps: {settings.train.max_steps:,}, about "
        f"{settings.train.max_steps * step.num_sequences / len(part):.1f} epochs",
    ]
    return "\n".join(lines)
