"""Read TensorFlow 1 checkpoints of BERT: Google's, and MLPerf's model.ckpt-28252."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.weights.names import TENSORFLOW, TRANSPOSED_IN_TENSORFLOW, find_parameter
from bertrain.weights.tensor_bundle import index_of, open_bundle
from bertrain.weights.tensors import OpenedWeights, StoredTensor, combined_digest

GLOBAL_STEP = "global_step"
OPTIMIZER = re.compile(r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|Momentum|beta[12]_power|global_step)$")
"""Optimizer state of each variable, and counters."""
PART = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def find_prefix(path: Path) -> Path | None:
    """The prefix of a checkpoint from the prefix, one of its files, or the folder of a single checkpoint."""
    if path.is_dir():
        found = [index.with_suffix("") for index in path.glob("*.index")]
        if len(found) > 1:
            names = ", ".join(sorted(prefix.name for prefix in found))
            raise UserError("ambiguous-weights", f"{path} has several TensorFlow checkpoints ({names}); name one")
        return found[0] if found else None
    prefix = path.with_name(PART.sub("", path.name))
    return prefix if index_of(prefix).is_file() else None


def is_part(path: Path) -> bool:
    """Whether a file belongs to a checkpoint by its name."""
    return PART.search(path.name) is not None


def open_checkpoint(prefix: Path) -> OpenedWeights:
    """Open the checkpoint at `prefix`."""
    bundle = open_bundle(prefix)
    if OBJECT_GRAPH in bundle.entries:
        raise UserError(
            "tensorflow-2-checkpoint",
            f"{prefix} is an object-based checkpoint of TensorFlow 2; only those of TensorFlow 1 variables are read",
        )
    tensors = tuple(
        StoredTensor(
            name=name,
            shape=entry.shape,
            dtype=entry.dtype,
            nbytes=entry.nbytes,
            read=partial(bundle.read, name),
            place=find_parameter(TENSORFLOW, name),
            is_transposed=name.endswith(TRANSPOSED_IN_TENSORFLOW),
            is_skipped=OPTIMIZER.match(name) is not None,
        )
        for name, entry in bundle.entries.items()
    )
    step = bundle.entries.get(GLOBAL_STEP)
    has_step = step is not None and step.shape == () and step.dtype.startswith("int")
    return OpenedWeights(
        kind="tf1",
        origin=str(prefix),
        fingerprint=lambda: combined_digest([bundle.index]),  # it holds the checksum of every tensor
        tensors=tensors,
        global_step=int(bundle.read(GLOBAL_STEP)) if has_step else None,
    )
