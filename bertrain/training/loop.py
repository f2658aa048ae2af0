"""The loop: read it from top to bottom and you know what a run does.

train         build, restore, loop, finish
train_step    forward and backward over a rank's bins, sum over ranks, clip, update
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote

import torch

from bertrain.base.console import PHASES, Console, warn
from bertrain.base.errors import AgreedError, RequeueError
from bertrain.base.logs import keep_log, note
from bertrain.config.settings import Settings
from bertrain.data.feed.batching import check_groups
from bertrain.data.feed.loader import Loader, Step
from bertrain.data.formats.source import DataSource
from bertrain.model.initialization import initialize
from bertrain.optim.schedules import learning_rate
from bertrain.planning.memory_fit import oom_as_user_error
from bertrain.planning.time_budget import Measured
from bertrain.ranks import parallel
from bertrain.ranks.restart import report_recovery, restart_reason
from bertrain.ranks.signals import FAIL, GO_ON, REQUEUE, STOP, SkippedSteps, StopSignal
from bertrain.ranks.watchdog import SAVING
from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress, Saver
from bertrain.run.folder import Run, refuse_other_vocabulary
from bertrain.run.metrics import Metrics, PendingStep, Stopwatch
from bertrain.run.stragglers import RankTimes
from bertrain.run.telemetry import TelemetryWriter, telemetry_of
from bertrain.training.agenda import Agenda
from bertrain.training.announce import announce, warn_of_warm_up
from bertrain.training.evaluate import Evaluator, HeldOutEvaluator
from bertrain.training.events import Events
from bertrain.training.init_from import begin_with
from bertrain.training.open_data import open_for, open_task
from bertrain.training.precision import make_deterministic, set_precision
from bertrain.training.state import TrainState
from bertrain.training.task_evaluator import TaskEvaluator


def train(
    run: Run,
    shards: DataSource,
    ranks: parallel.Ranks,
    *,
    from_step: int | None = None,
    notes: Sequence[str] = (),
    events: Events | None = None,
) -> Progress:
    """The run from its newest checkpoint, that of `from_step`, or its beginning, to its end.

    `notes` are said at the start: what `auto` was taken to mean. `events` is told what happens.
    """
    settings, how = run.settings, run.settings.train
    events = events or Events()
    run.refuse_other_data(shards)
    check_groups(settings.batch.group_size, ranks.world)
    make_deterministic(how)
    set_precision(how)
    with ExitStack() as stack:
        is_ours = stack.enter_context(run.lock()) if ranks.is_first else True
        if not ranks.broadcast_int(is_ours):
            raise AgreedError(f"another process is training in {run.folder}; wait for it or end it")
        stack.enter_context(keep_log(run.folder, ranks.rank, ranks.world))
        if restart_reason():
            note("warning", "restart", f"all ranks were started again after {restart_reason()}")
        stack.enter_context(
            oom_as_user_error(settings, ranks.world, run.folder if settings.checkpoint.enabled else None)
        )

        # --- build, and restore ------------------------------------------------------------------
        state = TrainState.build(settings, ranks, draws=False)
        console = Console(settings.log.level, settings.log.style, is_speaker=ranks.is_first)
        _restore(state, run, ranks, console, from_step)
        first_step = state.progress.step
        loader = _loader(shards, settings, ranks)
        held_out = _held_out(run, ranks)
        if ranks.is_first:
            run.write_config(run.folder)
            announce(run, loader, ranks, state.progress, console, [*notes, *_notes_of_task(run)])
        events.building(settings, state, loader)
        keeping = settings.checkpoint
        saver = Saver(run.checkpoints, keeping.keep, keep_best=keeping.keep_best, settings=settings.to_dict())
        stack.callback(saver.wait)
        skipped = SkippedSteps(how.max_skipped_steps)
        stopwatch = Stopwatch(ranks.device)
        agenda = Agenda(settings, state.progress, run.measured, keeps_time=ranks.is_first)
        ending = agenda.why_over(state.progress)
        if not ending:
            state.warm_up(loader.rehearsal(first_step, state.progress.samples))
        if not ending and keeping.enabled:
            state.make_room_for_snapshots()
        last_step = None if agenda.is_open_ended else agenda.last_step
        metrics = Metrics(
            run.folder,
            stopwatch,
            console,
            first_step=first_step,
            last_step=last_step,
            tensorboard=settings.log.tensorboard,
            is_writer=ranks.is_first,
            rank_times=_rank_times(ranks, settings),
        )
        stack.callback(metrics.close)
        console.start(first_step, last_step)
        stack.callback(console.stop)
        telemetry = stack.enter_context(telemetry_of(run.folder, ranks.device, settings.log, rank=ranks.rank))
        tokens_before = state.progress.tokens
        stop_signal = stack.enter_context(StopSignal().listening())

        # --- the loop ----------------------------------------------------------------------------
        verdict, here = GO_ON, ranks.heartbeat
        events.starting()
        agenda.start_clock()
        stopwatch.start()  # the first step has not waited for data while all was warmed up
        here.enter("data", first_step + 1)
        for step in loader.steps(first_step, state.progress.samples, first_step if ending else agenda.last_step):
            stopwatch.mark()
            before = state.progress
            if agenda.leaves_out(step.number + 1):
                metrics.add(leave_out(state, step, settings, stopwatch))
            else:
                metrics.add(train_step(state, step, agenda.settings_of(step.number + 1), ranks, stopwatch))
            done = state.progress.step

            # Ranks agree on what comes next, so that none is left waiting for another.
            here.enter("agreeing on what comes next")
            mine = FAIL if saver.failure or metrics.failure else stop_signal.verdict or agenda.clock_request()
            verdict = ranks.all_max(mine)
            if verdict == FAIL:
                break
            if done == first_step + 1 and ranks.is_first:
                report_recovery(done)
            due = agenda.after(before, state.progress, verdict)

            if due.flushes:
                here.enter("reading results")
                skipped.note(metrics.flush(), done)
            evaluation_began = agenda.seconds()
            if held_out is not None and due.evaluates:
                events.evaluating(state.progress.samples)
                result = held_out.evaluate(state.compute.outputs, ranks)
                events.evaluated(state.progress.samples, result)
                metrics.evaluation(done, state.progress.samples, result)
                due = agenda.judge(due, state.progress, result[held_out.main_metric])
            if due.measures:
                measured = agenda.measure(state.progress, metrics.durations, agenda.seconds() - evaluation_began)
                run = _fix_length(run, measured, ranks, console)
                due = agenda.fix(due, run.settings, state.progress)
                metrics.last_step, saver.settings = run.settings.train.max_steps, run.settings.to_dict()
            if due.ending:
                events.ended(state.progress, due.ending)
            if due.saves:
                here.enter(SAVING)
                metrics.sync()  # what a checkpoint holds, the metrics hold too
                saver.wait()  # the snapshot before this one is in the memory that this one takes
                snapshot = state.snapshot()
                if snapshot is not None and metrics.failure is None:
                    saver.save(replace(snapshot, progress=agenda.stamp(snapshot.progress)))
            ending = due.ending
            if ending or verdict in (STOP, REQUEUE):
                break
            here.enter("data", done + 1)
            stopwatch.start()

        # --- the end -----------------------------------------------------------------------------
        here.enter(SAVING)
        if ending and verdict != FAIL:
            energy = _energy(telemetry, state.progress.tokens - tokens_before, ranks)
            metrics.end(state.progress.step, state.progress.samples, ending, agenda.seconds(), energy)
        saver.wait()
        failure = saver.failure or metrics.failure
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        if ranks.all_max(FAIL if failure else GO_ON) == FAIL:
            raise AgreedError(_failure_sentence(run, failure))
        if verdict in (STOP, REQUEUE) and not ending:
            name = stop_signal.received.name if stop_signal.received else "a signal to another rank"
            kept = f"which is saved; continue with `bertrain resume {quote(str(run.folder))}`"
            if not settings.checkpoint.enabled:
                kept = "of which nothing is saved (checkpoint.enabled false)"
            stopped = RequeueError if verdict == REQUEUE and settings.checkpoint.enabled else AgreedError
            raise stopped(f"stopped by {name} after step {state.progress.step}, {kept}")
        return state.progress


def train_step(
    state: TrainState, step: Step, settings: Settings, ranks: parallel.Ranks, stopwatch: Stopwatch
) -> PendingStep:
    """One optimizer step: this rank's bins forward and backward, the sum over ranks, and the update.

    Nothing here waits for the device. A step whose loss or gradient is not finite leaves the state as it was.
    """
    work, here = state.compute, ranks.heartbeat
    here.enter("forward and backward", step.number + 1)
    work.begin(len(step.bins))
    state.exchange.begin()
    for number, batch in enumerate(step.bins, start=1):
        work.add_bin(batch, step, is_last=number == len(step.bins))
        here.move()
    stopwatch.mark()

    here.enter("sum over ranks")
    state.exchange.finish()
    ranks.sum(work.sums)
    ranks.maximum(*work.peaks)
    stopwatch.mark()

    here.enter("update")
    rate = learning_rate(step.number, settings.optimizer.learning_rate, settings.schedule, settings.train.max_steps)
    verdict = work.update(rate)
    stopwatch.mark()

    state.progress = Progress(
        step=step.number + 1,
        samples=step.next_position,
        tokens=state.progress.tokens + step.num_tokens,
    )
    return PendingStep(
        step=step.number + 1,
        samples=step.next_position,
        tokens=step.num_tokens,
        num_predictions=step.num_predictions,
        num_sequences=step.num_sequences,
        model=settings.model,
        learning_rate=rate,
        sums=work.sums.clone(),
        verdict=verdict,
        balance=step.balance,
        marks=stopwatch.lap(),
        own_tokens=sum(batch.num_tokens for batch in step.bins),
    )


def leave_out(state: TrainState, step: Step, settings: Settings, stopwatch: Stopwatch) -> PendingStep:
    """Pass over a step: its examples count as seen, and nothing is computed or changed."""
    for _ in PHASES[1:]:
        stopwatch.mark()
    state.progress = replace(state.progress, step=step.number + 1, samples=step.next_position)
    return PendingStep(
        step=step.number + 1,
        samples=step.next_position,
        tokens=0,
        num_predictions=step.num_predictions,
        num_sequences=step.num_sequences,
        model=settings.model,
        learning_rate=0.0,
        sums=torch.full((4,), torch.nan),
        verdict=torch.tensor([torch.nan, 0.0]),
        marks=stopwatch.lap(),
        skipped=True,
    )


def _fix_length(run: Run, measured: Measured, ranks: parallel.Ranks, console: Console) -> Run:
    """The run with the number of steps that its budget has room for, as the first rank measured it."""
    measured = replace(measured, max_steps=ranks.broadcast_int(measured.max_steps))
    run = run.of_length(asdict(measured))
    if ranks.is_first:
        run.write_config(run.folder)  # before any checkpoint relies on it
        console.say(measured.describe(run.settings.train.budget))
        warn_of_warm_up(run.settings)
    return run


def _restore(
    state: TrainState, run: Run, ranks: parallel.Ranks, console: Console, from_step: int | None = None
) -> None:
    """Bring back the newest whole checkpoint, or begin with the weights of `run.init`, or with fresh ones.

    With `from_step`, the checkpoints after that step are put aside first.
    """
    newest: Path | None = None
    if ranks.is_first:
        for path in checkpoint.set_aside(run.checkpoints, from_step) if from_step is not None else ():
            console.say(f"put aside: {path}")
        newest, warnings = checkpoint.newest_whole(run.checkpoints)
        for warning in warnings:
            warn(warning)
        checkpoint.tidy(run.checkpoints, newest)
    step = ranks.broadcast_int(checkpoint.step_of(newest) if newest else -1)
    if step >= 0:
        path = run.checkpoints / checkpoint.checkpoint_name(step)
        run.refuse_foreign(path, checkpoint.read_settings(path))
        snapshot = checkpoint.read_checkpoint(path)
        state.arena.load(state.arena.values, snapshot.model)
        state.optimizer.load(snapshot.optimizer, snapshot.progress.updates)
        state.compute.restore(snapshot.optimizer)
        state.progress = snapshot.progress
        if run.settings.checkpoint.keep_best:
            state.progress = _settle_best(run, snapshot.progress, ranks)
    else:
        if run.init:
            begin_with(state.model, state.arena, state.optimizer, run, console)
        else:
            initialize(state.model, run.settings.train.seed)
            state.optimizer.begin()
        state.compute.restore({})


def _settle_best(run: Run, progress: Progress, ranks: parallel.Ranks) -> Progress:
    """`progress`, its best forgotten where that checkpoint is not there any more."""
    is_there = True
    if ranks.is_first:
        is_there, warning = checkpoint.settle_best(run.checkpoints, progress)
        if warning:
            warn(warning)
    return progress if ranks.broadcast_int(is_there) else replace(progress, best_step=0, best_accuracy=0.0)


def _rank_times(ranks: parallel.Ranks, settings: Settings) -> RankTimes | None:
    if ranks.store is None or ranks.world == 1:
        return None
    return RankTimes(
        rank=ranks.rank,
        world=ranks.world,
        store=ranks.store,
        every_steps=settings.log.every_steps,
        factor=settings.log.straggler_factor,
    )


def _energy(telemetry: TelemetryWriter | None, tokens: int, ranks: parallel.Ranks) -> dict[str, float | None] | None:
    """Joules of all ranks' devices since this start; None in it where one of them cannot be measured."""
    if telemetry is None:
        return None
    telemetry.stop()
    joules = telemetry.joules
    num_devices = torch.cuda.device_count() if ranks.device.type == "cuda" else 1
    if ranks.local_rank >= num_devices:
        joules = 0.0  # a device's energy is that of all ranks on it
    total = torch.tensor([torch.nan if joules is None else joules], dtype=torch.float64, device=ranks.device)
    ranks.sum(total)
    spent = total.item()
    if spent != spent:
        return {"joules": None, "joules_per_million_tokens": None}
    return {"joules": spent, "joules_per_million_tokens": 1e6 * spent / max(1, tokens)}


