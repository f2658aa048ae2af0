"""TensorFlow 1 checkpoints of BERT: Google's, and MLPerf's model.ckpt-28252."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.weights.companions import find_settings, find_vocabulary
from bertrain.weights.names import TENSORFLOW, TRANSPOSED_IN_TENSORFLOW, place_in
from bertrain.weights.tensor_bundle import Bundle, index_of, open_bundle
from bertrain.weights.tensors import Source, Stored, combined_digest

GLOBAL_STEP = "global_step"
OPTIMIZER = re.compile(r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|Momentum|beta[12]_power|global_step)$")
"""What optimizers keep beside each variable, and their counters."""
PART = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def find_prefix(path: Path) -> Path | None:
    """The prefix of the checkpoint that a path means: itself, its index, its data, or the only one in a folder."""
    if path.is_dir():
        found = [index.with_suffix("") for index in path.glob("*.index")]
        if len(found) > 1:
            names = ", ".join(sorted(prefix.name for prefix in found))
            raise UserError(f"{path} holds several TensorFlow checkpoints ({names}); name one of them")
        return found[0] if found else None
    prefix = path.with_name(PART.sub("", path.name))
    return prefix if index_of(prefix).is_file() else None


def is_part(path: Path) -> bool:
    """Whether a file is one of a checkpoint's by its name."""
    return PART.search(path.name) is not None


def open_checkpoint(prefix: Path, *, config: Path | None = None, vocab: Path | None = None) -> Source:
    """A checkpoint's tensors, with the bert_config.json and the vocab.txt beside it."""
    bundle = open_bundle(prefix)
    if OBJECT_GRAPH in bundle.entries:
        raise UserError(
            f"{prefix} is a checkpoint of TensorFlow 2's objects, whose names are not BERT's; "
            "only those of TensorFlow 1's variables are read"
        )
    return Source(
        kind="tf1",
        origin=str(prefix),
        fingerprint=lambda: combined_digest([bundle.index]),  # it holds the checksum of every tensor
        tensors=tuple(_stored(bundle, name) for name in bundle.entries),
        settings=find_settings(prefix.parent, config),
        vocabulary=find_vocabulary(prefix.parent, vocab),
        global_step=_global_step(bundle),
    )


def _stored(bundle: Bundle, name: str) -> Stored:
    entry = bundle.entries[name]
    return Stored(
        name=name,
        shape=entry.shape,
        dtype=entry.dtype,
        nbytes=entry.nbytes,
        read=partial(bundle.read, name),
        place=place_in(TENSORFLOW, name),
        is_transposed=name.endswith(TRANSPOSED_IN_TENSORFLOW),
        is_skipped=OPTIMIZER.match(name) is not None,
    )


def _global_step(bundle: Bundle) -> int | None:
    entry = bundle.entries.get(GLOBAL_STEP)
    if entry is None or entry.shape != () or not entry.dtype.startswith("int"):
        return None
    return int(bundle.read(GLOBAL_STEP))
