"""NVIDIA's MLPerf checkpoints: `model.ckpt-28252.pt`, a dictionary whose `model` holds tensors by PyTorch's names.

They are written as NVIDIA's own converter writes them: query, key and value apart, the vocabulary padded with rows of
zeros, the decoder beside the word embeddings it is tied to. Read are also those of its fused models.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from bertrain.base.files import new_folder, refuse_occupied
from bertrain.weights.companions import CONFIGS, VOCABULARY, find_settings, find_vocabulary
from bertrain.weights.huggingface import bert_config, stored_torch, to_huggingface, with_places
from bertrain.weights.tensors import Source, Stored, Weights, combined_digest
from bertrain.weights.torch_files import load

DECODER, WORDS = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"


def open_file(path: Path, *, config: Path | None = None, vocab: Path | None = None) -> Source:
    """A file of torch.save: NVIDIA's, or a bare state_dict."""
    content = load(path)
    is_nvidia = isinstance(content.get("model"), dict)
    model = content.pop("model") if is_nvidia else content
    beside = content if is_nvidia else {}
    step = beside.get("global_step")
    tensors = with_places(stored_torch(model, path))
    tensors += tuple(  # an optimizer, master weights, counters
        Stored(name, (), type(value).__name__, 0, read=Tensor, is_skipped=True) for name, value in beside.items()
    )
    return Source(
        kind="nvidia" if is_nvidia else "huggingface",
        origin=str(path),
        fingerprint=lambda: combined_digest([path]),
        tensors=tensors,
        settings=find_settings(path.parent, config),
        vocabulary=find_vocabulary(path.parent, vocab),
        global_step=step if isinstance(step, int) else None,
    )


def write_folder(out: Path, weights: Weights, *, pad_vocab_to: int = 8) -> Path:
    """Write model.ckpt-STEP.pt with its bert_config.json; whole or not at all. Returns the file."""
    refuse_occupied(out)
    step = weights.global_step
    name = "model.pt" if step is None else f"model.ckpt-{step}.pt"
    model = to_huggingface(weights, pad_vocab_to=pad_vocab_to)
    model[DECODER] = model[WORDS]
    with new_folder(out) as folder:
        try:
            torch.save({"model": model} | ({} if step is None else {"global_step": step}), folder / name)
        except RuntimeError as error:
            raise OSError(str(error)) from None  # so does this one say that the disk is full
        # Without the padding: NVIDIA's programs add it to what the config says.
        (folder / CONFIGS[0]).write_text(json.dumps(bert_config(weights.settings), indent=2) + "\n")
        if weights.vocabulary is not None:
            weights.vocabulary.save(folder / VOCABULARY)
    return out / name
