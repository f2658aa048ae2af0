"""`bertrain weights export`: a run's weights in a form that others load."""

from __future__ import annotations

from pathlib import Path

from bertrain.errors import UserError
from bertrain.weights import huggingface
from bertrain.weights.source import build_model, read_weights

FORMATS = ("huggingface",)


def export(run: str | Path, out: str | Path, *, to: str = "huggingface", which: str = "newest") -> Path:
    """Write the weights of a run's whole checkpoint (`newest`, `best` or a step) to the folder `out`; returns it."""
    if to not in FORMATS:
        raise UserError(f"--to is one of {', '.join(FORMATS)}, not {to!r}")
    weights = read_weights(run, which)
    if weights.vocabulary is None:
        raise UserError(f"{run} has no vocabulary to export with its weights")
    build_model(weights)  # refuses weights that are not whole, by name
    huggingface.write_folder(Path(out), weights.tensors, weights.settings, weights.vocabulary)
    return Path(out)
