"""Where weights come from: a run of ours, or a file or folder in somebody else's format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.model.bert import Bert
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.weights import huggingface, nvidia, tf1
from bertrain.weights.companions import CONFIGS, read_json
from bertrain.weights.names import Place, other_pool
from bertrain.weights.tensors import (
    PADDED_BY_VOCABULARY,
    POSITIONS,
    Source,
    Stored,
    Weights,
    gather,
    in_a_sentence,
    parameter_shapes,
)

PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
LAST_LAYERS = ("answer.classify.", "answer.score.")
NEWEST = "newest"  # which checkpoint of a run, unless asked for another


def read_weights(source: str | Path, which: str = NEWEST) -> Weights:
    """The weights of a run's whole checkpoint, or of somebody else's file or folder, under our names."""
    return gather(open_source(source, which=which))


def open_source(
    source: str | Path,
    *,
    config: Path | None = None,
    vocab: Path | None = None,
    which: str = NEWEST,
    hashes: bool = True,
) -> Source:
    """What lies at `source`, recognized by what is there:

    - a run of ours: a whole checkpoint of it, `which` says: newest, best or a step
    - a Hugging Face folder: safetensors or pytorch_model.bin, in one file or in several
    - a TensorFlow 1 checkpoint: its prefix, any of its files, or a folder with one
    - a file of PyTorch's, NVIDIA's for example, or a folder with one

    `config` and `vocab` stand in for the bert_config.json (or config.json) and the vocab.txt beside the weights.
    Without `hashes` the files of a run's checkpoint are checked by their sizes alone.
    """
    path = Path(source)
    opened = _open_others(path, config, vocab)
    if opened is None:
        if config or vocab:
            raise UserError(
                f"{path} is a run, which knows its config and its vocabulary; leave --config and --vocab out"
            )
        return _open_run(path, which, hashes)
    if which != NEWEST:
        raise UserError(f"--checkpoint {which} chooses among those of a run, and {path} is none")
    return opened


def _open_others(path: Path, config: Path | None, vocab: Path | None) -> Source | None:
    """What lies there in somebody else's format; None for a folder that can only be a run."""
    try:
        files = huggingface.find_files(path)
        prefix = tf1.find_prefix(path)
        is_there = path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"cannot open {path}: {error.strerror or error}") from None
    if files:
        return huggingface.open_files(files, config=config, vocab=vocab)
    if prefix is not None:
        return tf1.open_checkpoint(prefix, config=config, vocab=vocab)
    if not is_there:
        raise UserError(f"no run and no weights at {path}")
    if path.is_file():
        return _open_file(path, config, vocab)
    if not path.is_dir():
        raise UserError(f"{path} is neither a file nor a folder")
    pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if len(pickles) > 1:
        names = ", ".join(file.name for file in pickles)
        raise UserError(f"{path} holds several files of PyTorch's ({names}); name one of them")
    if pickles:
        return _open_file(pickles[0], config, vocab)
    _refuse_no_run(path)
    return None


def _refuse_no_run(folder: Path) -> None:
    """Refuse a folder in which there is nothing of a run."""
    described = folder / CONFIGS[1]
    if described.is_file():
        if "model_type" in read_json(described):
            raise UserError(f"{folder} has the {CONFIGS[1]} of a Hugging Face folder, and no weights beside it")
    elif any(tf1.is_part(file) for file in folder.iterdir()):
        raise UserError(f"{folder} has parts of a TensorFlow checkpoint, and no .index among them")
    else:
        raise UserError(f"no run and no weights in {folder}")


def _open_file(path: Path, config: Path | None, vocab: Path | None) -> Source:
    if path.suffix == ".safetensors":
        return huggingface.open_files([path], config=config, vocab=vocab)
    if path.suffix in PICKLE_SUFFIXES:
        return nvidia.open_file(path, config=config, vocab=vocab)
    if tf1.is_part(path):
        raise UserError(f"{path} is part of a TensorFlow checkpoint whose .index does not lie beside it")
    raise UserError(
        f"{path} is no file of weights by its name; known are .safetensors, {', '.join(PICKLE_SUFFIXES)} and the "
        ".index of a TensorFlow checkpoint"
    )


