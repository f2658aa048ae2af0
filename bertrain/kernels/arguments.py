"""Tensors that kernels take or return together, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, dtype


class Dropout(NamedTuple):
    """Dropout of one tensor. Its mask is a function of seed and site; no mask is stored."""

    p: float
    seed: Tensor  # int64 [1], on the device
    site: int  # differs between call sites, so that their masks differ


class AttentionPlan(NamedTuple):
    """The sequences of a batch as attention works on them; made once per batch by `plan_attention`."""

    cu_seqlens: Tensor  # [S + 1] int32
    tiles: Tensor | None
    """For Triton kernels, int32 [num_tiles, 4]: sequence start, sequence length, first row in the sequence, first tile
    of the sequence; a length of 0 marks an unused entry. The C kernels work on whole sequences and have no tiles."""


class Rotary(NamedTuple):
    """Cosines and sines of the angles by which positions rotate pairs of a head's elements, [positions, D / 2]."""

    cosines: Tensor
    sines: Tensor


class NormParameters(NamedTuple):
    """The bias of the product that feeds a LayerNorm, and LayerNorm's weight and bias; [N] float32 each."""

    bias: Tensor
    weight: Tensor
    ln_bias: Tensor


class EmbeddingTables(NamedTuple):
    """Embedding matrices, [size, N] each. The result has the dtype of `words`; a model may have words alone."""

    words: Tensor
    positions: Tensor | None = None
    segments: Tensor | None = None


class EmbeddingIds(NamedTuple):
    """The row of each table that a token takes, [T] int64 each."""

    words: Tensor
    positions: Tensor | None = None
    segments: Tensor | None = None


class LambBuffers(NamedTuple):
    """Flat float32 buffers of one layout. A step leaves its update in `gradients`."""

    parameters: Tensor
    gradients: Tensor
    first_moments: Tensor
    second_moments: Tensor


class LambScalars(NamedTuple):
    """Scalars of one step, float32 tensors of one element on the device."""

    learning_rate: Tensor
    clip: Tensor  # factor on the gradients
    apply: Tensor  # 0 leaves everything unchanged
    step: Tensor  # 1 for the first


class LambConstants(NamedTuple):
    """Hyperparameters that are the same in every step."""

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6


@dataclass(frozen=True)
class Cast:
    """The FP8 format and scale of a kernel's result, and the buffer for the largest magnitude that each program saw."""

    dtype: dtype
    scale: Tensor  # [1]
    largest: Tensor  # at least one entry per program


class Fp8Copy(NamedTuple):
    """A matrix in FP8, as stored [T, N] and transposed [N, T]: FP8 products need both operands along their rows."""

    rows: Tensor
    columns: Tensor


class Fp8Rows(NamedTuple):
    """A matrix in FP8 as stored [T, N], from a kernel that does not transpose; `fp8.transpose` completes it."""

    rows: Tensor
    peaks: Tensor  # largest magnitude, one entry per program
