"""What a run begins with where `--init` names one: another run's weights, or a Hugging Face folder's.

Two phases are two runs: the second begins with the first. Its counters, its data and its schedule are its own;
`train.init_optimizer` says whether the optimizer goes on too, `train.init_positions` whether it may be for longer
sequences than those weights were.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bertrain.base.console import Console
from bertrain.base.errors import AgreedError, UserError
from bertrain.base.formatting import counted
from bertrain.config.settings import Settings
from bertrain.data.formats.source import DataSource
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert
from bertrain.model.initialization import initialize
from bertrain.optim.madgrad import START
from bertrain.optim.optimizer import Optimizer
from bertrain.run import checkpoint
from bertrain.run.folder import Run, refuse_other_vocabulary
from bertrain.weights.source import check_shapes, copy_weights, match_parameters, read_weights
from bertrain.weights.tensors import PADDED_BY_VOCABULARY, POSITIONS, Weights


def check_beginning(settings: Settings, shards: DataSource, init: str) -> str:
    """Refuse a beginning that does not fit; returns the fingerprint of the weights, or nothing without `init`."""
    how = settings.train
    if not init:
        for name, value in (("init_optimizer", how.init_optimizer), ("init_positions", how.init_positions)):
            if value in ("keep", "extend"):
                raise UserError(f"train.{name} {value} is about a run to begin with, and there is no --init")
        return ""
    weights = read_weights(init)
    if weights.vocabulary is not None and not settings.task.name:  # a task is read with the words of the weights
        refuse_other_vocabulary(shards, weights.vocabulary.hash)
    with torch.device("meta"):
        parameters = dict(Bert(settings.model).named_parameters())
    check_shapes(parameters, weights, extends_positions=how.init_positions == "extend")
    if how.init_optimizer == "keep":
        read_moments(init, settings.optimizer.name, parameters)
    return weights.fingerprint


def begin_with(model: Bert, arena: Arena, optimizer: Optimizer, run: Run, console: Console) -> None:
    """Take up the weights of `run.init`, and the optimizer's state if it is to be kept; draw what these do not have."""
    how = run.settings.train
    weights = read_weights(run.init)
    if weights.fingerprint != run.init_fingerprint:
        raise AgreedError(f"the weights of {run.init} have changed since this run was begun; start a new run")
    parameters = arena.named(arena.values)
    initialize(model, how.seed, _not_whole(parameters, weights, model.settings.vocab_size))
    initialized = copy_weights(parameters, weights, extends_positions=how.init_positions == "extend")
    places = match_parameters(parameters, weights)
    console.say(f"beginning with the weights of {weights.origin}: {len(places)} tensors taken")
    left_over = [*weights.left_over, *(name for name in weights.tensors if name not in places.values())]
    for kind, names in (("initialized afresh", [*initialized, *_fresh_positions(parameters, weights)]),
                        ("left over", left_over)):  # fmt: skip
        if names:
            console.say(f"  {kind}: {', '.join(names)}")
    if weights.rounded:
        console.say(f"  rounded from 64 bits to 32: {counted(len(weights.rounded), 'tensor')}")
    ours = tuple(run.task.get("labels", ()))
    if "answer.classify.weight" in places and weights.labels and weights.labels != ours:
        console.say(f"  the head is taken as it is, though its classes were {', '.join(weights.labels)} there")
    optimizer.begin()
    if how.init_optimizer == "keep":
        moments, num_applied = read_moments(run.init, run.settings.optimizer.name, parameters)
        optimizer.load(moments, num_applied)
        console.say(f"  optimizer: its state there, after {num_applied:,} updates, is kept")
    else:
        console.say("  optimizer: begins anew")


def _not_whole(parameters: Mapping[str, Tensor], weights: Weights, vocab_size: int) -> list[str]:
    """The parameters of which the weights have nothing, or not every row; a vocabulary's padding does not count."""
    places = match_parameters(parameters, weights)
    rows = {name: len(weights.tensors[theirs]) for name, theirs in places.items()}
    needed = {name: vocab_size if name in PADDED_BY_VOCABULARY else len(one) for name, one in parameters.items()}
    return [name for name in parameters if rows.get(name, 0) < needed[name]]


def _fresh_positions(parameters: Mapping[str, Tensor], weights: Weights) -> list[str]:
    """The positions that the weights do not have, in words."""
    if POSITIONS not in weights.tensors:
        return []
    there, here = len(weights.tensors[POSITIONS]), len(parameters[POSITIONS])
    return [f"positions {there} to {here - 1}"] if there < here else []


def read_moments(init: str, name: str, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The optimizer's state in the newest checkpoint of the run `init`, for a model of `parameters`, and its updates.

    Rows that are not there (of more positions, or of padding) are as in a fresh optimizer. Raises UserError for what
    is no run, a run of another optimizer than `name`, and a tensor that does not fit.
    """
    if not (Path(init) / "config.json").is_file() or not (Path(init) / "checkpoints").is_dir():
        raise UserError(f"train.init_optimizer keep wants a run of bertrain, and {init} holds weights alone; use reset")
    begun = Run.open(init)
    theirs = begun.settings.optimizer.name
    if theirs != name:
        raise UserError(
            f"train.init_optimizer keep: the run {init} was trained with {theirs}, and optimizer.name is {name}; "
            "use the same, or reset"
        )
    newest, _ = checkpoint.newest_whole(begun.checkpoints)
    if newest is None:
        raise UserError(f"the run {init} has no whole checkpoint yet")
    kept = {}
    snapshot = checkpoint.read_checkpoint(newest)
    for key, tensor in snapshot.optimizer.items():
        kind, _, parameter = key.partition("/")
        if parameter in parameters:
            fresh = parameters[parameter].detach() if kind == START else torch.zeros_like(parameters[parameter])
            kept[key] = _fitted(key, tensor, parameter, fresh)
    return kept, snapshot.progress.updates


def _fitted(key: str, tensor: Tensor, parameter: str, fresh: Tensor) -> Tensor:
    """A moment in the shape of its parameter here, which may have other rows: those of `fresh`."""
    shape = fresh.shape
    if tensor.shape == shape:
        return tensor
    may_have_other_rows = parameter in (*PADDED_BY_VOCABULARY, POSITIONS)
    if not may_have_other_rows or tensor.shape[1:] != shape[1:]:
        raise UserError(
            f"the optimizer's state to begin with does not fit: {key} is {tuple(tensor.shape)}, not {tuple(shape)}; "
            "use train.init_optimizer reset"
        )
    fitted = fresh.clone()
    fitted[: len(tensor)] = tensor[: len(fitted)]
    return fitted
