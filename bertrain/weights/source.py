"""Open weights at a path, a run or another format, and copy them into a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.base.files import read_json, reading
from bertrain.base.formatting import counted
from bertrain.config.roberta import num_reserved
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.encoder import EncoderModel
from bertrain.model.families import new_model
from bertrain.run import checkpoint
from bertrain.run.folder import Run, advise_runs
from bertrain.run.records import thresholds_at
from bertrain.weights import huggingface, tensor_bundle
from bertrain.weights.companions import (
    CONFIGS,
    FINETUNED_AS,
    find_vocabulary,
    finetuned_as_of,
    is_transformers_folder,
    labels_of,
    model_settings,
    thresholds_of,
)
from bertrain.weights.hub import locate, suggest_hub
from bertrain.weights.names import ParameterSlice, in_other_head
from bertrain.weights.roberta import drop_reserved
from bertrain.weights.tensors import (
    PADDED_BY_VOCABULARY,
    POSITIONS,
    OpenedWeights,
    Weights,
    list_names,
    load_tensors,
    parameter_shapes,
    store_in_memory,
)

PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
NEWEST = "newest"  # the default checkpoint of a run


def read_weights(source: str | Path, which: str = NEWEST) -> Weights:
    """Read the weights of a run's checkpoint, or of a file or folder in another format, under our names."""
    return load_tensors(open_source(source, which=which))


def open_source(
    source: str | Path,
    *,
    config: Path | None = None,
    vocab: Path | None = None,
    which: str = NEWEST,
    hashes: bool = True,
) -> OpenedWeights:
    """Open the weights at `source`, recognized by its files:

    - a run of ours: `which` selects the newest or best checkpoint, or that of a step; or one of its checkpoint folders
    - a Hugging Face folder: safetensors or pytorch_model.bin, in one file or in several
    - a TensorFlow 1 checkpoint: its prefix, any of its files, or a folder with one
    - a PyTorch file, such as NVIDIA's, or a folder with one
    - hub:NAME: downloaded from the Hugging Face hub

    `config` and `vocab` replace the bert_config.json (or config.json) and the vocab.txt beside the weights.
    Without `hashes` the files of a run's checkpoint are checked by their sizes alone.
    """
    path = locate(source)
    if is_checkpoint(path):
        path, which = path.parents[1], str(checkpoint.step_of(path))
    opened = _open_foreign(path)
    if opened is None:
        if config or vocab:
            raise UserError(
                "conflicting-options",
                f"{path} is a run and has its own config and vocabulary; leave --config and --vocab out",
            )
        return _open_run(path, which, hashes)
    if which != NEWEST:
        raise UserError("not-a-run", f"--checkpoint {which} is for runs, and {path} is not a run; leave it out")
    weights, folder = opened
    config = config or next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
    described = _with_config(weights, config) if config else weights
    return replace(described, vocabulary=find_vocabulary(folder, vocab))


def _with_config(weights: OpenedWeights, path: Path) -> OpenedWeights:
    """The weights as a config file describes them."""
    fields = read_json(path, {})
    settings = model_settings(fields, path)
    reserved = num_reserved(fields, path) if settings.is_roberta else 0
    return replace(
        weights,
        tensors=tuple(drop_reserved(stored, reserved) for stored in weights.tensors),
        settings=settings,
        labels=labels_of(fields),
        thresholds=thresholds_of(fields),
        finetuned_as=finetuned_as_of(fields, settings),
    )


def run_of(source: str | Path) -> Path:
    """The folder of the run that a source is, or that it is a checkpoint of."""
    path = locate(source)
    return path.parents[1] if is_checkpoint(path) else path


def is_checkpoint(path: Path) -> bool:
    """Whether this is a folder such as RUN/checkpoints/step-00000500."""
    return checkpoint.is_name(path.name) and path.parent.name == "checkpoints" and Run.exists(path.parents[1])


