"""Restores a run: from its newest checkpoint, from the weights of `--init`, or from fresh ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bertrain.base.console import Console, warn
from bertrain.model.initialization import initialize
from bertrain.ranks.parallel import Ranks
from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run
from bertrain.training.init_from import InitWeights, begin_with
from bertrain.training.state import TrainState


def restore(
    state: TrainState, run: Run, weights: InitWeights | None, ranks: Ranks, console: Console, from_step: int | None
) -> None:
    """Load the newest whole checkpoint; without one, begin with the weights of `run.init`, or with fresh ones.

    With `from_step`, the checkpoints after that step are renamed first. `weights` are those of `run.init` if they are
    open already.
    """
    newest: Path | None = None
    if ranks.is_first:
        if from_step is not None:
            for path in checkpoint.set_aside(run.checkpoints, from_step):
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
        state.engine.restore(snapshot.optimizer)
        state.progress = snapshot.progress
        if run.settings.checkpoint.keep_best:
            state.progress = _known_best(run, snapshot.progress, ranks)
    else:
        if run.init:
            weights = weights or InitWeights.open(run.init, ranks)
            begin_with(weights, state.model, state.arena, state.optimizer, run, console, verifies=ranks.is_first)
        else:
            initialize(state.model, run.settings.train.seed)
            state.optimizer.begin()
        state.engine.restore({})


def _known_best(run: Run, progress: Progress, ranks: Ranks) -> Progress:
    """`progress`, without its best evaluation if the checkpoint of that one is lost."""
    is_there = True
    if ranks.is_first:
        is_there, warning = checkpoint.settle_best(run.checkpoints, progress)
        if warning:
            warn(warning)
    return progress if ranks.broadcast_int(is_there) else replace(progress, best_step=0, best_accuracy=0.0)