def _open_run(folder: Path, which: str, hashes: bool) -> Source:
    run = Run.open(folder)
    chosen, _ = checkpoint.choose(run.checkpoints, which, hashes=hashes)
    tensors = checkpoint.read_weights(chosen)
    return Source(
        kind="run",
        origin=str(chosen),
        fingerprint=partial(checkpoint.weights_digest, chosen),
        tensors=tuple(_stored(name, tensor) for name, tensor in tensors.items()),
        settings=run.settings.model,
        vocabulary=run.vocabulary(),
        global_step=checkpoint.read_progress(chosen).step,
        labels=tuple(run.task.get("labels", ())),
    )


def _stored(name: str, tensor: Tensor) -> Stored:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Stored(name, tuple(tensor.shape), dtype, tensor.nbytes, read=lambda: tensor, place=Place(name, -1))


def build_model(weights: Weights) -> Bert:
    """The model with these weights, ready to predict; every tensor must be there."""
    refuse_incomplete(weights)
    model = Bert(weights.settings)
    model.load_state_dict({name: weights.tensors[name] for name in model.state_dict()})
    return model.eval()


_KINDS = {"pretrain": "pre-training", "classify": "classifying", "regress": "regressing", "span": "span"}


def refuse_incomplete(weights: Weights) -> None:
    """Refuse weights without a head, or with holes."""
    missing = [name for name in parameter_shapes(weights.settings) if name not in weights.tensors]
    if missing:
        raise UserError(
            f"{weights.origin} lacks {counted(len(missing), 'tensor')} of a {_KINDS[weights.settings.head]} model: "
            f"{in_a_sentence(missing)}"
        )


def fill_in(parameters: dict[str, Tensor], weights: Weights, *, extends_positions: bool = False) -> list[str]:
    """Copy weights into a model's parameters by name; returns the names that the source does not have.

    Rows that pad the vocabulary stay as they are, and so do positions beyond those of the source, which may have fewer
    if `extends_positions`. A tensor of another shape is refused, before any is copied.
    """
    check_fit(parameters, weights, extends_positions=extends_positions)
    places = taken_from(parameters, weights)
    for name, theirs in places.items():
        tensor = weights.tensors[theirs]
        parameters[name][: len(tensor)].copy_(tensor[: len(parameters[name])])
    return [name for name in parameters if name not in places]


def taken_from(parameters: Mapping[str, Tensor], weights: Weights) -> dict[str, str]:
    """For each parameter that the source has, the name it has there.

    A pooler passes from one kind of head to the other; the last layer of a head for other classes is not taken.
    """
    places = {}
    for name, parameter in parameters.items():
        theirs = name if name in weights.tensors else other_pool(name)
        is_other_head = name.startswith(LAST_LAYERS) and theirs in weights.tensors
        if theirs in weights.tensors and not (is_other_head and weights.tensors[theirs].shape != parameter.shape):
            places[name] = theirs
    return places


def check_fit(parameters: Mapping[str, Tensor], weights: Weights, *, extends_positions: bool = False) -> None:
    """Refuse weights of other shapes than a model's parameters, or of no tensor in common with them."""
    places = taken_from(parameters, weights)
    if not places:
        raise UserError(f"{weights.origin} holds no tensor of a BERT by any name known here")
    wrong = {
        name: f"{name} is {tuple(weights.tensors[theirs].shape)}, not {tuple(parameters[name].shape)}"
        for name, theirs in places.items()
        if not _fits(name, parameters[name], weights.tensors[theirs], weights, extends_positions)
    }
    if wrong:
        advice = ""
        positions = weights.tensors.get(POSITIONS)
        if list(wrong) == [POSITIONS] and positions is not None and len(positions) < len(parameters[POSITIONS]):
            advice = "; to initialize the other positions, use --train.init_positions extend"
        raise UserError(f"the weights of {weights.origin} do not fit: {in_a_sentence(list(wrong.values()))}{advice}")


def _fits(name: str, parameter: Tensor, tensor: Tensor, weights: Weights, extends_positions: bool) -> bool:
    theirs = tensor.shape
    if name in PADDED_BY_VOCABULARY:
        return theirs[1:] == parameter.shape[1:] and min(len(parameter), theirs[0]) >= weights.settings.vocab_size
    if name == POSITIONS and extends_positions:
        return theirs[1:] == parameter.shape[1:] and theirs[0] <= len(parameter)
    return theirs == parameter.shape