def _open_foreign(path: Path) -> tuple[OpenedWeights, Path] | None:
    """Weights in another format, and the folder of their config; None for a folder that can only be a run."""
    with reading(path):  # a name that is too long, a folder without permission
        files = huggingface.find_files(path)
        prefix = tensor_bundle.find_prefix(path)
        exists = path.exists()
    if files:
        return huggingface.open_files(files), files[0].parent
    if prefix is not None:
        return tensor_bundle.open_checkpoint(prefix), prefix.parent
    if not exists:
        raise UserError("missing-weights", f"there are no weights and no run at {path}{suggest_hub(path)}")
    if path.is_file():
        return _open_file(path), path.parent
    if not path.is_dir():
        raise UserError("not-a-folder", f"{path} is neither a file nor a folder")
    pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if len(pickles) > 1:
        names = ", ".join(file.name for file in pickles)
        raise UserError("ambiguous-weights", f"{path} has several PyTorch files ({names}); name one")
    if pickles:
        return _open_file(pickles[0]), path
    if (path / CONFIGS[1]).is_file():
        if is_transformers_folder(path):
            what = f"has the {CONFIGS[1]} of a Hugging Face folder, but no weights; download them"
            if (path / "model.onnx").is_file():
                what = "is an ONNX export, which only onnxruntime reads; name the weights that it was made of"
            raise UserError("missing-weights", f"{path} {what}")
        return None
    if parts := sorted(file for file in path.iterdir() if tensor_bundle.is_part(file)):
        return _open_file(parts[0]), path
    raise UserError("missing-weights", f"there are no weights and no run in {path}{advise_runs(path)}")


def _open_file(path: Path) -> OpenedWeights:
    if path.suffix in (".safetensors", *PICKLE_SUFFIXES):
        return huggingface.open_files([path])
    if tensor_bundle.is_part(path):
        raise UserError(
            "missing-parts", f"{path} is part of a TensorFlow checkpoint, but its .index file is missing; download it"
        )
    suffixes = f".safetensors, {', '.join(PICKLE_SUFFIXES)}, or the .index of a TensorFlow checkpoint"
    raise UserError("unknown-format", f"{path} does not end like a file of weights: {suffixes}")


def _open_run(folder: Path, which: str, hashes: bool) -> OpenedWeights:
    run = Run.open(folder)
    settings = run.settings.dotted()
    chosen, warnings = checkpoint.choose(run.checkpoints, which, hashes=hashes)
    for warning in warnings:
        warn(warning)
    try:
        tensors, step = checkpoint.read_weights(chosen), checkpoint.read_progress(chosen).step
        digest = checkpoint.weights_digest(chosen)
    except checkpoint.RemovedError:
        return _open_run(folder, which, hashes)  # a run that is still training has others
    return OpenedWeights(
        kind="run",
        origin=str(chosen),
        fingerprint=lambda: digest,
        tensors=tuple(store_in_memory(name, tensor, ParameterSlice(name)) for name, tensor in tensors.items()),
        settings=run.settings.model,
        vocabulary=run.vocabulary(),
        global_step=step,
        labels=tuple(run.task.get("labels", ())),
        thresholds=_thresholds_of(run, chosen),
        max_seq_length=run.settings.data.max_seq_length,
        finetuned_as={key: settings[key] for key in FINETUNED_AS} if run.settings.task.name else {},
    )


def _thresholds_of(run: Run, chosen: Path) -> dict[str, float]:
    """Those that the evaluation at a checkpoint fitted for several labels; empty for another head."""
    if run.settings.model.head != "multilabel":
        return {}
    return thresholds_at(run.folder / "metrics.jsonl", checkpoint.step_of(chosen))


def build_model(weights: Weights) -> EncoderModel:
    """Build the model with these weights, in evaluation mode; refuses incomplete weights."""
    refuse_incomplete(weights)
    model = new_model(weights.settings)
    model.load_state_dict({name: weights.tensors[name] for name in model.state_dict()})
    return model.eval()


