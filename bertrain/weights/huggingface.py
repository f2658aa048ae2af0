"""Hugging Face folders, out and in: `config.json`, `model.safetensors`, and a tokenizer that needs no code of ours.

The map of names is one table (`huggingface_names`). Tensors are copied bit for bit in fp32.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertrain.config import BERT_CONFIG_KEYS, model_from_bert_config
from bertrain.data.tokenizer import SPECIAL_WORDS, Vocabulary, build_pipeline
from bertrain.errors import UserError
from bertrain.files import file_digest, new_folder, refuse_occupied
from bertrain.settings import ModelSettings
from bertrain.weights.tensors import PADDED_BY_VOCABULARY, Weights

MODEL = "model.safetensors"
Place = tuple[str, int]
"""A parameter of ours, and which third of it: 0, 1, 2 for query, key and value, -1 for all of it."""


def huggingface_names(num_layers: int, *, nsp: bool = True) -> dict[str, Place]:
    """For each tensor of Hugging Face's BertForPreTraining, where its values lie in our model."""
    names: dict[str, Place] = {
        "bert.embeddings.word_embeddings.weight": ("embeddings.words.weight", -1),
        "bert.embeddings.position_embeddings.weight": ("embeddings.positions.weight", -1),
        "bert.embeddings.token_type_embeddings.weight": ("embeddings.segments.weight", -1),
        "cls.predictions.bias": ("masked_words.bias", -1),
    }
    modules = {
        "bert.embeddings.LayerNorm": "embeddings.norm",
        "cls.predictions.transform.dense": "masked_words.transform",
        "cls.predictions.transform.LayerNorm": "masked_words.norm",
    }
    if nsp:
        modules |= {"bert.pooler.dense": "next_sentence.pool", "cls.seq_relationship": "next_sentence.classify"}
    for number in range(num_layers):
        theirs, ours = f"bert.encoder.layer.{number}", f"layers.{number}"
        modules |= {
            f"{theirs}.attention.output.dense": f"{ours}.attention_out",
            f"{theirs}.attention.output.LayerNorm": f"{ours}.attention_norm",
            f"{theirs}.intermediate.dense": f"{ours}.expand",
            f"{theirs}.output.dense": f"{ours}.contract",
            f"{theirs}.output.LayerNorm": f"{ours}.output_norm",
        }
        for third, part in enumerate(("query", "key", "value")):
            for kind in ("weight", "bias"):
                names[f"{theirs}.attention.self.{part}.{kind}"] = (f"{ours}.qkv.{kind}", third)
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            names[f"{theirs}.{kind}"] = (f"{ours}.{kind}", -1)
    return names


def to_huggingface(weights: dict[str, Tensor], settings: ModelSettings) -> dict[str, Tensor]:
    """Our tensors under their names; the padding of the vocabulary is left behind."""
    out = {}
    for theirs, (ours, third) in huggingface_names(settings.num_layers, nsp=settings.nsp).items():
        tensor = weights[ours] if third < 0 else weights[ours].chunk(3)[third]
        if ours in PADDED_BY_VOCABULARY:
            tensor = tensor[: settings.vocab_size]
        out[theirs] = tensor.contiguous()
    return out


def write_folder(out: Path, weights: dict[str, Tensor], settings: ModelSettings, vocabulary: Vocabulary) -> None:
    """Write a folder that AutoModelForMaskedLM and AutoTokenizer load; whole or not at all."""
    refuse_occupied(out)
    with new_folder(out) as folder:
        save_file(to_huggingface(weights, settings), folder / MODEL, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(_config(settings, vocabulary), indent=2) + "\n")
        vocabulary.save(folder / "vocab.txt")
        build_pipeline(vocabulary, for_models=True).save(str(folder / "tokenizer.json"))
        tokenizer = json.dumps(_tokenizer_config(settings, vocabulary), indent=2)
        (folder / "tokenizer_config.json").write_text(tokenizer + "\n")


def read_folder(folder: Path) -> Weights:
    """A folder's tensors under our names, as far as it has them."""
    settings = model_from_bert_config(folder / "config.json")
    try:
        loaded = load_file(folder / MODEL)
    except SafetensorError as error:
        raise UserError(f"the weights {folder / MODEL} cannot be read: {error}") from None
    # Models saved without heads leave the prefix off.
    prefix = "" if any(name.startswith("bert.") for name in loaded) else "bert."
    original = {(name if name.startswith("cls.") else prefix + name): name for name in loaded}
    theirs = {name: loaded[their_name] for name, their_name in original.items()}
    weights: dict[str, Tensor] = {}
    thirds: dict[str, list[Tensor | None]] = {}
    names = huggingface_names(settings.num_layers)
    for name, (ours, third) in names.items():
        if name not in theirs:
            continue
        if third < 0:
            weights[ours] = theirs[name].float()
        else:
            thirds.setdefault(ours, [None, None, None])[third] = theirs[name].float()
    for ours, parts in thirds.items():
        if all(part is not None for part in parts):
            weights[ours] = torch.cat([part for part in parts if part is not None])
    lower_case = _lower_case(folder)
    vocabulary = (
        Vocabulary.load(folder / "vocab.txt", lower_case=lower_case) if (folder / "vocab.txt").is_file() else None
    )
    # Copies of the word embeddings that tie the decoder are stored by some versions; they are not left over.
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "bert.embeddings.position_ids"}
    left_over = tuple(sorted(original[name] for name in set(theirs) - set(names) - tied))
    has_nsp = any(name.startswith("next_sentence.") for name in weights)
    return Weights(
        origin=str(folder),
        fingerprint=file_digest(folder / MODEL)[1],
        tensors=weights,
        settings=dataclasses.replace(settings, nsp=has_nsp),
        vocabulary=vocabulary,
        left_over=left_over,
    )


def _lower_case(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return bool(json.loads(path.read_text()).get("do_lower_case", True)) if path.is_file() else True


def _config(settings: ModelSettings, vocabulary: Vocabulary) -> dict[str, Any]:
    shape = {theirs: getattr(settings, ours) for theirs, ours in BERT_CONFIG_KEYS.items()}
    return {
        "architectures": ["BertForPreTraining" if settings.nsp else "BertForMaskedLM"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "pad_token_id": vocabulary.id_of("[PAD]"),
        "tie_word_embeddings": True,
        **shape,
    }


def _tokenizer_config(settings: ModelSettings, vocabulary: Vocabulary) -> dict[str, Any]:
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_WORDS, strict=True))
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lower_case,
        "model_max_length": settings.max_positions,
        **named,
    }
