"""The engine computes a step: fused, on our kernels and CUDA graphs; compiled by torch.compile; or plain, by autograd.

`choose` selects one and gives the reason. Each adds a bin's part of the gradient to the arena and applies one update to
it, and leaves all results on the device; the loop does not know which it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from bertrain.base import isa
from bertrain.base.console import warn
from bertrain.base.errors import AgreedError, UserError
from bertrain.config.choices import EngineName
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Step
from bertrain.kernels import backend, cpu_library, self_test
from bertrain.kernels.self_test_checks import Sizes
from bertrain.model import fused_self_test  # noqa: F401 - adds the whole model to the self-test
from bertrain.model.arena import Arena
from bertrain.model.batch import Batch
from bertrain.model.encoder import EncoderModel, Outputs, split_parts
from bertrain.model.fused_check import why_outdated
from bertrain.model.fused_families import new_fused
from bertrain.optim.optimizer import Optimizer
from bertrain.planning import kernel_limits
from bertrain.ranks.parallel import Ranks
from bertrain.training import compiled_engine
from bertrain.training.contrastive_engine import ContrastiveEngine
from bertrain.training.exchange import Exchange
from bertrain.training.fused_engine import FusedEngine
from bertrain.training.plain_engine import PlainEngine, plain_outputs
from bertrain.training.precision import check_precision
from bertrain.training.replacing_engine import ReplacingEngine, WordReplacer

Predictor = Callable[[Batch], Outputs]
"""Computes a model's outputs for a bin on its device, without dropout."""
ENGINES = {"fused": "fused kernels", "compiled": "compiled PyTorch", "plain": "plain PyTorch"}
SIMILARITY = "similarity"  # the task whose loss compares texts of different bins


class Engine(Protocol):
    """The interface between the training loop and the computation of a step."""

    uses_graphs: bool
    """Whether CUDA graphs replay kernels. The profiler turns it off to see which operator launches which kernel."""

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint stores in addition to weights and moments."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load the tensors of `state`, if any; called also after weights have changed in the arena."""

    def begin(self, step: Step) -> None:
        """Start a step; its `bins` of this rank are added next. Without bins, the rank's gradient is zero."""

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        """Add one bin to the step's gradient and sums. The last bin sends the gradient to the other ranks."""

    @property
    def sums(self) -> Tensor:
        """Packed `Sums` over the bins since `begin`."""

    @property
    def peaks(self) -> list[Tensor]:
        """Largest magnitudes since `begin`; `update` needs their maximum over all ranks."""

    def outputs(self, batch: Batch) -> Outputs:
        """The model's outputs for a bin on its device, without dropout; training state does not change."""

    def discard_bins(self) -> None:
        """Undo the effects of bins that no update follows."""

    def update(self, rate: float) -> Tensor:
        """Apply the gradient, if it is finite; returns a packed `Verdict`."""


def predictor(model: EncoderModel, settings: Settings, device: torch.device) -> Predictor:
    """Outputs of a model that is not trained, on the engine that `choose` selects."""
    name, _ = choose(settings, device)
    if name == "fused":
        fused = new_fused(model, Arena(model, split_parts))
        return torch.no_grad()(fused.outputs)
    if name == "compiled":
        compiled_engine.use_varlen_attention(model, settings, device)
    return lambda batch: plain_outputs(model, batch, settings.train)


def why_unfit(settings: Settings, device: torch.device) -> str:
    """The setting that the kernels cannot compute on this device; empty if they can compute all."""
    model, on_cpu = settings.model, device.type == "cpu"
    if model.family != "bert" and on_cpu and not backend.INTERPRETED:
        return f"the kernels for CPUs have no model.family {model.family}"
    if on_cpu and model.intermediate_size % 16:
        return f"model.intermediate_size {model.intermediate_size} is not a multiple of 16"
    return kernel_limits.why_unfit(settings, on_gpu=not on_cpu)


