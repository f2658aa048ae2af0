"""The training loop: what a run does, from top to bottom.

train         build, loop, finish
train_step    forward and backward over a rank's bins, all-reduce, clip, update
"""

from __future__ import annotations

import errno
import signal
import threading
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from shlex import quote

import torch

from bertrain.base.console import PHASES, Console, warn
from bertrain.base.errors import AgreedError, RequeueError, StoppedError, UserError
from bertrain.base.formatting import duration
from bertrain.base.logs import keep_log, note
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, Step
from bertrain.model.sums import packed_sums
from bertrain.optim.schedules import learning_rate
from bertrain.optim.verdict import not_computed
from bertrain.planning.memory_fit import oom_as_user_error
from bertrain.planning.time_budget import UNKNOWN_STEPS, BudgetPlan
from bertrain.ranks import parallel
from bertrain.ranks.restart import report_recovery, restart_reason
from bertrain.ranks.signals import CONTINUE, FAIL, REQUEUE, STOP, SkippedSteps, StopSignal
from bertrain.ranks.watchdog import SAVING
from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress, Saver
from bertrain.run.folder import TRAIN_PLAN, Run
from bertrain.run.metrics import Metrics, PendingStep, Stopwatch
from bertrain.run.records import EvaluationRecord, last_record
from bertrain.run.stragglers import RankTimes
from bertrain.run.telemetry import TelemetryWriter, start_telemetry
from bertrain.run.trackers import TrackedRun, TrackerThread, start_trackers
from bertrain.training.agenda import Agenda, Due
from bertrain.training.announce import announce, announce_time, warn_of_warm_up
from bertrain.training.evaluate import HeldOutEvaluator
from bertrain.training.events import Events
from bertrain.training.precision import make_deterministic, set_precision
from bertrain.training.resolved_run import ResolvedRun
from bertrain.training.restore import restore
from bertrain.training.state import TrainState
from bertrain.training.task_evaluator import TaskEvaluator

Evaluator = HeldOutEvaluator | TaskEvaluator
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # errors that the user can fix, and then continue
SLOW_S = 10.0  # a start that takes longer prints what it is doing


@dataclass
class Session:
    """One start of a run on one rank: everything that the loop works with."""

    run: Run
    ranks: parallel.Ranks
    state: TrainState
    loader: Loader
    evaluator: Evaluator | None
    agenda: Agenda
    metrics: Metrics
    saver: Saver
    stopwatch: Stopwatch
    skipped: SkippedSteps
    console: Console
    telemetry: TelemetryWriter | None
    stop_signal: StopSignal
    events: Events
    resumed_at: Progress
    """The progress of the run when this start began."""
    slow: threading.Timer
    """Prints what a slow start is doing; canceled after the first step."""


def train(
    resolved: ResolvedRun, ranks: parallel.Ranks, *, from_step: int | None = None, events: Events | None = None
) -> None:
    """Train a run from its newest checkpoint, from that of `from_step`, or from its beginning, to its end."""
    try:
        with ExitStack() as stack:
            session = _build(resolved, ranks, stack, from_step, events or Events())
            reason, agreed = _loop(session)
            _finish(session, reason, agreed)
        if session.stop_signal.received == signal.SIGINT:
            # The run is complete, but the command that called it must stop too.
            step, is_stage = session.state.progress.step, _is_stage(session.run.folder)
            follows = "; the same command continues with what follows" if is_stage else ""
            raise StoppedError(
                "stopped-by-signal", f"stopped by SIGINT after step {step}, the last of the run{follows}"
            )
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        assert resolved.folder is not None
        why = f"could not write {error.filename or resolved.folder}: {error.strerror}"
        raise UserError("cannot-write", f"{why}; free some space and {_how_to_continue(resolved.folder)}") from None
    except KeyboardInterrupt:
        if resolved.folder is None or not Run.exists(resolved.folder):
            raise
        raise StoppedError("interrupted", f"interrupted; {_how_to_continue(resolved.folder)}") from None


