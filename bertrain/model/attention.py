"""Attention within sequences of different lengths that are stored one after another.

`attend_each` is the specification: one sequence at a time. A plan computes the same for a whole bin, and is made once
for all layers. `RaggedPlan` works on any device: groups of sequences of similar length, padded to the group's length
and masked; no tensor has the size of the whole bin squared. `VarlenPlan` calls PyTorch's own attention over
`cu_seqlens`, whose shapes do not depend on the lengths, so torch.compile compiles it once. Letters as in bert.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertrain.model.batch import Batch
from bertrain.model.dropout import dropout

GROUP_STEP = 32  # lengths are rounded up to a multiple of this to share a group


class AttentionPlan(Protocol):
    """How a bin's attention is computed."""

    def attend(self, qkv: Tensor, dropout_rate: float) -> Tensor:
        """Attention within each sequence, [T, 3, H, D] -> [T, H, D]."""


@dataclass(frozen=True)
class VarlenPlan:
    """PyTorch's variable-length attention: `flash` in 16 bits on GPUs from compute capability 8.0 on, else `efficient`.

    Both have dropout and, under `torch.use_deterministic_algorithms`, a deterministic backward pass.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    kernel: Literal["flash", "efficient"]

    def attend(self, qkv: Tensor, dropout_rate: float) -> Tensor:
        bounds = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
        q, k, v = qkv.unbind(1)
        if self.kernel == "flash":
            return torch.ops.aten._flash_attention_forward(q, k, v, *bounds, dropout_rate, False, False)[0]
        one_batch = (q[None], k[None], v[None])
        return torch.ops.aten._efficient_attention_forward(*one_batch, None, *bounds, dropout_rate, 0, True)[0][0]


@dataclass(frozen=True)
class Group:
    """`count` sequences padded to one length, in [count, length] slots; `keys` is true where a slot holds a token."""

    count: int
    length: int
    keys: Tensor | None  # [count, 1, 1, length]; None if every slot holds a token


@dataclass(frozen=True)
class RaggedPlan:
    """The groups of a bin and the slot of each token; made once per bin, for every layer."""

    token_of_slot: Tensor  # [slots], 0 for padding
    slot_of_token: Tensor  # [T]
    is_padding: Tensor | None  # [slots, 1]; None if no slot is padding
    groups: tuple[Group, ...]

    @staticmethod
    def of(batch: Batch) -> RaggedPlan:
        return plan_groups(batch.sequence_lengths, batch.input_ids.device)

    def attend(self, qkv: Tensor, dropout_rate: float) -> Tensor:
        return attend_grouped(qkv, self, dropout_rate)


def plan_groups(sequence_lengths: Sequence[int], device: torch.device) -> RaggedPlan:
    """Group sequences by length, rounded up. `sequence_lengths` covers every token of the bin, in order."""
    lengths = np.array(sequence_lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    rounded = -(-lengths // GROUP_STEP) * GROUP_STEP
    token_of_slot, groups = [], []
    for size in np.unique(rounded):
        members = np.flatnonzero(rounded == size)
        longest = int(lengths[members].max())
        offsets = np.arange(longest)
        holds_token = offsets < lengths[members, None]
        token_of_slot.append(np.where(holds_token, starts[members, None] + offsets, -1).ravel())
        keys = None if holds_token.all() else torch.from_numpy(holds_token[:, None, None, :]).to(device)
        groups.append(Group(len(members), longest, keys))
    slots = np.concatenate(token_of_slot)
    real = np.flatnonzero(slots >= 0)
    slot_of_token = np.empty(int(lengths.sum()), dtype=np.int64)
    slot_of_token[slots[real]] = real
    padding = torch.from_numpy((slots < 0)[:, None]).to(device) if len(real) < len(slots) else None
    return RaggedPlan(
        token_of_slot=torch.from_numpy(np.maximum(slots, 0)).to(device),
        slot_of_token=torch.from_numpy(slot_of_token).to(device),
        is_padding=padding,
        groups=tuple(groups),
    )


def attend_each(qkv: Tensor, sequence_lengths: Sequence[int], dropout_rate: float) -> Tensor:
    """The specification: softmax(q k' / sqrt(D)) v, one sequence at a time."""
    attended = []
    for sequence in qkv.split(list(sequence_lengths)):
        q, k, v = sequence.unbind(1)  # [length, H, D] each
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        probabilities = dropout(scores.softmax(-1), dropout_rate)
        attended.append(torch.einsum("hqk,khd->qhd", probabilities, v))
    return torch.cat(attended)


def attend_grouped(qkv: Tensor, plan: RaggedPlan, dropout_rate: float) -> Tensor:
    """Attention within each sequence, one group at a time: [T, 3, H, D] -> [T, H, D]."""
    heads, head_size = qkv.shape[2:]
    slots = _TokensToSlots.apply(qkv.flatten(1), plan)
    attended = []
    for group, part in zip(plan.groups, slots.split([g.count * g.length for g in plan.groups]), strict=True):
        q, k, v = part.view(group.count, group.length, 3, heads, head_size).permute(2, 0, 3, 1, 4)
        if qkv.device.type == "cpu" and not torch.is_grad_enabled() and dropout_rate == 0:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=group.keys)  # 1.3 to 1.7 times as fast
        else:
            scores = (q * head_size**-0.5) @ k.transpose(-1, -2)
            if group.keys is not None:
                scores = scores.masked_fill(~group.keys, -torch.inf)
            mixed = dropout(scores.softmax(-1), dropout_rate) @ v
        attended.append(mixed.transpose(1, 2).reshape(group.count * group.length, heads * head_size))
    return _SlotsToTokens.apply(torch.cat(attended), plan).view(-1, heads, head_size)


class _TokensToSlots(torch.autograd.Function):
    """Copy tokens into padded slots. Each token has one slot, so the gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: RaggedPlan) -> Tensor:
        ctx.plan = plan
        return tokens.index_select(0, plan.token_of_slot)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.plan.slot_of_token), None


class _SlotsToTokens(torch.autograd.Function):
    """Copy each token out of its slot. The gradient of padding slots is zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, plan: RaggedPlan) -> Tensor:
        ctx.plan = plan
        return slots.index_select(0, plan.slot_of_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slots = gradients[0].index_select(0, ctx.plan.token_of_slot)
        if ctx.plan.is_padding is not None:
            slots.masked_fill_(ctx.plan.is_padding, 0.0)
        return slots, None
