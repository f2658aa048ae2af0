"""The compiled engine: the model through torch.compile, with PyTorch's own variable-length attention.

It needs no kernel of ours, so it serves what those do not: fp16, tf32 and fp32, other head sizes, other GPUs. A bin has
one of few fixed shapes. Each is compiled and run once, forward and backward, before a bin of it counts. A failure there
takes the run to the plain engine, with a warning. Later compilations are counted: there should be none.

Off NVIDIA's GPUs, attention is that of the plain engine and stays out of the compiled graph: it needs the lengths of a
bin on the host.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import fields
from typing import Any, Literal, cast

import torch
from torch import Tensor

from bertrain.base.console import warn
from bertrain.base.formatting import counted
from bertrain.base.logs import note
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Step
from bertrain.model.attention import RaggedPlan, VarlenPlan
from bertrain.model.batch import Batch
from bertrain.model.encoder import EncoderModel
from bertrain.planning.memory_fit import is_out_of_memory
from bertrain.training.plain_engine import PlainEngine
from bertrain.training.precision import SIXTEEN_BITS

Attention = Literal["flash", "efficient", "grouped"]
MAX_FLASH_HEAD = 256
NO_HOST_NUMBERS: dict[str, Any] = {
    "sequence_lengths": (), "dropout_seed": 0, "num_tokens": 0, "num_sequences": 0, "num_predictions": 0,
}  # fmt: skip


def why_not_compiled(settings: Settings, device: torch.device) -> str:
    """The reason why the compiled engine cannot run on this device; empty if it can."""
    # Without AMX, compiled fp32 steps took as much processor time as plain ones or more (two AVX-512 cores, bins of
    # 1,000 to 2,000 tokens, steps in turns): 1.05 times for BERT-Mini, 1.07 and 1.10 for BERT-Base in two steps.
    if device.type == "cpu" and settings.train.kernels == "auto":
        return "torch.compile takes minutes to start on a CPU"
    if not (shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
        return "torch.compile needs a C compiler: put gcc or clang on the PATH"
    if is_nvidia(device) and torch.cuda.get_device_capability(device) < (7, 0):
        return "torch.compile needs compute capability 7.0 or newer"
    if attention_kernel(settings, device) not in attention_kernels(settings, device):
        return f"attention here is {' or '.join(attention_kernels(settings, device))}"
    return ""


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip


def attention_kernels(settings: Settings, device: torch.device) -> list[Attention]:
    """PyTorch's kinds of attention that can compute this model, the fastest first."""
    head_size = settings.model.head_size
    found: list[Attention] = ["grouped"]
    if not is_nvidia(device) or head_size % 8 or head_size > MAX_FLASH_HEAD:
        return found
    if not any(settings.model.windows):
        found.insert(0, "efficient")
    if torch.cuda.get_device_capability(device) >= (8, 0) and settings.train.precision in SIXTEEN_BITS:
        found.insert(0, "flash")
    return found


def attention_kernel(settings: Settings, device: torch.device) -> Attention:
    """The one that `train.kernels` names, or the fastest."""
    asked = settings.train.kernels.partition("-")[2]
    return cast(Attention, asked) if asked else attention_kernels(settings, device)[0]


def use_varlen_attention(model: EncoderModel, settings: Settings, device: torch.device) -> None:
    """Let `model` compute attention over `cu_seqlens`, where PyTorch can."""
    kernel = attention_kernel(settings, device)
    if kernel != "grouped":
        model.plan_attention = lambda batch: VarlenPlan(batch.cu_seqlens, batch.max_seqlen, kernel)


class OutsideGraph:
    """The plain engine's attention for the bin at hand; the compiler leaves the graph for it and guards nothing."""

    plan: RaggedPlan

    def __init__(self) -> None:
        # torch.compiler takes a second to import, so not for the other engines.
        self._attend: Any = torch.compiler.disable(lambda *arguments: self.plan.attend(*arguments))

    def attend(self, qkv: Tensor, dropout_rate: float, window: int | None = None) -> Tensor:
        attended: Tensor = self._attend(qkv, dropout_rate, window)
        return attended


