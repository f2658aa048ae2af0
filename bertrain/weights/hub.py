"""Weights of the Hugging Face hub by name: `hub:bert-base-uncased`. The prefix is the permission to download them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.base.files import HUB_PREFIX

FILES = ["config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
FILES += ["model*.safetensors*"]
FILES += ["modules.json", "*_Pooling/config.json", "*sentence_*.json"]  # of sentence-transformers


def locate(source: str | Path) -> Path:
    """The local path of weights; `hub:NAME` or `hub:NAME@REVISION` is downloaded into the hub's cache."""
    if not str(source).startswith(HUB_PREFIX):
        return Path(source)
    name, _, revision = str(source).removeprefix(HUB_PREFIX).partition("@")
    hub = import_extra("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=FILES))
    except Exception as error:  # its classes differ between versions of the package
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            "failed-download", f"could not download {source}: {reason}; check the name and the network"
        ) from None


def suggest_hub(path: Path) -> str:
    """What to type if a path that does not exist looks like a name of the hub, to append to a sentence."""
    name = os.path.relpath(path)
    is_name = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not ("/" in name and Path(name).parent.exists())
    return f"; to download them from the Hugging Face hub, type {HUB_PREFIX}{name}" if is_name else ""
