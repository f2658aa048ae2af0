"""One start of a run, resolved once: what it trains with, on what, from which weights, and whether it has begun.

resolve_run      a run that begins here, or that is continued by its first command
resolve_resume   a run that is continued by its folder alone

Pre-flight, dry run and training take the ResolvedRun that these make, and open nothing a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.base.files import absolute
from bertrain.base.machine import is_first_rank
from bertrain.config.resolve import in_family, override
from bertrain.config.settings import Settings
from bertrain.data.feed.batching import check_groups
from bertrain.data.feed.loader import check_data, check_shares, training_examples
from bertrain.data.formats.source import DataSource, open_data
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.ranks import parallel
from bertrain.ranks.parallel import Ranks
from bertrain.run import checkpoint
from bertrain.run.folder import Run, check_free, refuse_other_vocabulary
from bertrain.run.trackers import check_trackers
from bertrain.tasks import registry
from bertrain.tasks.task import Task
from bertrain.training import engine
from bertrain.training.replacing_engine import check_copy, read_generator, write_generator
from bertrain.training.resolve_auto import check_memory, draw_seed, find_token_budget, fit_to_data, resolve_auto
from bertrain.training.restore import InitWeights, refuse_init_settings
from bertrain.training.task_evaluator import task_data
from bertrain.training.task_settings import ARCHITECTURE, evaluate_as_overridden, fit_to_task, refuse_other_unit
from bertrain.weights.companions import find_vocabulary
from bertrain.weights.tensors import PADDING_LIMIT, Weights

MOST_TO_CONTINUE = 2e-4  # a learning rate of AdamW above it makes trained weights forget


@dataclass(frozen=True)
class ResolvedRun:
    """A start of a run: settings without `auto`, and everything that it reads, opened."""

    folder: Path | None
    """The run folder; None for a dry run that names none."""
    settings: Settings
    data: DataSource
    world: int
    """Number of ranks."""
    begun: Run | None = None
    """The run in `folder`, if it has begun."""
    init: str = ""
    """The path given as `--init`."""
    weights: InitWeights | None = None
    """The weights of `init`, opened; None if the run has begun."""
    task: Task | None = None
    held_out: DataSource | None = None
    """The data of `evaluate.data`, opened; a task has its own."""
    generator: Weights | None = None
    """Of `data.generator`, for a new run to keep; None without it, and on other ranks than the first."""
    notes: tuple[str, ...] = ()
    """Lines to print at the start: what `auto` means, what was found in the files of a task."""

    def warn_of_rate(self) -> None:
        """Warn if continued pre-training uses a recipe's learning rate, at which trained weights would forget."""
        optimizer, given = self.settings.optimizer, self.settings.given
        if self.weights is None or self.task is not None or given is None:
            return
        is_own = bool({"model.config", "optimizer.learning_rate"} & given)
        is_adam = optimizer.name in ("adamw", "stableadamw", "muon")
        if is_adam and optimizer.learning_rate > MOST_TO_CONTINUE and not is_own:
            rate = f"the recipe's learning rate {optimizer.learning_rate:g} is for a new model"
            warn(f"{rate}; trained weights want --lr 5e-5")

    def check_memory(self) -> None:
        check_memory(self.settings, self.data, self.world, is_begun=self.begun is not None)

    def draw(self, ranks: Ranks) -> ResolvedRun:
        """Resolve what a new run needs its ranks for: a seed that one draws, a token budget that all can compute."""
        if not ranks.broadcast_int(self.begun is None):
            return self
        settings, seed_notes = draw_seed(self.settings, ranks)
        settings, budget_notes = find_token_budget(settings, self.data, ranks)
        return replace(self, settings=settings, notes=(*self.notes, *seed_notes, *budget_notes))

    def open_folder(self, ranks: Ranks) -> Run:
        """The run folder, which the first rank creates if the run begins here."""
        assert self.folder is not None
        # A barrier: no rank may find the folder begun that the first rank is about to create.
        is_new = ranks.broadcast_int(self.begun is None)
        if is_new and ranks.is_first:
            fingerprint = self.weights.fingerprint if self.weights else ""
            description = self.task.to_dict() if self.task else None
            write = partial(write_generator, self.generator) if self.generator else None
            Run.create(self.folder, self.settings, self.data, self.init, fingerprint, description, write)
        ranks.broadcast_int(0)
        return (self.begun or Run.open(self.folder)).continued(self.settings, self.data.folder)


