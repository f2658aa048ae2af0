"""Attention within sequences of different lengths that are stored one after another.

A plan computes what `kernels.attention.ragged_attention_plain` specifies, softmax(q k' / sqrt(D)) v for one sequence
at a time. It covers a whole bin, and is made once for all layers. `RaggedPlan` works on any device: groups of sequences
of similar length, padded to the group's length and masked; no tensor has the size of the whole bin squared.
`VarlenPlan` calls PyTorch's own attention over `cu_seqlens`, whose shapes do not depend on the lengths, so
torch.compile compiles it once.

With a `window`, a token attends only to tokens at most `window` positions away. Letters as in bert.py.
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
BLOCK_WINDOWS = 2  # queries of a block with a window, in windows: it reads four windows of keys


class AttentionPlan(Protocol):
    """Computes the attention of a bin."""

    def attend(self, qkv: Tensor, dropout_rate: float, window: int | None = None) -> Tensor:
        """Attention within each sequence, [T, 3, H, D] -> [T, H, D]."""


@dataclass(frozen=True)
class VarlenPlan:
    """PyTorch's variable-length attention: `flash` in 16 bits on GPUs from compute capability 8.0 on, else `efficient`.

    Both have dropout and, under `torch.use_deterministic_algorithms`, a deterministic backward pass. Only `flash` has
    windows.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    kernel: Literal["flash", "efficient"]

    def attend(self, qkv: Tensor, dropout_rate: float, window: int | None = None) -> Tensor:
        bounds = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
        q, k, v = qkv.unbind(1)
        if self.kernel == "flash":
            sides = {"window_size_left": window, "window_size_right": window}
            return torch.ops.aten._flash_attention_forward(q, k, v, *bounds, dropout_rate, False, False, **sides)[0]
        assert window is None
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
    in_order: bool = False
    """Whether each token is its own slot, as in rows of one length: nothing needs to be copied."""

    @staticmethod
    def of(batch: Batch) -> RaggedPlan:
        return plan_groups(batch.sequence_lengths, batch.input_ids.device)

    def attend(self, qkv: Tensor, dropout_rate: float, window: int | None = None) -> Tensor:
        """Attention one group at a time, [T, 3, H, D] -> [T, H, D]."""
        heads, head_size = qkv.shape[2:]
        slots = qkv.flatten(1)
        if not self.in_order:
            slots = _Rows.apply(slots, self.token_of_slot, self.slot_of_token, None)
        attended = []
        for group, part in zip(self.groups, slots.split([g.count * g.length for g in self.groups]), strict=True):
            q, k, v = part.view(group.count, group.length, 3, heads, head_size).permute(2, 0, 3, 1, 4)
            if window is None or group.length <= window + 1:
                mixed = _attend(q, k, v, group.keys, dropout_rate)
            else:
                mixed = _attend_nearby(q, k, v, group, dropout_rate, window)
            attended.append(mixed.transpose(1, 2).reshape(group.count * group.length, heads * head_size))
        mixed = attended[0] if len(attended) == 1 else torch.cat(attended)
        if not self.in_order:
            mixed = _Rows.apply(mixed, self.slot_of_token, self.token_of_slot, self.is_padding)
        return mixed.view(-1, heads, head_size)


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
        in_order=np.array_equal(slots, np.arange(len(slots))),
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, attends: Tensor | None, dropout_rate: float) -> Tensor:
    """Attention of queries [..., Q, D] to keys and values [..., K, D], where `attends` is true, or to all."""
    if q.device.type == "cpu" and not torch.is_grad_enabled() and dropout_rate == 0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attends)  # 1.3 to 1.7 times as fast
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if attends is not None:
        scores = scores.masked_fill(~attends, -torch.inf)
    return dropout(scores.softmax(-1), dropout_rate) @ v


def _attend_nearby(q: Tensor, k: Tensor, v: Tensor, group: Group, dropout_rate: float, window: int) -> Tensor:
    """Attention to at most `window` positions away: blocks of queries, each with the keys around it.

    Memory grows with the length, not with its square; a group of no more than four windows is one block.
    """
    length, block, margin = group.length, BLOCK_WINDOWS * window, window
    if length <= block + 2 * margin:
        block, margin = length, 0
    num_blocks = -(-length // block)
    missing = num_blocks * block - length

    def around(x: Tensor) -> Tensor:  # [N, H, L, D] -> [N, H, blocks, block + 2 margin, D]
        return F.pad(x, (0, 0, margin, margin + missing)).unfold(2, block + 2 * margin, block).transpose(-1, -2)

    keys = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device) if group.keys is None else group.keys
    places = torch.arange(-margin, block + margin, device=q.device)  # of keys, from the block's first
    is_near = (places - torch.arange(block, device=q.device)[:, None]).abs() <= window
    attends = is_near & around(keys.transpose(-1, -2)).transpose(-1, -2)
    attends |= ~attends.any(-1, keepdim=True)  # padding without a token nearby: softmax of nothing is NaN
    queries = F.pad(q, (0, 0, 0, missing)).unflatten(2, (num_blocks, block))
    return _attend(queries, around(k), around(v), attends, dropout_rate).flatten(2, 3)[:, :, :length]


class _Rows(torch.autograd.Function):
    """The rows `index` of `x`. The gradient of `x` is the rows `inverse` of the result's, zero where `is_unread`.

    Autograd would sum the gradients of repeated rows in any order. Here at most one row of the result contributes to
    the gradient of each row of `x`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, is_unread: Tensor | None) -> Tensor:
        ctx.inverse, ctx.is_unread = inverse, is_unread
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradients[0].index_select(0, ctx.inverse)
        if ctx.is_unread is not None:
            rows.masked_fill_(ctx.is_unread, 0.0)
        return rows, None, None, None