def _build(
    resolved: ResolvedRun, ranks: parallel.Ranks, stack: ExitStack, from_step: int | None, events: Events
) -> Session:
    """Build what the loop works with, and restore the run; `stack` closes it all at the end."""
    run = resolved.open_folder(ranks)
    settings = run.settings
    console = Console(settings.log.level, settings.log.style, is_speaker=ranks.is_first)
    slow = threading.Timer(SLOW_S, console.say, ["building the model and computing the first step ..."])
    slow.daemon = True
    slow.start()
    stack.callback(slow.cancel)
    run.refuse_other_data(resolved.data)
    make_deterministic(settings.train)
    set_precision(settings.train)
    is_ours = stack.enter_context(run.lock()) if ranks.is_first else True
    if not ranks.broadcast_int(is_ours):
        raise AgreedError("run-in-use", f"another process is training in {run.folder}; wait for it or stop it")
    stack.enter_context(keep_log(run.folder, ranks.rank, ranks.world))
    if restart_reason():
        note("warning", "restart", f"all ranks were restarted after {restart_reason()}")
    stack.enter_context(oom_as_user_error(settings, ranks.world, run.folder if settings.checkpoint.enabled else None))

    state = TrainState.build(run.computed(), ranks, draws=False)
    restore(state, run, resolved.data, resolved.weights, ranks, console, from_step)
    progress = state.progress
    on_gpu = ranks.device.type == "cuda"
    loader = Loader(resolved.data, settings, rank=ranks.rank, world=ranks.world, pin_memory=on_gpu)
    evaluator = _evaluator(resolved, ranks)
    if ranks.is_first:
        run.write_config(run.folder)
        announce(run, loader, ranks, progress, console, resolved.notes)
        resolved.warn_of_rate()
    events.building(settings, state, loader)
    saver = Saver(
        run.checkpoints, settings.checkpoint.keep, keep_best=settings.checkpoint.keep_best, settings=settings.to_dict()
    )
    stack.callback(saver.wait)
    stopwatch = Stopwatch(ranks.device)
    num_examples = evaluator.num_examples if evaluator is not None else 0
    agenda = Agenda(
        settings, progress, num_examples=num_examples, evaluation=run.evaluation, keeps_time=ranks.is_first,
        step_size=loader.step_size,
    )  # fmt: skip
    if evaluator is not None and agenda.plan.num_examples != num_examples:
        evaluator.shrink(agenda.plan.num_examples)
    if not agenda.end_reason(progress):
        rehearsal = loader.rehearsal(progress.step, progress.samples)
        warm_up_s = state.warm_up(rehearsal)
        if ranks.is_first:
            announce_time(run, loader, ranks, console, rehearsal, warm_up_s)
        if settings.checkpoint.enabled:
            state.allocate_snapshots()
    last_step, rank_times = settings.train.last_step(), None
    if ranks.store is not None and ranks.world > 1:
        rank_times = RankTimes(ranks.rank, ranks.world, ranks.store, ranks.all_gather_rows, settings.log)
    metrics = Metrics(
        run.folder,
        stopwatch,
        console,
        first_step=progress.step,
        last_step=last_step,
        trackers=_trackers(run, progress.step, console) if ranks.is_first else (),
        is_writer=ranks.is_first,
        rank_times=rank_times,
        seconds_left=agenda.seconds_left,
    )
    stack.callback(metrics.close)
    console.start(progress.step, last_step)
    stack.callback(console.stop)
    telemetry = start_telemetry(run.folder, ranks.device, settings.log, ranks.rank)
    if telemetry is not None:
        stack.callback(telemetry.stop)
    stop_signal = stack.enter_context(StopSignal().listening())
    skipped = SkippedSteps(settings.train.max_skipped_steps)
    return Session(
        run, ranks, state, loader, evaluator, agenda, metrics, saver, stopwatch, skipped, console, telemetry,
        stop_signal, events, progress, slow,
    )  # fmt: skip


def _trackers(run: Run, first_step: int, console: Console) -> list[TrackerThread]:
    folder = run.folder.resolve()
    paths = {"folder": folder, "data": run.data, "init": run.init, "metrics": folder / "metrics.jsonl"}
    paths["checkpoints"] = run.checkpoints.resolve()
    shown = {f"run.{name}": str(path) for name, path in paths.items() if str(path)}
    return start_trackers(run.settings.log, TrackedRun(run.folder, first_step, run.settings.dotted(), shown), console)


