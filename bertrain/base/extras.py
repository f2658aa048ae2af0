"""Packages that only some commands need: imported at first use; where one is missing, the error names its extra."""

from __future__ import annotations

import importlib.util
from typing import Any

from bertrain.base.errors import UserError

EXTRAS = {  # module: the extra that installs it, and what needs it
    "distributed": ("dask", "preparing data on a Dask cluster"),
    "huggingface_hub": ("hub", "downloading weights by hub:NAME"),
    "h5py": ("formats", "reading and writing HDF5"),
    "matplotlib": ("report", "plotting"),
    "mlflow": ("mlflow", "tracking runs with MLflow"),
    "mlperf_logging": ("mlperf", "writing and checking MLPerf's logs"),
    "mwparserfromhell": ("text", "extracting Wikipedia dumps"),
    "onnx": ("onnx", "exporting to ONNX"),
    "onnxruntime": ("onnx", "checking an ONNX export"),
    "scipy": ("pack", "packing by nnlshp"),
    "sklearn": ("finetune", "computing the metrics of fine-tuning"),
    "starlette": ("serve", "serving over HTTP"),
    "tensorboard": ("tensorboard", "writing TensorBoard events"),
    "uvicorn": ("serve", "serving over HTTP"),
    "wandb": ("wandb", "tracking runs with Weights & Biases"),
}


def is_installed(module: str) -> bool:
    """Whether the module can be imported; importing it may take seconds."""
    return importlib.util.find_spec(module) is not None


def missing_package(module: str) -> UserError:
    extra, user = EXTRAS[module]
    return UserError(
        "missing-package", f"{user} needs {module}, which is not installed; run: pip install 'bertrain[{extra}]'"
    )


def import_extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing_package(name.partition(".")[0]) from None