def resolve_run(
    settings: Settings,
    data: str | Path,
    folder: str | Path | None,
    *,
    init: str = "",
    ranks: Ranks | None = None,
    world: int = 1,
    here: bool = True,
    same_task: ResolvedRun | None = None,
) -> ResolvedRun:
    """Resolve a start of the run in `folder`, and refuse what does not fit together. Nothing is written.

    Called by every rank with its `ranks`: the first one verifies hashes for all. Without `ranks`, before any are
    started, nothing is hashed, and `world` is their number; if they will not be started `here`, no device is
    looked at. `same_task` is an earlier run on the same task data.
    """
    init = absolute(init)
    begun = Run.open(folder) if folder is not None and Run.exists(folder) else None
    weights = InitWeights.open(init, ranks) if init and begun is None else None
    world = ranks.world if ranks is not None else world
    task: Task | None = None
    shape_notes: list[str] = []
    if not settings.task.name:
        settings, shape_notes = fit_to_weights(settings, begun, weights)
    else:
        vocabulary = begun.vocabulary() if begun else _vocabulary_for(settings, weights)
        is_same = same_task is not None and same_task.data.vocabulary.hash == vocabulary.hash
        task = same_task.task if same_task and is_same else registry.open_task(settings, Path(data), vocabulary)
        assert task is not None
        settings = fit_to_task(settings, task, begun, weights, world=world)
    notes: list[str] = []
    if here or begun is not None:
        settings, notes = resolve_auto(settings, begun)
    resolved = _open(settings, Path(data), task, vocabulary if task else None, ranks, world, begun)
    settings = resolved.settings
    if here:  # the data has the size of the vocabulary, which the kernels are tried with
        engine.choose(settings, parallel.choose_device(settings.train.device)[0])
    check_data(resolved.data, settings)
    check_shares(resolved.data, settings)
    training_examples(resolved.data, settings)
    if begun is not None:
        begun.refuse_other(settings, init)
    elif folder is not None:
        check_free(Path(folder))
    if weights is not None:
        weights.check(settings, resolved.data)
    elif begun is None:
        refuse_init_settings(settings)
    place, notes = Path(folder) if folder is not None else None, [*shape_notes, *notes, *resolved.notes]
    return replace(resolved, folder=place, begun=begun, init=init, weights=weights, notes=tuple(notes))


def resolve_resume(
    folder: str | Path,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    from_step: int | None = None,
    ranks: Ranks | None = None,
    world: int = 1,
) -> ResolvedRun:
    """Resolve the continuation of a run with `overrides` of settings that do not shape the training."""
    begun = Run.open(folder)
    settings = override(begun.settings, list(overrides))
    if settings.batch.auto and not begun.settings.batch.auto:
        keeps = f"leave it out: this run keeps its batch.token_budget of {settings.batch.token_budget}"
        raise UserError("fixed-setting", f"batch.auto works only when a run starts; {keeps}")
    if from_step:
        checkpoint.find_step(begun.checkpoints, from_step)
    if not begun.data.exists():
        cure = "put it back, or repeat the first command with the new path in --data"
        raise UserError("missing-data", f"the data of this run is no longer at {begun.data}; {cure}")
    vocabulary = begun.vocabulary() if settings.task.name else None
    task = registry.open_task(settings, begun.data, vocabulary) if vocabulary else None
    world = ranks.world if ranks is not None else world
    resolved = _open(settings, begun.data, task, vocabulary, ranks, world, begun)
    if task is not None:
        refuse_other_unit(settings, task)
        num_rows = len(settings.data.rows(resolved.data.num_examples))
        settings = evaluate_as_overridden(settings, dict(overrides), num_rows)
    return replace(resolved, settings=settings, folder=Path(folder), begun=begun, init=begun.init)


