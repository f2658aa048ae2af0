"""Read and write NVIDIA's MLPerf checkpoints: `model.ckpt-28252.pt`, with a state_dict under `model`.

Files are written as by NVIDIA's converter: query, key and value apart, the vocabulary padded with rows of zeros, the
decoder beside the tied word embeddings. Checkpoints of its fused models are read too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from bertrain.base.files import new_folder, refuse_occupied
from bertrain.weights.companions import CONFIGS, VOCABULARY
from bertrain.weights.huggingface import assign_parameters, bert_config, list_tensors, to_huggingface
from bertrain.weights.tensors import OpenedWeights, Weights, combined_digest, store_in_memory
from bertrain.weights.torch_files import load

DECODER, WORDS = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"


def open_file(path: Path) -> OpenedWeights:
    """Open a file of torch.save: NVIDIA's, or a plain state_dict."""
    content = load(path)
    is_nvidia = isinstance(content.get("model"), dict)
    model = content.pop("model") if is_nvidia else content
    others = content if is_nvidia else {}  # optimizer state, master weights, counters
    step = others.get("global_step")
    tensors = assign_parameters(list_tensors(model, path))
    tensors += tuple(replace(store_in_memory(name, value), is_skipped=True) for name, value in others.items())
    return OpenedWeights(
        kind="nvidia" if is_nvidia else "huggingface",
        origin=str(path),
        fingerprint=lambda: combined_digest([path]),
        tensors=tensors,
        global_step=step if isinstance(step, int) else None,
    )


def write_folder(out: Path, weights: Weights, *, pad_vocab_to: int = 8) -> Path:
    """Write model.ckpt-STEP.pt and its bert_config.json; complete, or not at all. Returns the file."""
    refuse_occupied(out)
    step = weights.global_step
    name = "model.pt" if step is None else f"model.ckpt-{step}.pt"
    model = to_huggingface(weights, pad_vocab_to=pad_vocab_to)
    model[DECODER] = model[WORDS]
    with new_folder(out) as folder:
        try:
            torch.save({"model": model} | ({} if step is None else {"global_step": step}), folder / name)
        except RuntimeError as error:
            raise OSError(str(error)) from None  # torch reports a full disk this way
        # The vocabulary size without padding: NVIDIA's programs add it.
        (folder / CONFIGS[0]).write_text(json.dumps(bert_config(weights.settings), indent=2) + "\n")
        if weights.vocabulary is not None:
            weights.vocabulary.save(folder / VOCABULARY)
    return out / name
