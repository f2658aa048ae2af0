"""Restores a run: from its newest checkpoint, from the weights of `--init`, or from fresh ones.

`--init` names another run, or weights of any supported format. Two phases are two runs: the second begins with the
first; its counters, data and schedule are its own. `train.init_optimizer` says whether the optimizer's state is kept,
`train.init_positions` whether the model may have more positions than the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from bertrain.base.console import Console, warn
from bertrain.base.errors import UserError
from bertrain.base.formatting import counted, few
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import training_examples
from bertrain.data.formats.frequencies import word_shares
from bertrain.data.formats.source import DataSource
from bertrain.model.encoder import EncoderModel
from bertrain.model.initialization import WORD_BIAS, initialize, set_word_bias, uninitialized
from bertrain.optim.rules import START
from bertrain.ranks.parallel import Ranks
from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run, refuse_other_vocabulary
from bertrain.training.state import TrainState
from bertrain.weights.source import NEWEST, check_shapes, copy_weights, match_parameters, open_source
from bertrain.weights.tensors import PADDED_BY_VOCABULARY, POSITIONS, OpenedWeights, Weights, load_tensors


@dataclass
class InitWeights:
    """The weights of `--init`: each rank opens and reads them once, and only the first rank hashes them."""

    path: str
    source: OpenedWeights
    fingerprint: str
    """SHA-256 of the weights; empty on other ranks than the first, which verifies for all."""

    @staticmethod
    def open(path: str, ranks: Ranks | None) -> InitWeights:
        """Open what `path` names. Without `ranks`, before any are started, nothing is hashed."""
        if ranks is None:
            return InitWeights(path, open_source(path, hashes=False), "")
        source = open_source(path) if ranks.is_first else None
        # The first rank may have passed over a damaged checkpoint: every rank takes the one that it chose.
        is_run = source is not None and source.kind == "run"
        step = ranks.broadcast_int(checkpoint.step_of(Path(source.origin)) if source and is_run else -1)
        if source is not None:
            return InitWeights(path, source, source.fingerprint())
        return InitWeights(path, open_source(path, which=str(step) if step >= 0 else NEWEST, hashes=False), "")

    @cached_property
    def weights(self) -> Weights:
        """The tensors under the names of our model."""
        return load_tensors(replace(self.source, fingerprint=lambda: self.fingerprint))

    def check(self, settings: Settings, data: DataSource) -> None:
        """Refuse weights that do not fit the model, the data, or the optimizer whose state is to be kept."""
        vocabulary = self.weights.vocabulary
        if vocabulary is not None and not settings.task.name:  # a task is read with the vocabulary of the weights
            refuse_other_vocabulary(data, vocabulary.hash)
        parameters = dict(uninitialized(settings.model).named_parameters())
        check_shapes(parameters, self.weights, extends_positions=settings.train.init_positions == "extend")
        if settings.train.init_optimizer == "keep":
            theirs = self._check_optimizer(settings.optimizer.name)
            known = {key.partition("/")[2] for key in fit_moments(self.moments, parameters)}
            if missing := [name for name in parameters if name not in known]:
                lacks = f"train.init_optimizer keep: {self.path} has no optimizer state of {few(missing)}"
                raise UserError("other-model", f"{lacks}; use the same model settings, or reset")
            if settings.train.init_progress == "keep" and theirs.model != settings.model:
                differs = f"keep continues the model of {self.path}, but the model settings differ from it"
                raise UserError("other-model", f"train.init_progress {differs}; leave them out")

    def _check_optimizer(self, name: str) -> Settings:
        """Refuse a run with another optimizer than this; returns the settings of the run."""
        if self.source.kind != "run":
            why = f"train.init_optimizer keep needs a bertrain run, but {self.path} has only weights"
            raise UserError("no-optimizer-state", f"{why}; use --train.init_optimizer reset")
        theirs = Run.open(Path(self.source.origin).parents[1]).settings
        if theirs.optimizer.name != name:
            differs = f"the run {self.path} was trained with {theirs.optimizer.name}, but optimizer.name is {name}"
            raise UserError(
                "other-optimizer", f"train.init_optimizer keep: {differs}; use the same optimizer, or reset"
            )
        return theirs

    @cached_property
    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state beside the weights of a run."""
        return checkpoint.read_moments(Path(self.source.origin))

    def release(self) -> None:
        """Forget the tensors, so that their memory is free while training runs."""
        for name in ("weights", "moments"):
            self.__dict__.pop(name, None)


def refuse_init_settings(settings: Settings) -> None:
    """Refuse settings about initial weights where `--init` names none."""
    train = settings.train
    for name in ("init_optimizer", "init_progress", "init_positions"):
        if (value := getattr(train, name)) in ("keep", "extend"):
            raise UserError("missing-init", f"train.{name} {value} needs initial weights; give them with --init")