def _loop(session: Session) -> tuple[str, int]:
    """Step after step, until the run is complete or the ranks agree to stop.

    Returns why the run is complete, empty if it is not, and what the ranks agreed on after the last step.
    """
    ranks, state, agenda, metrics = session.ranks, session.state, session.agenda, session.metrics
    saver, stopwatch, events = session.saver, session.stopwatch, session.events
    heartbeat, first = ranks.heartbeat, session.resumed_at
    reason = agenda.end_reason(first)
    events.starting()
    agenda.start_clock()
    stopwatch.start()  # the warm-up does not count as the first step's wait for data
    if reason and session.evaluator is not None:
        newest = last_record(session.run.folder / "metrics.jsonl", EvaluationRecord)
        is_evaluated = ranks.broadcast_int(newest is not None and newest.step == first.step)
        if not is_evaluated and not _evaluate_late(session, session.evaluator, reason):
            return "", ranks.all_max(session.stop_signal.request)
    heartbeat.enter("data", first.step + 1)
    # A budget moves the last step, which then ends the loop below.
    known = None if session.run.settings.train.budget else session.run.settings.train.last_step()
    stop = first.step if reason else known or UNKNOWN_STEPS
    for step in session.loader.steps(first.step, first.samples, stop):
        stopwatch.mark()
        before = state.progress
        if agenda.skips_step(step.number + 1):
            pending = skip_step(state, step, session.run.settings, stopwatch)
        else:
            pending = train_step(state, step, agenda.settings_of(step.number + 1), ranks, stopwatch)
        metrics.add(replace(pending, loop_seconds=agenda.seconds()))
        done = state.progress.step
        session.slow.cancel()

        # Ranks agree on what comes next, so that none is left waiting for another.
        heartbeat.enter("agreeing on what comes next")
        request = (
            FAIL if saver.failure or metrics.failure else session.stop_signal.request or agenda.clock_request(done)
        )
        agreed = ranks.all_max(request)
        if agreed == FAIL:
            return "", FAIL
        if done == first.step + 1 and ranks.is_first:
            report_recovery(done)
        due = agenda.after(before, state.progress, agreed)

        if due.flushes:
            heartbeat.enter("reading results")
            session.skipped.note(metrics.flush(), done)
        if due.logs and agenda.is_first_estimate():
            session.console.say(f"about {duration(agenda.seconds() + agenda.seconds_left())} in all at this speed")
        if due.fits:
            due = _fit_to_budget(session, due)
        if session.evaluator is not None and due.evaluates:
            result = _evaluate(session, session.evaluator)
            if not result:
                agreed = ranks.all_max(session.stop_signal.request)
                due = replace(due, ending="", stops=True, saves=session.run.settings.checkpoint.enabled)
            else:
                due = agenda.after_evaluation(due, state.progress, result[session.evaluator.main_metric])
        if due.ending:
            events.ended(state.progress, due.ending)
        if due.saves:
            heartbeat.enter(SAVING)
            with agenda.timing("saving"):
                metrics.sync()  # the metrics on disk cover every step of the checkpoint
                saver.wait()  # the new snapshot overwrites the memory of the one before
                snapshot = state.snapshot()
            if snapshot is not None and metrics.failure is None:
                saver.save(replace(snapshot, progress=agenda.stamp(snapshot.progress)))
        if due.ending or due.stops:
            return due.ending, agreed
        heartbeat.enter("data", done + 1)
        stopwatch.start()
    return reason, CONTINUE


def _evaluate(session: Session, evaluator: Evaluator) -> dict[str, float]:
    """Evaluate the model as it is; no metrics if a signal ended it."""
    progress, events = session.state.progress, session.events
    with session.agenda.timing("evaluation"):
        events.evaluating(progress.samples)
        result = evaluator.evaluate(session.state.engine.outputs, session.ranks, session.stop_signal)
    if not result:
        return {}
    events.evaluated(progress.samples, result)
    if session.ranks.is_first and session.agenda.evaluations_are_slow():
        cure = "--evaluate.every_samples sets their interval, --evaluate.max_examples their size"
        if session.run.settings.task.name:
            cure = "--evaluate.every_epochs sets their interval"
        warn(f"evaluations take more than a tenth of the time; {cure}")
    session.metrics.evaluation(progress.step, progress.samples, result, evaluator.by_class)
    return result


