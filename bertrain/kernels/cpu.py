"""The kernels of cpu.c: compiled once with the user's compiler, kept in the user's cache, called through ctypes.

PyTorch's wheel has no way to write a fused kernel for a CPU, and its own compiler needs gcc as well. Here a file of C
without PyTorch's headers takes two seconds to compile, shares PyTorch's OpenMP threads, and changes with nothing else.
Each function stands behind the one of the same name that launches the Triton kernel; those choose by `computes`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from bertrain.base.machine import cpu_flags
from bertrain.kernels.backend import INTERPRETED

SOURCE = Path(__file__).with_name("cpu.c")
NEEDED = ("avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16")  # as Linux calls them
FLAGS = (
    *("-std=c11", "-O3", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-fopenmp"),
    *("-march=skylake-avx512", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
FLOAT, DOUBLE, LONG, INT = ctypes.c_float, ctypes.c_double, ctypes.c_long, ctypes.c_int
BITS, SEED = ctypes.c_uint32, ctypes.c_int64
DONE = 0


def computes(tensor: Tensor) -> bool:
    """Whether a tensor lies where these kernels are meant, not those of Triton."""
    return not tensor.is_cuda and not INTERPRETED


# --- compiling ------------------------------------------------------------------------------------------------


class UnavailableError(Exception):
    """Why there are no kernels for this CPU, in a few words."""


@functools.cache
def available() -> tuple[bool, str]:
    """Whether the kernels can run on this CPU, and the reason in one line. Compiles them where that was not done."""
    try:
        compiler = _load()[1]
    except UnavailableError as error:
        return False, str(error)
    return True, f"AMX kernels, compiled by {compiler}"


@functools.cache
def _load() -> tuple[ctypes.CDLL, str]:
    """The library, and what compiled it."""
    flags = cpu_flags()
    if not flags:
        raise UnavailableError("the kernels for CPUs are for Linux")
    if missing := [flag for flag in NEEDED if flag not in flags]:
        raise UnavailableError(f"this CPU has no {missing[-1]}")
    compiler, version = find_compiler()
    library = ctypes.CDLL(str(compile_source(compiler, version)))
    if library.request_tiles() != 0:
        raise UnavailableError("the system does not let this process use AMX")
    return library, version


def find_compiler() -> tuple[str, str]:
    """The C compiler, and what it calls itself."""
    for name in (os.environ.get("CC", ""), "gcc", "cc", "clang"):
        if name and (path := shutil.which(name)):
            told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return path, told.stdout.partition("\n")[0].strip() or name
    raise UnavailableError("the kernels for CPUs need a C compiler: put gcc on the PATH")


def openmp_runtime() -> str:
    """The file of the OpenMP runtime that PyTorch has loaded: a second one would start threads of its own."""
    loaded = re.findall(r"\S+/lib(?:gomp|iomp5|omp)\b[^/\s]*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if not loaded:
        raise UnavailableError("PyTorch was built without OpenMP")
    return min(loaded, key=lambda path: "gomp" not in path)  # a preloaded one answers for it too


def cache_folder() -> Path:
    """Where compiled kernels are kept: the user's cache, or where that cannot be written, a folder for this process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertrain"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="bertrain-"))