def _open(
    settings: Settings,
    folder: Path,
    task: Task | None,
    vocabulary: Vocabulary | None,
    ranks: Ranks | None,
    world: int,
    begun: Run | None,
) -> ResolvedRun:
    """Open the data to train and to evaluate on, take sizes from it, and refuse data that do not belong together."""
    check_groups(settings.batch.group_size, world)
    check_trackers(settings.log)
    if task is not None:
        assert vocabulary is not None
        data: DataSource = task_data(task.training(), folder, settings, vocabulary)
        task.held_out()  # read now, so that a damaged file is refused before training
        notes = list(task.notes)
    else:
        data = open_for(folder, settings, ranks)
        settings, notes = fit_to_data(settings, data)
    held_out: DataSource | None = None
    if settings.evaluate.data and task is None:
        held_out = open_for(settings.evaluate.data, settings, ranks)
        check_data(held_out, settings)
        refuse_other_vocabulary(held_out, data.vocabulary.hash)
    generator: Weights | None = None
    if settings.model.rtd and (ranks is None or ranks.is_first):
        if begun is None:
            generator = read_generator(settings, data)
        else:
            check_copy(begun)
    return ResolvedRun(
        None, settings, data, world, task=task, held_out=held_out, generator=generator, notes=tuple(notes)
    )


def fit_to_weights(settings: Settings, begun: Run | None, weights: InitWeights | None) -> tuple[Settings, list[str]]:
    """Settings of pre-training with the model's shape taken from `--init`, and notes; refuses another by the user."""
    known = weights.source.settings if weights else begun.settings.model if begun and begun.init else None
    given = settings.given
    if known is None or given is None or "model.config" in given:
        return settings, []
    if "model.family" in given and known.family != settings.model.family:
        asked = f"model.family is {settings.model.family}"
        raise UserError("other-model", f"{asked}, but the weights of --init have {known.family}; leave the setting out")
    of_recipe, settings = settings.model.family, in_family(settings, known.family)
    model = settings.model
    keeps_positions = settings.train.init_positions == "extend" or "model.max_positions" in given
    kept = {"vocab_size", *(["max_positions"] if keeps_positions else [])}
    theirs = {name: getattr(known, name) for name in ARCHITECTURE if name not in kept}
    theirs |= {"nsp": False} if known.is_roberta else {}
    taken = {name: value for name, value in theirs.items() if value != getattr(model, name)}
    for name, value in taken.items():
        if f"model.{name}" in given:
            asked = f"model.{name} is {getattr(model, name)}"
            raise UserError("other-model", f"{asked}, but the weights of --init have {value}; leave the setting out")
    shape = [f"model.{name} {value:g}" for name, value in taken.items()]
    if model.family != of_recipe:
        shape.insert(
            0, f"model.family {model.family} with its defaults, such as {settings.data.mask_probability:.0%} masked"
        )
    notes = [f"from the weights of --init: {', '.join(shape)}"] if shape else []
    return replace(settings, model=replace(model, **taken)), notes


def open_for(folder: str | Path, settings: Settings, ranks: Ranks | None) -> DataSource:
    """Prepared data. The first rank hashes its files as `data.verify` says; others, or no ranks, check only sizes."""
    verify = settings.data.verify if ranks is not None and ranks.is_first else "size"
    return open_data(folder, vocab=settings.data.vocab, verify=verify, quiet=not is_first_rank())


def _vocabulary_for(settings: Settings, weights: InitWeights | None) -> Vocabulary:
    """The vocabulary to read a task with: that of the weights, or the file `data.vocab`."""
    if weights is None:
        raise UserError("missing-init", "name the run or the weights to fine-tune, such as --init runs/base")
    source, vocabulary = weights.source, weights.source.vocabulary
    if settings.data.vocab:
        given = find_vocabulary(Path(), Path(settings.data.vocab))
        assert given is not None
        vocabulary = given if vocabulary is None else replace(given, lower_case=vocabulary.lower_case)
    if vocabulary is None:
        raise UserError("missing-vocabulary", f"{weights.path} has no vocabulary; name one with --data.vocab FILE")
    rows = source.settings.vocab_size if source.settings else len(vocabulary.words)
    if not 0 <= rows - len(vocabulary.words) < PADDING_LIMIT:
        sizes = f"has {len(vocabulary.words):,} words, but the model of {weights.path} has {rows:,}"
        found = f"{settings.data.vocab or 'the vocabulary'} {sizes}"
        raise UserError("other-vocabulary", f"{found}; give the vocabulary of its training with --data.vocab FILE")
    return vocabulary