def _evaluate_late(session: Session, evaluator: Evaluator, reason: str) -> bool:
    """Evaluate a complete run whose last evaluation a signal ended; returns False if a signal ends it again."""
    first, run = session.resumed_at, session.run
    result = _evaluate(session, evaluator)
    if not result:
        return False
    session.agenda.after_evaluation(Due(ending=reason), first, result[evaluator.main_metric])
    judged = session.agenda.stamp(first)
    if run.settings.checkpoint.keep_best and judged.best_step == first.step and session.ranks.is_first:
        checkpoint.write_best(run.checkpoints, judged)  # its files exist: the run was resumed from them
    return True


def _finish(session: Session, reason: str, agreed: int) -> None:
    """Record the end of a complete run, and wait for the last save; raises if a save failed or a signal stopped it."""
    session.ranks.heartbeat.enter(SAVING)
    if reason:
        progress = session.state.progress
        energy = _energy(session.telemetry, progress.tokens - session.resumed_at.tokens, session.ranks)
        session.metrics.end(session.agenda.stamp(progress), reason, energy)
    session.saver.wait()
    _raise_if_failed(session)
    if not reason and agreed in (STOP, REQUEUE):
        _raise_stopped(session, agreed)


def _raise_if_failed(session: Session) -> None:
    """Raise on every rank if one could not write its checkpoint or metrics. Only the first rank writes."""
    failure = session.saver.failure or session.metrics.failure
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    if session.ranks.all_max(FAIL if failure else CONTINUE) != FAIL:
        return
    run = session.run
    newest = checkpoint.whole_checkpoints(run.checkpoints)[-1:]
    kept = f"the last valid checkpoint is {newest[0]}" if newest else "there is no valid checkpoint yet"
    raise AgreedError(
        "cannot-write",
        f"could not write into {run.folder}: {getattr(failure, 'strerror', None) or failure}; {kept}; free some space "
        f"and {_how_to_continue(run.folder)}",
    )


def _raise_stopped(session: Session, agreed: int) -> None:
    """Raise how a signal stopped the run, and how to continue it."""
    received, is_saved = session.stop_signal.received, session.run.settings.checkpoint.enabled
    name = received.name if received else "a signal to another rank"
    kept = "which is not saved (checkpoint.enabled false)"
    if is_saved:
        kept = f"which is saved; {_how_to_continue(session.run.folder)}"
    sentence = f"stopped by {name} after step {session.state.progress.step}, {kept}"
    if agreed == REQUEUE and is_saved:
        raise RequeueError("stopped-by-signal", sentence)
    raise StoppedError("stopped-by-signal", sentence)


def _is_stage(run: Path) -> bool:
    """Whether the run is a part of `bertrain train`."""
    return (run.parent / TRAIN_PLAN).is_file()


def _how_to_continue(folder: Path) -> str:
    if _is_stage(folder):
        return "the same command continues"
    return f"continue with `bertrain resume {quote(str(folder))}`"


def train_step(
    state: TrainState, step: Step, settings: Settings, ranks: parallel.Ranks, stopwatch: Stopwatch
) -> PendingStep:
    """One optimizer step: this rank's bins forward and backward, the all-reduce, and the update.

    Nothing here waits for the device. A step whose loss or gradient is not finite leaves the state unchanged.
    """
    engine = state.engine
    heartbeat = ranks.heartbeat
    heartbeat.enter("forward and backward", step.number + 1)
    engine.begin(step)
    state.exchange.begin()
    for number, batch in enumerate(step.bins, start=1):
        engine.add_bin(batch, step, is_last=number == len(step.bins))
        heartbeat.move()
    stopwatch.mark()

    heartbeat.enter("sum over ranks")
    state.exchange.finish()
    ranks.all_reduce_sum(engine.sums)
    ranks.all_reduce_max(*engine.peaks)
    stopwatch.mark()

    heartbeat.enter("update")
    rate = learning_rate(step.number, settings.optimizer.learning_rate, settings.schedule, settings.train.max_steps)
    verdict = engine.update(rate)
    stopwatch.mark()

    state.progress = Progress(
        step=step.number + 1, samples=step.next_position, tokens=state.progress.tokens + step.num_tokens
    )
    return PendingStep(
        step=replace(step, bins=[]),
        model=settings.model,
        learning_rate=rate,
        sums=engine.sums.clone(),
        verdict=verdict,
        marks=stopwatch.lap(),
        own_tokens=sum(batch.num_tokens for batch in step.bins),
        own_bins=len(step.bins),
    )


