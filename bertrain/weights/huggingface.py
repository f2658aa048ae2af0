"""Hugging Face folders, out and in: `config.json`, `model.safetensors`, and a tokenizer that needs no code of ours.

Read are also `pytorch_model.bin`, either of them in several files, old names, and folders without heads. Tensors are
copied bit for bit in fp32.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.files import new_folder, refuse_occupied, save_tensors
from bertrain.config.resolve import BERT_CONFIG_KEYS
from bertrain.config.settings import ModelSettings
from bertrain.data.text.tokenizer import build_pipeline
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary
from bertrain.weights import torch_files
from bertrain.weights.companions import (
    CONFIGS,
    TOKENIZER,
    VOCABULARY,
    find_labels,
    find_settings,
    find_vocabulary,
    read_json,
)
from bertrain.weights.names import BUFFERS, TORCH_AND_COPIES, huggingface_names, place_in, spell
from bertrain.weights.tensors import (
    NOT_PREDICTED,
    PADDED_BY_VOCABULARY,
    Source,
    Stored,
    Weights,
    combined_digest,
    padded,
)

MODEL, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""After the name of a model in several files: which tensor is in which."""
GLOBAL_STEP = "global_step"
MASKED_WORD_BIAS = PADDED_BY_VOCABULARY[1]
LOADERS = {
    "pretrain": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "regress": "AutoModelForSequenceClassification",
    "span": "AutoModelForQuestionAnswering",
}
"""What in Transformers loads a folder, by the model's head."""
SAFETENSORS_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


# --- in -------------------------------------------------------------------------------------------------


def find_files(folder: Path) -> list[Path]:
    """The files with a folder's weights: safetensors before pickles, one file before several; none if it has none."""
    for name in (MODEL, PICKLED):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / (name + INDEX)
        if index.is_file():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise UserError(f"{index} has no weight_map that says which tensor is in which file")
            names = sorted({str(file) for file in places.values()})
            for file in names:
                if Path(file).name != file:
                    raise UserError(f"{index} names the file {file!r}, which is not one of its folder")
                if not (folder / file).is_file():
                    raise UserError(f"{folder} lacks {file}, where {index.name} says that tensors are")
            return [folder / file for file in names]
    return []


def open_files(files: list[Path], *, config: Path | None = None, vocab: Path | None = None) -> Source:
    """The tensors of some files of one folder, with the config and the vocabulary in it."""
    folder = files[0].parent
    origin = files[0] if len(files) == 1 and files[0].name not in (MODEL, PICKLED) else folder
    tensors: dict[str, Stored] = {}
    steps = []
    for path in files:
        found, step = _open_file(path)
        for stored in found:
            if stored.name in tensors:
                raise UserError(f"{folder} has the tensor {stored.name} twice")
            tensors[stored.name] = stored
        steps.append(step)
    return Source(
        kind="huggingface",
        origin=str(origin),
        fingerprint=lambda: combined_digest(files),
        tensors=with_places(tensors.values()),
        settings=find_settings(folder, config),
        vocabulary=find_vocabulary(folder, vocab),
        global_step=steps[0],
        labels=find_labels(folder),
    )


def _open_file(path: Path) -> tuple[list[Stored], int | None]:
    """A file's tensors, and the step of training that it names."""
    if path.suffix != ".safetensors":
        content = torch_files.load(path)
        inner = content.get("model")
        return stored_torch(inner if isinstance(inner, dict) else content, path), None
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
            step = (file.metadata() or {}).get(GLOBAL_STEP, "")
            described = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"the weights {path} cannot be read: {error}") from None
    return [
        Stored(name, shape, SAFETENSORS_TYPES.get(dtype, dtype), _bytes_of(shape, dtype), partial(_read, path, name))
        for name, (shape, dtype) in described.items()
    ], int(step) if step.isdecimal() else None


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


def stored_torch(content: dict[str, Any], path: Path) -> list[Stored]:
    """The tensors of a state_dict in memory, or mapped into it; what is no tensor in it is passed over by name."""
    stored = []
    for name, value in content.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            stored.append(Stored(name, tuple(value.shape), dtype, value.nbytes, partial(_itself, value)))
        else:
            stored.append(Stored(name, (), type(value).__name__, 0, partial(_itself, Tensor()), is_skipped=True))
    if not any(isinstance(value, Tensor) for value in content.values()):
        deeper = [name for name, value in content.items() if isinstance(value, dict)]
        advice = f"; save what lies in it under {deeper[0]!r} alone" if deeper else ""
        raise UserError(f"{path} holds no tensors by name{advice}")
    return stored


