"""Load PyTorch files (`.bin`, `.pt`) without running code from them.

Such a file is a pickle, which is a program. With `weights_only`, torch accepts only tensors, numbers, texts and
containers of these. The tensors are checked afterwards: a few bytes can describe a tensor of any size.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.files import reading


def load(path: Path) -> dict[str, Any]:
    with reading(path), open(path, "rb") as stream:
        is_archive = stream.read(2) == b"PK"  # since PyTorch 1.6; older files are bare pickles
        size = path.stat().st_size
    if is_archive:
        _verify_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error for a damaged file says more
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # a damaged pickle can raise anything
        raise _refusal(path, error) from None
    _check_names(content, path)
    for tensors in (content, *(part for part in content.values() if isinstance(part, dict))):
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                _check_tensor(value, f"{name} of {path}", size)
    return content


def _verify_archive(path: Path) -> None:
    """Verify the checksums, which torch writes but does not check."""
    try:
        with zipfile.ZipFile(path) as archive:
            is_compressed = sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size
            damaged = None if is_compressed else archive.testzip()
    except Exception:  # a damaged archive can raise almost anything
        raise UserError("damaged-weights", f"{path} is truncated or damaged; download it again") from None
    if is_compressed:
        raise UserError("damaged-weights", f"{path} is a compressed archive, not a PyTorch file")
    if damaged is not None:
        raise UserError("damaged-weights", f"{path} is damaged: the checksum of {damaged} is wrong; download it again")


def _check_names(content: Any, path: Path) -> None:
    """Refuse anything but a dictionary with text keys, and the same under `model`."""
    for part in (content, content.get("model", {}) if isinstance(content, dict) else {}):
        if isinstance(part, Tensor) and part is not content:
            continue
        if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
            raise UserError("no-state-dict", f"{path} contains a {type(part).__name__}, not a dictionary of tensors")


def _refusal(path: Path, error: Exception) -> UserError:
    if imported := re.search(r"GLOBAL ([\w.]+)", str(error)):
        reason = f"imports {imported[1]}; loading it could run any code"
    elif refused := re.search(r"WeightsUnpickler error:\s*(.+)", str(error)):
        reason = f"torch does not know to be safe ({refused[1][:200]})"
    else:
        return UserError("damaged-weights", f"{path} is damaged, or not a PyTorch file ({type(error).__name__})")
    return UserError("unsafe-pickle", f"{path} is a pickle that {reason}; ask for safetensors or the state_dict alone")


def _check_tensor(tensor: Tensor, name: str, file_bytes: int) -> None:
    """Refuse sparse and quantized tensors, and tensors larger than their file."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise UserError("unsupported-tensor", f"{name} is not a dense CPU tensor ({tensor.layout}, on {tensor.device})")
    if tensor.numel() * tensor.element_size() > min(tensor.untyped_storage().nbytes(), file_bytes):
        raise UserError("damaged-weights", f"{name} has the shape {tuple(tensor.shape)}, larger than its file")