def _tensors_of(batch: Batch) -> dict[str, Any]:
    """What the compiled function reads of a bin. Its host numbers would each be compiled in as a constant."""
    return {item.name: getattr(batch, item.name) for item in fields(batch) if item.name not in NO_HOST_NUMBERS}


def _num_graphs() -> int:
    """Graphs that torch.compile has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class CompiledEngine(PlainEngine):
    """The plain engine with its loss compiled, forward and backward."""

    needs_few_shapes = True

    def __init__(self, model: EncoderModel, *others: Any) -> None:
        super().__init__(model, *others)
        device = self.sums.device
        use_varlen_attention(model, self._settings, device)
        self._outside: OutsideGraph | None = None
        if attention_kernel(self._settings, device) == "grouped":
            outside = self._outside = OutsideGraph()
            # Evaluations, whose bins have host numbers, run without the compiler.
            model.plan_attention = lambda batch: RaggedPlan.of(batch) if batch.sequence_lengths else outside
        torch._dynamo.reset()  # PyTorch limits recompilations of a function, and earlier runs of this process count
        self._compiled = torch.compile(self._loss_of_tensors, dynamic=False, fullgraph=self._outside is None)
        self._compiles = True
        self._shapes: set[tuple[object, ...]] = set()
        self._expected_graphs = _num_graphs()

    def begin(self, step: Step) -> None:
        super().begin(step)
        for batch in step.bins:
            shape = tuple(getattr(value, "shape", value) for value in _tensors_of(batch).values())
            if self._compiles and shape not in self._shapes:
                self._shapes.add(shape)
                self._try_out(batch, step)

    def _try_out(self, batch: Batch, step: Step) -> None:
        """Compute a bin of a new shape and discard it, before anything is summed or sent to other ranks."""
        before = _num_graphs()
        try:
            super().add_bin(batch, step, is_last=False)
            if self.sums.is_cuda:
                torch.cuda.synchronize(self.sums.device)  # a launch reports its failure late
        except Exception as error:  # of the compiler, of a launch, of the driver
            self._fall_back(error)
        self._expected_graphs += _num_graphs() - before
        super().begin(step)

    def _fall_back(self, error: Exception) -> None:
        """Compute this and all later bins as the plain engine does; raises `error` if memory ran out."""
        if is_out_of_memory(error) or is_out_of_memory(error.__cause__ or error):
            raise error
        self._compiles, self._model.plan_attention = False, RaggedPlan.of
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warn(f"torch.compile failed, so this run computes with plain PyTorch, which is slower: {reason[:200]}")
        note("warning", "compile", str(error))

    def update(self, rate: float) -> Tensor:
        if (unexpected := _num_graphs() - self._expected_graphs) > 0:
            self._expected_graphs = sys.maxsize  # one line
            shapes = counted(len(self._shapes), "shape")
            warn(
                f"torch.compile has compiled {counted(unexpected, 'graph')} again, beyond those of the {shapes} that "
                "bins have; that takes time (TORCH_LOGS=recompiles names the reasons)"
            )
        return super().update(rate)

    def _loss(self, batch: Batch, *counts: int | Tensor) -> tuple[Tensor, Tensor]:
        if not self._compiles:
            return super()._loss(batch, *counts)
        if self._outside is not None:
            self._outside.plan = RaggedPlan.of(batch)
        from torch._dynamo.exc import TorchDynamoException  # seconds to import, so only where it is needed

        try:
            return self._compiled(_tensors_of(batch), *map(torch.tensor, counts))
        except TorchDynamoException as error:
            self._fall_back(error)
            return super()._loss(batch, *counts)

    def _loss_of_tensors(self, tensors: dict[str, Any], *counts: Tensor) -> tuple[Tensor, Tensor]:
        return PlainEngine._loss(self, Batch(**tensors, **NO_HOST_NUMBERS), *counts)