def vocabulary_of(weights: Weights | OpenedWeights, source: str | Path) -> Vocabulary:
    """The vocabulary of the weights at `source`; refuses weights without one."""
    if weights.vocabulary is None:
        cure = "put its vocab.txt or tokenizer.json there, or use `bertrain weights import --vocab FILE`"
        raise UserError("missing-vocabulary", f"{source} has no vocabulary; {cure}")
    return weights.vocabulary


def refuse_incomplete(weights: Weights) -> None:
    missing = [name for name in parameter_shapes(weights.settings) if name not in weights.tensors]
    if missing:
        count, head = counted(len(missing), "tensor"), weights.settings.head
        raise UserError("missing-tensors", f"{weights.origin} lacks {count} for head {head!r}: {list_names(missing)}")


def copy_weights(parameters: dict[str, Tensor], weights: Weights, *, extends_positions: bool = False) -> list[str]:
    """Copy weights into a model's parameters by name; returns the names of parameters that they lack.

    Rows of vocabulary padding are unchanged, and so are further positions, which the weights may lack if
    `extends_positions`. A tensor of another shape is refused before any is copied.
    """
    check_shapes(parameters, weights, extends_positions=extends_positions)
    names = match_parameters(parameters, weights)
    for name, theirs in names.items():
        tensor = weights.tensors[theirs]
        parameters[name][: len(tensor)].copy_(tensor[: len(parameters[name])])
    return [name for name in parameters if name not in names]


def match_parameters(parameters: Mapping[str, Tensor], weights: Weights) -> dict[str, str]:
    """The name in the weights of each parameter that they have.

    The pooler (modern: the transform) of one kind of head serves the other. The last layer of a head for other classes
    is not used, nor is BERT's of words for texts, which have the same name and differ in the pooler before it.
    """
    names = {}
    of_words = "answer.pool.weight" not in parameters
    for name, parameter in parameters.items():
        theirs = name if name in weights.tensors else in_other_head(name, weights.settings.family)
        is_other_head = name.startswith(("answer.classify.", "answer.score.")) and theirs in weights.tensors
        if is_other_head:
            is_same_kind = name.startswith("answer.score.") or of_words == (weights.settings.head == "tag")
            is_same_kind |= weights.settings.family == "modern"  # whose heads are all the same
            is_other_head = not is_same_kind or weights.tensors[theirs].shape != parameter.shape
        if theirs in weights.tensors and not is_other_head:
            names[name] = theirs
    return names


def check_shapes(parameters: Mapping[str, Tensor], weights: Weights, *, extends_positions: bool = False) -> None:
    """Refuse weights of other shapes than a model's parameters, or without any of them."""
    names = match_parameters(parameters, weights)
    if not names:
        raise UserError("no-bert-tensors", f"{weights.origin} has no tensor with a name as in BERT")
    wrong = {
        name: f"{name} is {tuple(weights.tensors[theirs].shape)}, not {tuple(parameters[name].shape)}"
        for name, theirs in names.items()
        if not _fits(name, parameters[name], weights.tensors[theirs], weights, extends_positions)
    }
    if wrong:
        advice = ""
        positions = weights.tensors.get(POSITIONS)
        if list(wrong) == [POSITIONS] and positions is not None and len(positions) < len(parameters[POSITIONS]):
            advice = "; to initialize the other positions, use --train.init_positions extend"
        shapes = list_names(list(wrong.values()))
        raise UserError("shape-mismatch", f"the weights of {weights.origin} do not fit the model: {shapes}{advice}")


def _fits(name: str, parameter: Tensor, tensor: Tensor, weights: Weights, extends_positions: bool) -> bool:
    theirs = tensor.shape
    if name in PADDED_BY_VOCABULARY:
        return theirs[1:] == parameter.shape[1:] and min(len(parameter), theirs[0]) >= weights.settings.vocab_size
    if name == POSITIONS and extends_positions:
        return theirs[1:] == parameter.shape[1:] and theirs[0] <= len(parameter)
    return theirs == parameter.shape