def skip_step(state: TrainState, step: Step, settings: Settings, stopwatch: Stopwatch) -> PendingStep:
    """Skip a step: its examples count as seen, but nothing is computed or changed."""
    for _ in PHASES[1:]:
        stopwatch.mark()
    state.progress = replace(state.progress, step=step.number + 1, samples=step.next_position)
    return PendingStep(
        step=replace(step, bins=[]),
        model=settings.model,
        learning_rate=0.0,
        sums=packed_sums(torch.nan),
        verdict=not_computed(),
        marks=stopwatch.lap(),
        skipped=True,
    )


def _fit_to_budget(session: Session, due: Due) -> Due:
    """Fit the length and the evaluations of the run to the time left, as the first rank measures it, and record it."""
    agenda, evaluator, ranks = session.agenda, session.evaluator, session.ranks
    before, cost = agenda.plan, agenda.seconds_per_evaluation
    found = agenda.replan(can_shrink=evaluator is not None and evaluator.can_shrink)
    plan = BudgetPlan(*map(ranks.broadcast_int, astuple(found)))
    due = agenda.apply(plan, due)
    if plan == before and not due.ending:
        return due
    if evaluator is not None and plan.num_examples != before.num_examples:
        evaluator.shrink(plan.num_examples)
    session.run = replace(session.run, settings=agenda.settings, evaluation=agenda.evaluation)
    session.metrics.last_step, session.saver.settings = plan.last_step, agenda.settings.to_dict()
    if ranks.is_first:
        session.run.write_config(session.run.folder)  # before any checkpoint relies on it
        budget, step = agenda.settings.train.budget, session.state.progress.step
        if not due.ending and plan.last_step != before.last_step:
            speed = f"{agenda.seconds_per_step:.3g} s a step after step {step:,}"
            is_small = abs(plan.last_step - before.last_step) < 0.25 * before.last_step
            say = session.console.detail if is_small else session.console.say
            say(f"train.budget {budget}: {speed}: the run and its schedule end with step {plan.last_step:,}")
            if before.last_step == UNKNOWN_STEPS:
                warn_of_warm_up(agenda.settings)
        if sentence := plan.describe(before, budget, cost):
            session.console.say(sentence)
    return due


def _energy(telemetry: TelemetryWriter | None, tokens: int, ranks: parallel.Ranks) -> dict[str, float]:
    """Energy of all ranks' devices in this start, in joules; NaN if one cannot be measured, none without telemetry."""
    if telemetry is None:
        return {}
    telemetry.stop()
    joules = telemetry.joules
    num_devices = torch.cuda.device_count() if ranks.device.type == "cuda" else 1
    if ranks.local_rank >= num_devices:
        joules = 0.0  # another rank reports this device
    total = torch.tensor([torch.nan if joules is None else joules], dtype=torch.float64, device=ranks.device)
    ranks.all_reduce_sum(total)
    return {"joules": total.item(), "joules_per_million_tokens": 1e6 * total.item() / max(1, tokens)}


def _evaluator(resolved: ResolvedRun, ranks: parallel.Ranks) -> Evaluator | None:
    settings, data = resolved.settings, resolved.data
    if resolved.task is not None:
        splits = resolved.task.held_out()
        return TaskEvaluator(resolved.task, splits, settings, data.folder, data.vocabulary) if splits else None
    if resolved.held_out is None:
        return None
    return HeldOutEvaluator(resolved.held_out, settings, ranks, settings.evaluate.max_examples)