def restore(
    state: TrainState, run: Run, data: DataSource, weights: InitWeights | None, ranks: Ranks, console: Console,
    from_step: int | None,
) -> None:  # fmt: skip
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
        run.refuse_foreign(path, checkpoint.read_state(path)[1])
        state.progress = _load(path, state)
        if run.settings.checkpoint.keep_best:
            state.progress = _known_best(run, state.progress, ranks)
        return
    if not run.init:
        _initialize(state.model, run.settings, data)
        state.optimizer.begin()
        state.engine.restore({})
        return
    weights = weights or InitWeights.open(run.init, ranks)
    if ranks.is_first and weights.fingerprint != run.init_fingerprint:
        raise UserError(
            "changed-init", f"the weights of {run.init} have changed since this run started; start a new run"
        )
    if run.settings.train.init_progress == "keep":
        theirs = _load(Path(weights.source.origin), state)
        # Its time and its best evaluation are not of this run.
        state.progress = Progress(theirs.step, theirs.samples, theirs.tokens, theirs.updates)
        console.say(f"going on from {weights.source.origin}, with its optimizer state and place in the data")
        weights.release()
    else:
        _begin_with(weights, state, run, data, console)
        state.engine.restore({})


def _load(path: Path, state: TrainState) -> Progress:
    """Load the weights, the optimizer and the engine of a checkpoint; returns its counters."""
    snapshot = checkpoint.read_checkpoint(path)
    state.arena.load(state.arena.values, snapshot.model)
    state.optimizer.load(snapshot.optimizer, snapshot.progress.updates)
    state.engine.restore(snapshot.optimizer)
    return snapshot.progress


def _known_best(run: Run, progress: Progress, ranks: Ranks) -> Progress:
    """`progress` with the best evaluation of the run, or without one if its checkpoint is lost."""
    if ranks.is_first and (warning := checkpoint.reconcile_best(run.checkpoints, progress)):
        warn(warning)
    ranks.broadcast_int(0)  # other ranks read the file only now
    return checkpoint.with_best(run.checkpoints, progress)


def _initialize(
    model: EncoderModel, settings: Settings, data: DataSource, names: Collection[str] | None = None
) -> None:
    """Set initial weights, of all tensors or of `names`."""
    initialize(model, settings.train.seed, names)
    has_bias = WORD_BIAS in (dict(model.named_parameters()) if names is None else names)
    if settings.model.initial_bias == "frequencies" and has_bias:
        set_word_bias(model, torch.from_numpy(word_shares(data, training_examples(data, settings))))


def _begin_with(init: InitWeights, state: TrainState, run: Run, data: DataSource, console: Console) -> None:
    """Copy the weights of `init`, and the optimizer's state if it is kept, into `state`; initialize what they lack."""
    train, weights = run.settings.train, init.weights
    parameters = state.arena.named(state.arena.values)
    _initialize(state.model, run.settings, data, _not_whole(parameters, weights, run.settings.model.vocab_size))
    initialized = copy_weights(parameters, weights, extends_positions=train.init_positions == "extend")
    places = match_parameters(parameters, weights)
    console.say(f"beginning with the weights of {weights.origin}: {len(places)} tensors taken")
    if POSITIONS in weights.tensors and len(weights.tensors[POSITIONS]) < len(parameters[POSITIONS]):
        initialized.append(f"positions {len(weights.tensors[POSITIONS])} to {len(parameters[POSITIONS]) - 1}")
    left_over = [*weights.left_over, *(name for name in weights.tensors if name not in places.values())]
    for what, names in (("newly initialized", initialized), ("left over", left_over)):
        if names:
            console.say(f"  {what}: {few(names)}")
            console.detail(f"  {what}, all: {', '.join(names)}")
    if weights.rounded:
        console.say(f"  rounded from 64 bits to 32: {counted(len(weights.rounded), 'tensor')}")
    labels = tuple(run.task.get("labels", ()))
    if "answer.classify.weight" in places and weights.labels and weights.labels != labels:
        console.say(f"  the classification head is kept, though its classes were {', '.join(weights.labels)}")
    state.optimizer.begin()
    if train.init_optimizer == "keep":
        num_updates = checkpoint.read_progress(Path(init.source.origin)).updates
        state.optimizer.load(fit_moments(init.moments, parameters), num_updates)
        console.say(f"  optimizer: its state after {num_updates:,} updates is kept")
    else:
        console.say("  optimizer: starts with a new state")
    init.release()


def fit_moments(moments: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An optimizer's state in the shapes of `parameters`; rows that it lacks are those of a fresh optimizer."""
    fitted = {}
    for key, tensor in moments.items():
        kind, _, parameter = key.partition("/")
        if parameter not in parameters:
            continue
        values = parameters[parameter].detach()
        if tensor.shape == values.shape:
            fitted[key] = tensor
            continue
        if parameter not in (*PADDED_BY_VOCABULARY, POSITIONS) or tensor.shape[1:] != values.shape[1:]:
            unfit = f"does not fit: {key} is {tuple(tensor.shape)}, not {tuple(values.shape)}"
            raise UserError("other-shape", f"the optimizer state of --init {unfit}; use --train.init_optimizer reset")
        fitted[key] = values.clone() if kind == START else torch.zeros_like(values)
        fitted[key][: len(tensor)] = tensor[: len(values)]
    return fitted


def _not_whole(parameters: Mapping[str, Tensor], weights: Weights, vocab_size: int) -> list[str]:
    """The parameters that the weights lack, or lack rows of; rows that pad the vocabulary do not count."""
    places = match_parameters(parameters, weights)
    rows = {name: len(weights.tensors[theirs]) for name, theirs in places.items()}
    needed = {name: vocab_size if name in PADDED_BY_VOCABULARY else len(one) for name, one in parameters.items()}
    return [name for name in parameters if rows.get(name, 0) < needed[name]]