def _itself(tensor: Tensor) -> Tensor:
    return tensor.detach()


def with_places(stored: Iterable[Stored]) -> tuple[Stored, ...]:
    """Tensors under PyTorch's names, each with its place in our model."""
    stored = list(stored)
    spelled = spell([tensor.name for tensor in stored])
    return tuple(
        replace(
            tensor,
            place=place_in(TORCH_AND_COPIES, spelled[tensor.name]),
            is_skipped=tensor.is_skipped or spelled[tensor.name] in BUFFERS,
        )
        for tensor in stored
    )


# --- out ------------------------------------------------------------------------------------------------


def to_huggingface(weights: Weights, *, pad_vocab_to: int = 1, pad_bias: float = 0.0) -> dict[str, Tensor]:
    """Our tensors, as far as there are any, under their names; with padding of its own, or none, to the vocabulary."""
    rows = -(-weights.settings.vocab_size // pad_vocab_to) * pad_vocab_to
    out = {}
    for theirs, place in huggingface_names(weights.settings.num_layers, head=weights.settings.head).items():
        if place.ours in weights.tensors:
            tensor = weights.tensors[place.ours]
            if place.ours in PADDED_BY_VOCABULARY:
                value = pad_bias if place.ours == MASKED_WORD_BIAS else 0.0
                tensor = padded(tensor[: weights.settings.vocab_size], rows, value)
            out[theirs] = place.within(tensor).contiguous()
    return out


def write_folder(out: Path, weights: Weights, *, pad_vocab_to: int = 1) -> None:
    """Write a folder that AutoModel (or AutoModelFor..., by its head) and AutoTokenizer load; whole or not at all."""
    refuse_occupied(out)
    tensors = to_huggingface(weights, pad_vocab_to=pad_vocab_to, pad_bias=NOT_PREDICTED)
    rows = len(tensors["bert.embeddings.word_embeddings.weight"])
    settings = replace(weights.settings, vocab_size=rows)
    metadata = {"format": "pt"} | ({} if weights.global_step is None else {GLOBAL_STEP: str(weights.global_step)})
    with new_folder(out) as folder:
        save_tensors(tensors, folder / MODEL, metadata)
        config = {"architectures": [_architecture(weights)], "model_type": "bert"} | bert_config(settings)
        config |= _described_head(weights)
        if weights.vocabulary is not None:
            config["pad_token_id"] = weights.vocabulary.id_of("[PAD]")
            _write_tokenizer(folder, weights.vocabulary, settings)
        (folder / CONFIGS[1]).write_text(json.dumps(config | {"tie_word_embeddings": True}, indent=2) + "\n")


def _architecture(weights: Weights) -> str:
    missing = weights.missing
    if weights.settings.head != "pretrain":
        return "BertForQuestionAnswering" if weights.settings.head == "span" else "BertForSequenceClassification"
    if any(name.startswith("masked_words.") for name in missing):
        return "BertModel"
    return "BertForMaskedLM" if missing else "BertForPreTraining"


def _described_head(weights: Weights) -> dict[str, Any]:
    """What a config says of a fine-tuned head: its classes by name."""
    settings = weights.settings
    if settings.head not in ("classify", "regress"):
        return {}
    count = settings.num_labels if settings.head == "classify" else 1
    labels = weights.labels if len(weights.labels) == count else [f"LABEL_{number}" for number in range(count)]
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "classifier_dropout": settings.head_dropout,
        "problem_type": "regression" if settings.head == "regress" else "single_label_classification",
    }


def bert_config(settings: ModelSettings) -> dict[str, Any]:
    """The fields of a bert_config.json."""
    return {"hidden_act": "gelu"} | {theirs: getattr(settings, ours) for theirs, ours in BERT_CONFIG_KEYS.items()}


def _write_tokenizer(folder: Path, vocabulary: Vocabulary, settings: ModelSettings) -> None:
    vocabulary.save(folder / VOCABULARY)
    build_pipeline(vocabulary, for_models=True).save(str(folder / "tokenizer.json"))
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_WORDS, strict=True))
    described = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lower_case,
        "model_max_length": settings.max_positions,
        **named,
    }
    (folder / TOKENIZER).write_text(json.dumps(described, indent=2) + "\n")
