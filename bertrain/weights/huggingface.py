"""Read and write weights under PyTorch's names, copying fp32 tensors bit for bit.

- Hugging Face folders: `config.json`, `model.safetensors` and a tokenizer. `pytorch_model.bin`, weights in several
  files, old names and models without heads are read too.
- NVIDIA's MLPerf checkpoints: `model.ckpt-28252.pt`, with a state_dict under `model`. They are written as by NVIDIA's
  converter: query, key and value apart, the vocabulary padded with rows of zeros, the decoder beside the tied word
  embeddings. Checkpoints of its fused models are read too.
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

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.files import new_folder, read_json, refuse_occupied, save_tensors
from bertrain.base.schema import JsonError, Name, check_value
from bertrain.config import modernbert
from bertrain.config.resolve import BERT_CONFIG_KEYS
from bertrain.config.settings import ModelSettings
from bertrain.data.text.tokenizer import build_pipeline, with_special_words
from bertrain.data.text.vocabulary import ROLES, TOKENIZER, TOKENIZER_CONFIG, Vocabulary
from bertrain.weights import torch_files
from bertrain.weights.companions import CONFIGS, OURS, VOCABULARY
from bertrain.weights.names import (
    BUFFERS,
    TORCH_AND_COPIES,
    TRANSFORMERS,
    find_parameter,
    normalize_names,
)
from bertrain.weights.roberta import as_roberta, pad_id
from bertrain.weights.sentence_transformers import SentencePipeline, write_pipeline
from bertrain.weights.tensors import (
    PADDED_BY_VOCABULARY,
    Kind,
    OpenedWeights,
    StoredTensor,
    Weights,
    combined_digest,
    huggingface_names,
    pad_rows,
    store_in_memory,
)

MODEL, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"  # the suffix of the file that maps tensors to files, for a model in several files
GLOBAL_STEP = "global_step"
WORDS = "embeddings.words.weight"
NVIDIA_DECODER, NVIDIA_WORDS = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
LOADERS = {
    "pretrain": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "multilabel": "AutoModelForSequenceClassification",
    "regress": "AutoModelForSequenceClassification",
    "span": "AutoModelForQuestionAnswering",
    "tag": "AutoModelForTokenClassification",
    "embed": "AutoModel",
}  # the class of Transformers that loads a folder, by head
CARD = "README.md"
PROBLEM_TYPES = {
    "classify": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regress": "regression",
}  # Transformers' name for the loss of a head on whole texts
SAFETENSORS_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def find_files(folder: Path) -> list[Path]:
    """The weight files of a folder: safetensors before pickles, one file before several; empty if there is none."""
    for name in (MODEL, PICKLED):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / (name + INDEX)
        if index.is_file():
            try:
                weight_map = check_value(read_json(index, {}), {"weight_map": dict[str, Name]})["weight_map"]
                names = sorted(set(weight_map.values()))
            except JsonError as error:
                raise UserError("bad-index", f"{index} is damaged: {error}; download the model again") from None
            for file in names:
                if not (folder / file).is_file():
                    raise UserError("missing-parts", f"{folder} lacks {file}, which {index.name} lists; download it")
            return [folder / file for file in names]
    return []


def open_files(files: list[Path]) -> OpenedWeights:
    """Open weights in one file or in several: safetensors, a state_dict, or NVIDIA's with a state_dict in it."""
    folder = files[0].parent
    origin = files[0] if len(files) == 1 and files[0].name not in (MODEL, PICKLED) else folder
    tensors: list[StoredTensor] = []
    kind: Kind = "huggingface"
    steps = []
    for path in files:
        kind, found, step = _open_file(path)
        tensors += found
        steps.append(step)
    return OpenedWeights(
        kind=kind,
        origin=str(origin),
        fingerprint=lambda: combined_digest(files),
        tensors=assign_parameters(tensors),
        global_step=steps[0],
    )


def _open_file(path: Path) -> tuple[Kind, list[StoredTensor], int | None]:
    """The format of a file, its tensors, and its training step."""
    if path.suffix != ".safetensors":
        content = torch_files.load(path)
        if not isinstance(content.get("model"), dict):
            return "huggingface", list_tensors(content, path), None
        tensors = list_tensors(content.pop("model"), path)
        # Beside the model: optimizer state, master weights, counters.
        tensors += [replace(store_in_memory(name, value), is_skipped=True) for name, value in content.items()]
        step = content.get(GLOBAL_STEP)
        return "nvidia", tensors, step if isinstance(step, int) else None
    try:
        with safe_open(path, framework="pt") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - it is no dictionary
            noted = (file.metadata() or {}).get(GLOBAL_STEP, "")
            types = [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices]
    except (SafetensorError, OSError) as error:
        raise UserError("damaged-weights", f"cannot read the weights {path}: {error}") from None

    def read(name: str) -> Tensor:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    tensors = []
    for name, shape, dtype in types:
        bits = re.search(r"\d+", dtype)  # of one value; BOOL has none in its name
        nbytes = math.prod(shape) * (int(bits[0]) if bits else 8) // 8
        tensors.append(StoredTensor(name, shape, SAFETENSORS_TYPES.get(dtype, dtype), nbytes, partial(read, name)))
    return "huggingface", tensors, int(noted) if noted.isdecimal() else None


