"""Pre-training, and the beginning of every run: data and run folder are opened, what can be refused is refused.

pretrain / resume     a run from its beginning, or from its newest checkpoint; the loop itself is loop.py
preflight             all that can be looked at before anything is written or any rank is started
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bertrain.base.console import warn
from bertrain.base.errors import AgreedError, UserError
from bertrain.config.resolve import override
from bertrain.config.settings import EvaluateSettings, Settings
from bertrain.data.feed.batching import check_groups
from bertrain.data.feed.loader import check_data, training_rows
from bertrain.data.formats.source import DataSource
from bertrain.planning.time_budget import settle_budget
from bertrain.ranks import parallel
from bertrain.ranks.restart import is_restart, was_rolled_back
from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run, check_free
from bertrain.training import compute
from bertrain.training.evaluate import check_held_out
from bertrain.training.events import Events
from bertrain.training.init_from import check_beginning
from bertrain.training.loop import train
from bertrain.training.open_data import forget_task, open_examples, open_for, open_task, words_for
from bertrain.training.resolve_auto import check_memory, draw_seed, find_token_budget, settle


def pretrain(
    settings: Settings, data: str | Path, run: str | Path, *, init: str = "", events: Events | None = None
) -> Progress:
    """Pre-train as `settings` say on the prepared folder `data`, into the run folder `run`.

    `init` names a run, or weights of any form that `weights show` knows, to begin with. If `run` holds this
    very run already, it is continued. `events` is told what happens.
    """
    init = str(Path(init).resolve()) if init else ""
    settings, notes = settle(settings, run)
    settings = settle_budget(settings, run)
    fingerprint = preflight(settings, data, run, init=init, world=parallel.count_ranks())
    words = words_for(settings, run, init)
    with parallel.join(settings.train) as ranks:
        shards = open_for(data, settings, ranks, words)
        is_new = not (Path(run) / "config.json").is_file()
        if ranks.broadcast_int(is_new):
            settings, drawn = draw_seed(settings, ranks)
            settings, found = find_token_budget(settings, shards, ranks)
            notes += drawn + found
        if ranks.is_first and is_new:
            described = open_task(data, settings, words).to_dict() if words is not None else None
            Run.create(run, settings, shards, init, fingerprint, described)
        ranks.broadcast_int(0)
        _warn_of_no_checkpoints(settings, ranks)
        return train(Run.open(run).continued(settings, shards.folder), shards, ranks, notes=notes, events=events)


def resume(
    run: str | Path, overrides: list[tuple[str, str]] | None = None, *, from_step: int | None = None
) -> Progress:
    """Continue the run in the folder `run` from its newest whole checkpoint, or from the one of `from_step`.

    `overrides` may change settings that do not shape the training: where and how it runs, what is said and saved.
    Going back puts the later checkpoints aside, under another name, and takes the later steps out of the metrics.
    """
    forget_task()
    if is_restart() or was_rolled_back():
        from_step = None  # it went back when it was started; a restart goes on from what was done since
    try:
        settings = preflight_resume(run, overrides, from_step=from_step, world=parallel.count_ranks())
    except UserError as error:
        raise AgreedError(error.code, error.message) from None  # every rank finds the same
    opened = Run.open(run)
    with parallel.join(settings.train) as ranks:
        _warn_of_no_checkpoints(settings, ranks)
        run_now = opened.continued(settings, opened.data)
        shards = open_for(opened.data, settings, ranks, opened.vocabulary())
        return train(run_now, shards, ranks, from_step=from_step)


def preflight_resume(
    run: str | Path,
    overrides: list[tuple[str, str]] | None = None,
    *,
    from_step: int | None = None,
    world: int = 1,
) -> Settings:
    """Refuse what can be refused before a run is touched or any rank is started; returns the settings to go on with."""
    opened = Run.open(run)
    settings = override(opened.settings, overrides or [])
    if settings.batch.auto and not opened.settings.batch.auto:
        raise UserError(
            "batch.auto finds a token_budget when a run begins; this one keeps its "
            f"batch.token_budget of {settings.batch.token_budget}"
        )
    if from_step:
        checkpoint.find_step(opened.checkpoints, from_step)
    if not opened.data.exists():
        raise UserError(
            f"the data of this run is no longer at {opened.data}; put it back, or repeat the first command with "
            "--data and its new place"
        )
    shards = open_examples(opened.data, settings, opened.vocabulary(), verify="size")
    settings = _evaluating_as_asked(settings, dict(overrides or []), shards)
    check_memory(settings, shards, world, is_begun=True)
    check_groups(settings.batch.group_size, world)
    check_held_out(settings, shards)
    return settings


def _evaluating_as_asked(settings: Settings, given: Mapping[str, str], shards: DataSource) -> Settings:
    """What a resumed task is told about evaluations last, in examples: passes over the data were counted in them."""
    if not settings.task.name:
        return settings
    if "evaluate.every_epochs" in given:
        return replace(settings, evaluate=in_examples(settings.evaluate, len(settings.data.rows(len(shards)))))
    if "evaluate.every_samples" in given:
        return replace(settings, evaluate=replace(settings.evaluate, every_epochs=0.0))
    return settings


def in_examples(evaluate: EvaluateSettings, num_rows: int) -> EvaluateSettings:
    """Evaluations after so many passes over `num_rows` examples, as evaluations after so many examples."""
    if not evaluate.every_epochs:
        return evaluate
    return replace(evaluate, every_samples=max(1, round(evaluate.every_epochs * num_rows)))


def roll_back(run: str | Path, step: int) -> None:
    """Put aside the checkpoints after `step`, once and for all ranks that are to be started."""
    opened = Run.open(run)
    with opened.lock() as is_ours:
        if not is_ours:
            raise UserError(f"another process is training in {opened.folder}; wait for it or end it")
        for path in checkpoint.set_aside(opened.checkpoints, step):
            print(f"put aside: {path}")


def _warn_of_no_checkpoints(settings: Settings, ranks: parallel.Ranks) -> None:
    if ranks.is_first and not settings.checkpoint.enabled:
        warn("checkpoint.enabled is false: nothing will be saved, so a signal or a failure loses the run")


def preflight(settings: Settings, data: str | Path, run: str | Path, *, init: str = "", world: int = 1) -> str:
    """Refuse what can be refused before anything is written or any rank is started.

    Looks at the data, a run folder that is taken, the device, and the weights to begin with, whose fingerprint it
    returns (or nothing).
    """
    settings.refuse_unsettled_task()
    settings, _ = settle(settings, run)
    settings = settle_budget(settings, run)
    device, _ = parallel.choose_device(settings.train.device)
    compute.choose(settings, device)
    shards = open_examples(data, settings, words_for(settings, run, init), verify="size")
    check_data(shards, settings)
    training_rows(shards, settings)
    is_begun = (Path(run) / "config.json").is_file()
    check_memory(settings, shards, world, is_begun=is_begun)
    check_groups(settings.batch.group_size, world)
    check_held_out(settings, shards)
    if is_begun:
        Run.open(run).refuse_other(settings, init)
    else:
        check_free(Path(run))
    return check_beginning(settings, shards, init)