def compile_source(compiler: str, version: str) -> Path:
    """The shared library of this source, compiler and runtime, made if it is not there yet."""
    runtime, source = openmp_runtime(), SOURCE.read_bytes()
    name = hashlib.sha256(b"\0".join([source, version.encode(), runtime.encode(), *map(str.encode, FLAGS)])).hexdigest()
    path = cache_folder() / f"kernels-{name[:16]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(
        dir=path.parent
    ) as folder:  # several ranks may compile at once: each renames its own
        compiled, linked = Path(folder) / "cpu.o", Path(folder) / path.name
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), runtime, "-lm", "-o", str(linked)],
        ):
            told = subprocess.run(command, capture_output=True, text=True, check=False)
            if told.returncode:
                problem = next((line for line in told.stderr.splitlines() if "error" in line), told.stderr.strip())
                raise UnavailableError(f"{Path(compiler).name} could not compile the kernels for CPUs: {problem[:200]}")
        os.replace(linked, path)
    return path


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library: tensors as pointers, which must be as the kernels expect them."""
    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.device.type == "cpu", f"{name}: a tensor on {argument.device}"
            assert argument.is_contiguous(), f"{name}: a tensor with gaps"
            values.append(ctypes.c_void_p(argument.data_ptr()))
        else:
            values.append(ctypes.c_void_p() if argument is None else argument)
    # A profiler sees what PyTorch computes, and this as another operator, with its tensors' sizes.
    with _RecordFunctionFast(f"_{name}", [one for one in arguments if isinstance(one, Tensor)]):
        code = getattr(_load()[0], name)(*values)
    if code != DONE:
        raise MemoryError(f"the kernel {name} can't allocate memory to work in")


def _partials(*shape: int) -> Tensor:
    """Room for partial sums, a part for each thread."""
    return torch.zeros(_load()[0].thread_count(), *shape)


def _narrow(*tensors: Tensor) -> None:
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors), "the kernels for CPUs compute in bf16"


def _dropout(seed: Tensor, site: int, p: float) -> tuple[Any, Any, Any]:
    """Dropout of rows."""
    from bertrain.kernels.random import dropout_threshold

    return SEED(int(seed)), LONG(site), BITS(dropout_threshold(p))


def _score_dropout(seed: Tensor, site: int, p: float) -> tuple[Any, Any, Any]:
    """Dropout of attention's weights."""
    from bertrain.kernels.random import attention_threshold

    return SEED(int(seed)), LONG(site), BITS(attention_threshold(p))


# --- products, attention ------------------------------------------------------------------------------------------


def weight_gradient(dy: Tensor, x: Tensor, gradient: Tensor, *, accumulate: bool) -> None:
    """dy' x into float32 [N, K], of bf16 [T, N] and [T, K]."""
    _narrow(dy, x)
    (tokens, rows), columns = dy.shape, x.shape[1]
    sizes = LONG(rows), LONG(columns), LONG(tokens)
    _call("weight_gradient", dy, LONG(rows), x, LONG(columns), gradient, *sizes, INT(accumulate))


def attention_forward(qkv: Tensor, cu_seqlens: Tensor, p: float, seed: Tensor, site: int) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and the log-sums [H, T] to base 2, of qkv [T, 3, H, D]."""
    _narrow(qkv)
    tokens, _, heads, size = qkv.shape
    out, sums = qkv.new_empty(tokens, heads, size), torch.empty(heads, tokens)
    shape = LONG(len(cu_seqlens) - 1), LONG(heads), LONG(size)
    _call("attention_forward", qkv, cu_seqlens, *shape, out, sums, LONG(tokens), *_score_dropout(seed, site, p))
    return out, sums


def attention_backward(
    qkv: Tensor, out: Tensor, sums: Tensor, dout: Tensor, cu_seqlens: Tensor, p: float, seed: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    """dqkv, and partial sums [sequences, 2, H D] of its rows, of queries and of values."""
    _narrow(qkv, out, dout)
    tokens, _, heads, size = qkv.shape
    dqkv, partials = torch.empty_like(qkv), torch.empty(len(cu_seqlens) - 1, 3, heads * size)
    shape = LONG(len(cu_seqlens) - 1), LONG(heads), LONG(size)
    _call(
        "attention_backward", qkv, cu_seqlens, *shape, out, sums, dout, dqkv, partials, LONG(tokens),
        *_score_dropout(seed, site, p),
    )  # fmt: skip
    return dqkv, partials[:, ::2]


# --- between products ---------------------------------------------------------------------------------------------


def norm_forward(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    ln_bias: Tensor,
    p: float,
    seed: Tensor,
    site: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x + bias)), and mean and 1 / deviation of each row."""
    _narrow(x, residual)
    rows, width = x.shape
    y, statistics = torch.empty_like(x), torch.empty(rows, 2)
    shape = LONG(rows), LONG(width), FLOAT(eps)
    _call("norm_forward", x, bias, residual, weight, ln_bias, y, statistics, *shape, *_dropout(seed, site, p))
    return y, statistics