def list_tensors(state_dict: dict[str, Any], path: Path) -> list[StoredTensor]:
    """The tensors of a state_dict; other values are skipped."""
    if not any(isinstance(value, Tensor) for value in state_dict.values()):
        nested = [name for name, value in state_dict.items() if isinstance(value, dict)]
        advice = f"; save its {nested[0]!r} by itself" if nested else ""
        raise UserError("no-state-dict", f"{path} is not a dictionary of tensors{advice}")
    return [store_in_memory(name, value) for name, value in state_dict.items()]


def assign_parameters(stored: Iterable[StoredTensor]) -> tuple[StoredTensor, ...]:
    """Tensors under PyTorch's names, each with the parameter of our model that it holds."""
    stored = list(stored)
    names = normalize_names([tensor.name for tensor in stored])
    return tuple(
        replace(
            tensor,
            place=find_parameter(TORCH_AND_COPIES, names[tensor.name]),
            is_skipped=tensor.is_skipped or names[tensor.name] in BUFFERS,
        )
        for tensor in stored
    )


def to_huggingface(weights: Weights, *, pad_vocab_to: int = 1, pad_bias: float = 0.0) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names, with the vocabulary padded to a multiple of `pad_vocab_to`."""
    rows = -(-weights.settings.vocab_size // pad_vocab_to) * pad_vocab_to
    out = {}
    for theirs, place in huggingface_names(weights.settings).items():
        if place.parameter in weights.tensors:
            tensor = weights.tensors[place.parameter]
            if place.parameter in PADDED_BY_VOCABULARY:
                value = pad_bias if place.parameter == "masked_words.bias" else 0.0
                tensor = pad_rows(tensor[: weights.settings.vocab_size], rows, value)
            out[theirs] = place.select(tensor).contiguous()
    return out


def write_folder(
    out: Path,
    weights: Weights,
    *,
    pad_vocab_to: int = 1,
    card: str = "",
    as_fp16: bool = False,
    pipeline: SentencePipeline | None = None,
) -> None:
    """Write a folder that AutoModel (or AutoModelFor..., by head) and AutoTokenizer load; complete, or not at all.

    `card` becomes its README.md. `pipeline` is that of the sentence-transformers folder that the weights are from.
    """
    refuse_occupied(out)
    # With such a bias, padding is never predicted.
    tensors = to_huggingface(weights, pad_vocab_to=pad_vocab_to, pad_bias=-10000.0)
    if as_fp16:
        tensors = {name: _to_fp16(name, tensor) for name, tensor in tensors.items()}
    words = next(theirs for theirs, place in TRANSFORMERS[weights.settings.family].items() if place.parameter == WORDS)
    settings = replace(weights.settings, vocab_size=len(tensors[words]))
    metadata = {"format": "pt"} | ({} if weights.global_step is None else {GLOBAL_STEP: str(weights.global_step)})
    with new_folder(out) as folder:
        save_tensors(as_roberta(tensors, weights) if settings.is_roberta else tensors, folder / MODEL, metadata)
        write_companions(folder, weights, settings, is_fp16=as_fp16)
        if settings.head == "embed":
            length = weights.max_seq_length or settings.max_positions
            pipeline = SentencePipeline(settings.pooling, True, length)
        if pipeline is not None:
            length = pipeline.max_seq_length or settings.max_positions
            write_pipeline(folder, replace(pipeline, max_seq_length=length), settings.hidden_size)
        if card:
            (folder / CARD).write_text(card)


def _to_fp16(name: str, tensor: Tensor) -> Tensor:
    rounded = tensor.half()
    if not rounded.isfinite().all():
        raise UserError("too-large-for-fp16", f"{name} has values that fp16 cannot hold; export it in fp32")
    return rounded


def write_companions(folder: Path, weights: Weights, settings: ModelSettings, *, is_fp16: bool = False) -> None:
    """Write what Transformers and Optimum read beside the weights: config.json and the tokenizer."""
    model_type = _class_prefix(settings).lower()
    config: dict[str, Any] = {"architectures": [_architecture(weights)], "model_type": model_type}
    config |= model_config(settings) | _special_ids(weights) | _describe_head(weights)
    if settings.is_roberta:
        config["max_position_embeddings"] += config["pad_token_id"] + 1
    if weights.vocabulary is not None:
        write_tokenizer(folder, weights.vocabulary, settings)
    config |= {"tie_word_embeddings": True} | ({"dtype": "float16"} if is_fp16 else {})
    (folder / CONFIGS[1]).write_text(json.dumps(config, indent=2) + "\n")


def _special_ids(weights: Weights) -> dict[str, int | None]:
    """The fields of special tokens. Others than BERT have more, with defaults that are the ids of their own words."""
    vocabulary, words = weights.vocabulary, {"pad": "[PAD]"}
    if weights.settings.is_roberta:
        words |= {"bos": "[CLS]", "eos": "[SEP]"}
        if vocabulary is None:
            return {"pad_token_id": pad_id(weights)}
    if weights.settings.family == "modern":
        words |= {"cls": "[CLS]", "bos": "[CLS]", "sep": "[SEP]", "eos": "[SEP]"}
        if vocabulary is None:
            return dict.fromkeys((f"{field}_token_id" for field in words), None)
    return {} if vocabulary is None else {f"{field}_token_id": vocabulary.id_of(word) for field, word in words.items()}


def write_nvidia(out: Path, weights: Weights, *, pad_vocab_to: int) -> None:
    """Write model.ckpt-STEP.pt and its bert_config.json; complete, or not at all."""
    refuse_occupied(out)
    step = weights.global_step
    name = "model.pt" if step is None else f"model.ckpt-{step}.pt"
    model = to_huggingface(weights, pad_vocab_to=pad_vocab_to)
    model[NVIDIA_DECODER] = model[NVIDIA_WORDS]
    with new_folder(out) as folder:
        try:
            torch.save({"model": model} | ({} if step is None else {GLOBAL_STEP: step}), folder / name)
        except RuntimeError as error:
            raise OSError(str(error)) from None  # torch reports a full disk this way
        # The vocabulary size without padding: NVIDIA's programs add it.
        (folder / CONFIGS[0]).write_text(json.dumps(bert_config(weights.settings), indent=2) + "\n")
        if weights.vocabulary is not None:
            weights.vocabulary.save(folder / VOCABULARY)


def _architecture(weights: Weights) -> str:
    missing, prefix = weights.missing, _class_prefix(weights.settings)
    if weights.settings.head not in ("embed", "pretrain"):
        return LOADERS[weights.settings.head].replace("AutoModel", prefix)
    if weights.settings.head == "embed" or any(name.startswith("masked_words.") for name in missing):
        return f"{prefix}Model"
    return f"{prefix}ForMaskedLM" if missing or prefix != "Bert" else "BertForPreTraining"


def _class_prefix(settings: ModelSettings) -> str:
    """How the names of Transformers' classes begin; the model_type is the same in lower case."""
    return "ModernBert" if settings.family == "modern" else "Roberta" if settings.is_roberta else "Bert"


