"""PyTorch's own files (`.bin`, `.pt`), opened so that nothing in them can run.

Such a file is a pickle, and a pickle is a program. `weights_only` runs it on an interpreter of torch's that knows
tensors, numbers, texts and containers of these, and stops at anything else. What comes out is still checked: a few
bytes can describe a tensor of any size.
"""

from __future__ import annotations

import lzma
import re
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertrain.base.errors import UserError

_DAMAGE = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError, EOFError,
    ValueError, OSError,
)  # fmt: skip
ARCHIVE = b"PK"
"""How files begin since PyTorch 1.6; older ones are bare pickles."""


def load(path: Path) -> dict[str, Any]:
    """The dictionary that a file holds, its tensors on the CPU."""
    try:
        with open(path, "rb") as stream:
            is_archive = stream.read(2) == ARCHIVE
            size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if is_archive:
        _verify_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a damaged file, a sentence says more
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # whatever a damaged program can come to
        raise UserError(_why_not(path, error)) from None
    _check_names(content, path)
    for tensors in (content, *(part for part in content.values() if isinstance(part, dict))):
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                _check_tensor(value, f"{name} of {path}", size)
    return content


def _verify_archive(path: Path) -> None:
    """Compare the checksums that torch writes and does not read."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise UserError(f"{path} is compressed, which no file of PyTorch's is")
            damaged = archive.testzip()
    except _DAMAGE:
        raise UserError(
            f"{path} is cut off or damaged: it begins as a file of PyTorch's and does not end as one"
        ) from None
    if damaged is not None:
        raise UserError(f"{path} is damaged: the checksum of its part {damaged} is wrong")


def _check_names(content: Any, path: Path) -> None:
    """Refuse what is no dictionary of names, or whose `model` is another."""
    for part in (content, content.get("model", {}) if isinstance(content, dict) else {}):
        if isinstance(part, Tensor) and part is not content:
            continue
        if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
            raise UserError(f"{path} holds a {type(part).__name__}, not tensors by name")


def _why_not(path: Path, error: Exception) -> str:
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if wanted:
        return (
            f"{path} is a pickle that asks for {wanted[1]}, which is a program's and not a tensor's; opening it could "
            "run anything, so it is refused: have its owner save the state_dict alone, or as safetensors"
        )
    refused = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    if refused:
        return (
            f"{path} is a pickle of another kind than torch.save writes by itself ({refused[1][:200]}); what is not "
            "known to be harmless is refused: have its owner save the state_dict alone, or as safetensors"
        )
    return f"{path} is no file of PyTorch's, or a damaged one ({type(error).__name__})"


def _check_tensor(tensor: Tensor, what: str, file_bytes: int) -> None:
    """Refuse tensors that are not plain, or that say they are larger than what the file has for them."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise UserError(f"{what} is no plain tensor ({tensor.layout}, on {tensor.device})")
    if tensor.numel() * tensor.element_size() > min(tensor.untyped_storage().nbytes(), file_bytes):
        raise UserError(f"{what} says that it is {tuple(tensor.shape)}, which is more than the file holds")