def norm_backward(
    dy: Tensor, second: Tensor | None, x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, statistics: Tensor,
    p: float, seed: Tensor, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the residual, and partial sums [n, 3, N]."""
    _narrow(dy, x, residual)
    rows, width = x.shape
    dx, dresidual, partials = torch.empty_like(x), torch.empty_like(x), _partials(3, width)
    _call(
        "norm_backward", dy, second, x, bias, residual, weight, statistics, dx, dresidual, partials,
        LONG(rows), LONG(width), *_dropout(seed, site, p),
    )  # fmt: skip
    return dx, dresidual, partials


def gelu_forward(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias)."""
    _narrow(x)
    y = torch.empty_like(x)
    _call("gelu_forward", x, bias, y, LONG(x.shape[0]), LONG(x.shape[1]))
    return y


def gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x, and partial sums [n, 1, N] of the bias's."""
    _narrow(dy, x)
    dx, partials = torch.empty_like(x), _partials(1, x.shape[1])
    _call("gelu_backward", dy, x, bias, dx, partials, LONG(x.shape[0]), LONG(x.shape[1]))
    return dx, partials


# --- both ends of the model ----------------------------------------------------------------------------------------

Three = tuple[Tensor, Tensor, Tensor]


def embed_forward(
    tables: Three, ids: Three, weight: Tensor, ln_bias: Tensor, p: float, seed: Tensor, site: int, eps: float
) -> tuple[Tensor, Tensor]:
    """The embedded rows, and mean and 1 / deviation of each."""
    _narrow(tables[0])
    rows, width = len(ids[0]), tables[0].shape[1]
    y, statistics = tables[0].new_empty(rows, width), torch.empty(rows, 2)
    shape = LONG(rows), LONG(width), FLOAT(eps)
    _call("embed_forward", *tables, *ids, weight, ln_bias, y, statistics, *shape, *_dropout(seed, site, p))
    return y, statistics


def embed_backward(
    dy: Tensor, second: Tensor, tables: Three, ids: Three, weight: Tensor, statistics: Tensor, p: float, seed: Tensor,
    site: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of each row's sum in float32, and partial sums [n, 4, N]."""
    _narrow(dy, second, tables[0])
    rows, width = dy.shape
    dsum, partials = torch.empty(rows, width), _partials(4, width)
    _call(
        "embed_backward", dy, second, *tables, *ids, weight, statistics, dsum, partials, LONG(rows), LONG(width),
        *_dropout(seed, site, p),
    )  # fmt: skip
    return dsum, partials


def add_rows(values: Tensor, ids: Tensor, table: Tensor) -> None:
    """Add float32 rows to those of a table that `ids` (int64) name."""
    _call("add_rows", values, ids, table, LONG(len(values)), LONG(values.shape[1]))


def cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled losses and right answers of each row; turns `logits` into their gradient."""
    _narrow(logits)
    rows, width = logits.shape
    losses, corrects = torch.empty(rows), torch.empty(rows)
    shape = LONG(rows), LONG(width), LONG(vocab_size), FLOAT(float(scale))
    _call("cross_entropy", logits, labels, losses, corrects, *shape)
    return losses, corrects


def lamb_update(
    parameters: Tensor, gradients: Tensor, first: Tensor, second: Tensor, chunks: Tensor, chunk_size: int, clip: Tensor,
    step: Tensor, *, weight_decay: float, beta1: float, beta2: float, eps: float,
) -> Tensor:  # fmt: skip
    """Moments, and the update in the gradient's place; squares [chunks, 2] of weights and updates."""
    squares = torch.empty(len(chunks), 2)
    corrections = (FLOAT(1 / (1 - beta ** step.item())) for beta in (beta1, beta2))
    # 1 - beta loses half its digits in float32, so these travel in float64.
    numbers = FLOAT(float(clip)), FLOAT(weight_decay), DOUBLE(beta1), DOUBLE(beta2), FLOAT(eps), *corrections
    _call(
        "lamb_update", parameters, gradients, first, second, chunks, LONG(len(chunks)), LONG(chunk_size), squares,
        *numbers,
    )  # fmt: skip
    return squares


def lamb_apply(
    parameters: Tensor, updates: Tensor, copy: Tensor | None, chunks: Tensor, chunk_size: int, rates: Tensor
) -> None:
    """parameters -= rates (one for each tensor) * updates; into `copy` in bf16, too."""
    assert copy is None or copy.dtype == torch.bfloat16
    _call("lamb_apply", parameters, updates, copy, chunks, LONG(len(chunks)), LONG(chunk_size), rates)