def _describe_head(weights: Weights) -> dict[str, Any]:
    """The fields of a config about a fine-tuned head: its labels, dropout and type, and how we read texts for it."""
    settings = weights.settings
    ours = {OURS: weights.finetuned_as} if weights.finetuned_as and settings.head != "embed" else {}
    if settings.head not in PROBLEM_TYPES and settings.head != "tag":
        return ours
    count = 1 if settings.head == "regress" else settings.num_labels
    labels = weights.labels if len(weights.labels) == count else [f"LABEL_{number}" for number in range(count)]
    described: dict[str, Any] = ours | {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "classifier_dropout": settings.head_dropout,
    }
    if settings.head in PROBLEM_TYPES:
        described["problem_type"] = PROBLEM_TYPES[settings.head]
    return described | ({"thresholds": weights.thresholds} if weights.thresholds else {})


def model_config(settings: ModelSettings) -> dict[str, Any]:
    """The fields of a config.json about the encoder."""
    return bert_config(settings) if settings.family == "bert" else modernbert.write_config(settings)


def bert_config(settings: ModelSettings) -> dict[str, Any]:
    return {"hidden_act": "gelu"} | {theirs: getattr(settings, ours) for theirs, ours in BERT_CONFIG_KEYS.items()}


def write_tokenizer(folder: Path, vocabulary: Vocabulary, settings: ModelSettings) -> None:
    if vocabulary.tokenizer:
        vocabulary = with_special_words(vocabulary)
    vocabulary.save(folder / VOCABULARY)
    if not vocabulary.tokenizer:
        build_pipeline(vocabulary, for_models=True).save(str(folder / TOKENIZER))
    # This class reads tokenizer.json; BertTokenizer would build its own, with another longest word.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": vocabulary.lower_case}
    has_segments = settings.family == "bert" and not settings.is_roberta
    config["model_input_names"] = ["input_ids", *["token_type_ids"] * has_segments, "attention_mask"]
    config["model_max_length"] = settings.max_positions
    config |= zip(ROLES, vocabulary.special, strict=True)
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
