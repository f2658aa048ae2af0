"""Starts and continues runs: resolves settings, data and weights once, then trains.

pretrain / resume              a run from its beginning, or from its newest checkpoint; the loop itself is loop.py
preflight / preflight_resume   the same resolution before any rank starts, to refuse a run that would fail
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.config.resolve import Overrides, as_pairs, override, resolve
from bertrain.config.settings import Settings
from bertrain.ranks import parallel
from bertrain.ranks.parallel import Ranks
from bertrain.ranks.restart import is_restart, was_rolled_back
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.run.records import EndRecord, EvaluationRecord, StepRecord, last_record
from bertrain.training.events import Events
from bertrain.training.loop import train
from bertrain.training.resolved_run import ResolvedRun, resolve_resume, resolve_run


@dataclass(frozen=True)
class Trained:
    """The result of a run, over all of its starts."""

    run: Path
    step: int
    samples: int
    seconds: float  # in the loop, evaluations and saves included
    loss: float  # of the last step
    evaluation: dict[str, float]  # the metrics of the last one; empty without any


def pretrain(
    settings: Settings | str, data: str | Path, run: str | Path, *, init: str = "", events: Events | None = None
) -> Trained:
    """Pre-train with `settings`, or with a recipe by its name, on the prepared folder `data`, into the folder `run`.

    `init` names initial weights: a run, or any format that `weights show` reads. If the folder `run` has a run with
    these settings, it is continued. The methods of `events` are called during training.

    Example: bertrain.pretrain(bertrain.resolve("bert-tiny", {"train.epochs": 1}), "data", "runs/tiny").loss
    """
    settings = resolve(settings) if isinstance(settings, str) else settings
    settings.refuse_unsettled_task()
    with parallel.join(settings.train) as ranks:
        return start(resolve_run(settings, data, run, init=init, ranks=ranks), ranks, events=events)


def resume(run: str | Path, overrides: Overrides | None = None, *, from_step: int | None = None) -> Trained:
    """Continue the run in the folder `run` from its newest whole checkpoint, or from the one of `from_step`.

    `overrides` may change settings that do not affect the result, such as devices, logging and checkpoints. With
    `from_step`, later checkpoints are renamed, and later steps removed from the metrics.

    Example: bertrain.resume("runs/tiny", {"log.level": "quiet"}).step
    """
    pairs = as_pairs(overrides)
    if is_restart() or was_rolled_back():
        from_step = None  # the first start has gone back; a restart continues with the progress made since
    train_settings = override(Run.open(run).settings, pairs).train
    with parallel.join(train_settings) as ranks:
        resolved = resolve_resume(run, pairs, from_step=from_step, ranks=ranks)
        return start(resolved, ranks, from_step=from_step)


def start(
    resolved: ResolvedRun, ranks: Ranks, *, from_step: int | None = None, events: Events | None = None
) -> Trained:
    """Train a resolved run to its end, if it fits into memory."""
    resolved.check_memory()
    resolved = resolved.draw(ranks)
    if ranks.is_first and not resolved.settings.checkpoint.enabled:
        warn("checkpoint.enabled is false: nothing will be saved, so a signal or a failure loses the run")
    train(resolved, ranks, from_step=from_step, events=events)
    assert resolved.folder is not None
    path = resolved.folder / "metrics.jsonl"
    end, last = last_record(path, EndRecord) or EndRecord(0), last_record(path, StepRecord) or StepRecord(0)
    evaluation = last_record(path, EvaluationRecord) if resolved.settings.evaluates else None
    metrics = evaluation.metrics if evaluation else {}
    return Trained(resolved.folder, end.step, end.samples, end.loop_seconds, last.loss, metrics)


def preflight(
    settings: Settings, data: str | Path, run: str | Path, *, init: str = "", world: int = 1, here: bool = True
) -> ResolvedRun | None:
    """Resolve a run of `world` ranks before any is started, and refuse one that would fail. Nothing is written.

    If the run is not `here` but on the nodes of a job, this machine's device and memory are not checked.
    """
    if not here and not Path(data).exists():
        print(f"{data} is not on this machine: the nodes will check it", flush=True)
        return None
    resolved = resolve_run(settings, data, run, init=init, world=world, here=here)
    if here:
        resolved.check_memory()
    return resolved


def preflight_resume(
    run: str | Path,
    overrides: Sequence[tuple[str, str]] | None = None,
    *,
    from_step: int | None = None,
    world: int = 1,
    here: bool = True,
) -> ResolvedRun:
    """Resolve the continuation of a run before any of its `world` ranks is started, and refuse one that would fail."""
    resolved = resolve_resume(run, overrides or (), from_step=from_step, world=world)
    if here:
        resolved.check_memory()
    return resolved


def roll_back(run: str | Path, step: int) -> None:
    """Rename the checkpoints after `step`, before the ranks start, so that they are not used."""
    opened = Run.open(run)
    with opened.lock() as is_ours:
        if not is_ours:
            raise UserError("run-in-use", f"another process is training in {opened.folder}; wait for it or stop it")
        for path in checkpoint.set_aside(opened.checkpoints, step):
            print(f"put aside: {path}")