def choose(settings: Settings, device: torch.device) -> tuple[EngineName, str]:
    """The engine that computes a model of these settings, and the reason."""
    precision, asked = settings.train.precision, settings.train.kernels.partition("-")[0]
    check_precision(settings.train, device)
    usable, reason = kernels_serve(settings, device)
    if usable and (mismatch := why_outdated() or failed_kernel(settings, device)):
        usable, reason = False, mismatch
    name: EngineName = "fused" if usable else "plain"
    if precision == "fp8" and settings.task.name == SIMILARITY:
        usable, reason = False, "the task similarity computes each bin twice, with the same FP8 scales"
    if precision == "fp8" and not usable:
        why = f"train.precision fp8 is not possible here ({reason})"
        raise UserError("precision-not-possible", f"{why}; use --train.precision bf16")
    if not usable and asked != "plain":
        why_not = compiled_engine.why_not_compiled(settings, device)
        if settings.task.name == SIMILARITY:  # it computes each bin twice, with the same dropout
            why_not = "torch.compile may draw another dropout in the second pass of the task similarity"
        if not why_not:
            name, reason = "compiled", f"{compiled_engine.attention_kernel(settings, device)} attention; {reason}"
        elif asked == "compiled":
            reason = why_not
    if asked not in ("auto", name):
        raise UserError(
            "engine-not-possible",
            f"train.kernels {settings.train.kernels} is not possible here ({reason}); use --train.kernels auto",
        )
    instructions = f"; {isa.describe(settings.train.isa, precision)}" if device.type == "cpu" else ""
    return name, f"{ENGINES[name]}, {precision} ({reason}){instructions}"


def kernels_serve(settings: Settings, device: torch.device) -> tuple[bool, str]:
    """Whether kernels can run on this device with these settings, and the reason."""
    precision = settings.train.precision
    on_cpu = device.type == "cpu" and not backend.INTERPRETED
    formats = ("bf16",) if on_cpu else ("bf16", "fp8")
    if settings.train.kernels not in ("auto", "fused"):
        return False, "asked for"
    if precision not in formats:
        return False, f"the kernels work in {' or '.join(formats)}, not in {precision}"
    if on_cpu and isa.usable(settings.train.isa) != "amx":
        return False, "the kernels for CPUs need AMX"
    usable, reason = cpu_library.available() if on_cpu else backend.available(device)
    if usable and (unfit := why_unfit(settings, device)):
        return False, unfit
    if usable and precision == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        return False, f"{torch.cuda.get_device_name(device)} has no FP8"
    return usable, reason


def failed_kernel(settings: Settings, device: torch.device) -> str:
    """The first kernel that the self-test found not to work on this GPU, and why; empty if there is none."""
    return self_test.why_failed(kernel_sizes(settings), device) if device.type == "cuda" else ""


def kernel_sizes(settings: Settings) -> Sizes:
    """What the kernels of a run are compiled for."""
    model = settings.model
    return Sizes(
        hidden=model.hidden_size, heads=model.num_heads, inner=model.intermediate_size, vocabulary=model.vocab_size,
        padded_vocabulary=model.padded_vocab_size, hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout, fp8=settings.train.precision == "fp8", family=model.family,
        window=model.local_window // 2,
    )  # fmt: skip


def build(
    model: EncoderModel, arena: Arena, optimizer: Optimizer, exchange: Exchange, ranks: Ranks, settings: Settings
) -> PlainEngine | FusedEngine | ContrastiveEngine | ReplacingEngine:
    """Build the engine that `choose` selects; warns if the kernels do not compute this model, or fail on this GPU."""
    device = arena.values.device
    name, _ = choose(settings, device)
    if name != "fused" and ranks.is_first and kernels_serve(settings, device)[0]:
        reason = why_outdated() or failed_kernel(settings, device)
        warn(f"this run computes with {ENGINES[name]}, which is slower than the kernels: {reason}")
    number = list(ENGINES).index(name)
    if ranks.all_max(number) != -ranks.all_max(-number):
        why = "the kernels work on some ranks only, and all must use the same engine (`bertrain doctor --kernels`)"
        raise AgreedError("engines-differ", f"{why}; use --train.kernels compiled")
    engines = {"fused": FusedEngine, "compiled": compiled_engine.CompiledEngine, "plain": PlainEngine}
    built = engines[name](model, arena, optimizer, exchange, ranks, settings)
    if settings.model.rtd:
        return ReplacingEngine(built, WordReplacer(settings, device, predictor))
    return ContrastiveEngine(built, ranks, settings) if settings.task.name == SIMILARITY else built
