"""Where weights come from: a run of ours, or a folder in somebody else's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from bertrain.errors import UserError
from bertrain.files import file_digest
from bertrain.model.bert import Bert
from bertrain.train import checkpoint
from bertrain.train.runs import Run
from bertrain.weights import huggingface
from bertrain.weights.tensors import PADDED_BY_VOCABULARY, POSITIONS, Weights


def read_weights(source: str | Path, which: str = "newest") -> Weights:
    """The weights of a run's whole checkpoint (`newest`, `best` or a step), or of a Hugging Face folder."""
    folder = Path(source)
    if not folder.exists():
        raise UserError(f"no run and no weights at {folder}")
    if (folder / huggingface.MODEL).is_file():
        if which != "newest":
            raise UserError(f"--checkpoint {which} chooses among those of a run, and {folder} is none")
        return huggingface.read_folder(folder)
    run = Run.open(folder)
    chosen, _ = checkpoint.choose(run.checkpoints, which)
    if chosen is None:
        raise UserError(f"the run {folder} has no whole checkpoint yet")
    return Weights(
        origin=str(chosen),
        fingerprint=file_digest(chosen / checkpoint.MODEL)[1],
        tensors=checkpoint.read_weights(chosen),
        settings=run.settings.model,
        vocabulary=run.vocabulary(),
    )


def build_model(weights: Weights) -> Bert:
    """The model with these weights, ready to predict; every tensor must be there."""
    model = Bert(weights.settings)
    missing = [name for name in model.state_dict() if name not in weights.tensors]
    if missing:
        raise UserError(
            f"{weights.origin} lacks {len(missing)} tensors of a pre-training model: {', '.join(missing[:5])}"
        )
    model.load_state_dict({name: weights.tensors[name] for name in model.state_dict()})
    return model.eval()


def fill_in(parameters: dict[str, Tensor], weights: Weights, *, extends_positions: bool = False) -> list[str]:
    """Copy weights into a model's parameters by name; returns the names that the source does not have.

    Rows that pad the vocabulary stay as they are, and so do positions beyond those of the source, which may have fewer
    if `extends_positions`. A tensor of another shape is refused, before any is copied.
    """
    check_fit(parameters, weights, extends_positions=extends_positions)
    taken = [name for name in parameters if name in weights.tensors]
    for name in taken:
        tensor = weights.tensors[name]
        parameters[name][: len(tensor)].copy_(tensor[: len(parameters[name])])
    return [name for name in parameters if name not in weights.tensors]


def check_fit(parameters: Mapping[str, Tensor], weights: Weights, *, extends_positions: bool = False) -> None:
    """Refuse weights of other shapes than a model's parameters, or of no tensor in common with them."""
    if not any(name in weights.tensors for name in parameters):
        raise UserError(f"{weights.origin} holds no tensor of a BERT by any name known here")
    for name, parameter in parameters.items():
        if name in weights.tensors and not _fits(name, parameter, weights, extends_positions):
            found, wanted = tuple(weights.tensors[name].shape), tuple(parameter.shape)
            has_fewer = name == POSITIONS and found[0] < wanted[0] and found[1] == wanted[1]
            advice = "; to initialise the other positions, use --train.init_positions extend" if has_fewer else ""
            raise UserError(f"the weights of {weights.origin} do not fit: {name} is {found}, not {wanted}{advice}")


def _fits(name: str, parameter: Tensor, weights: Weights, extends_positions: bool) -> bool:
    theirs = weights.tensors[name].shape
    if name in PADDED_BY_VOCABULARY:
        return theirs[1:] == parameter.shape[1:] and min(len(parameter), theirs[0]) >= weights.settings.vocab_size
    if name == POSITIONS and extends_positions:
        return theirs[1:] == parameter.shape[1:] and theirs[0] <= len(parameter)
    return theirs == parameter.shape