def _loader(shards: DataSource, settings: Settings, ranks: parallel.Ranks) -> Loader:
    on_gpu = ranks.device.type == "cuda"
    return Loader(shards, settings, rank=ranks.rank, world=ranks.world, pin_memory=on_gpu)


def _held_out(run: Run, ranks: parallel.Ranks) -> Evaluator | None:
    if run.settings.task.name:
        words = run.vocabulary()
        task = open_task(run.data, run.settings, words)
        return TaskEvaluator(task, task.held_out(), run.settings, run.data, words) if task.held_out() else None
    if not run.settings.evaluate.data:
        return None
    shards = open_for(run.settings.evaluate.data, run.settings, ranks)
    refuse_other_vocabulary(shards, run.vocabulary_hash)
    return HeldOutEvaluator(
        _loader(shards, run.settings, ranks), run.settings.evaluate.max_examples, run.settings.model
    )


def _notes_of_task(run: Run) -> list[str]:
    """What was found in the files of a task when they were read."""
    return open_task(run.data, run.settings, run.vocabulary()).notes if run.settings.task.name else []


def _failure_sentence(run: Run, failure: Exception | None) -> str:
    """Why nothing more could be written, and what is left to continue from. Only the first rank writes."""
    newest = checkpoint.whole_checkpoints(run.checkpoints)[-1:]
    kept = f"the last whole checkpoint is {newest[0]}" if newest else "there is no whole checkpoint yet"
    return (
        f"could not write into {run.folder}: {getattr(failure, 'strerror', None) or failure}; {kept}; make room and "
        f"continue with `bertrain resume {quote(str(run.folder))}`"
    )
