"""Embeddings: one vector per sequence, pooled from the last layer. This head has no parameters, so it is not a module.

Letters as in bert.py. Pooling is computed in float32, whatever the precision of the encoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.model.batch import Batch


def pool(x: Tensor, batch: Batch, pooling: str) -> Tensor:
    """The mean or the maximum of a sequence's tokens, [CLS] and [SEP] included, or its [CLS]; [T, E] -> [S, E]."""
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        if pooling == "cls":
            return x[batch.cls_positions]
        if pooling == "max":
            sequence = sequence_of_token(batch)
            lowest = x.new_full((len(batch.is_real), x.shape[1]), torch.finfo(x.dtype).min)
            return lowest.scatter_reduce(0, sequence[:, None].expand_as(x), x, "amax")
        return _sums(x, batch) / batch.cu_seqlens.diff().clamp(min=1)[:, None]


def sequence_of_token(batch: Batch) -> Tensor:
    """The slot of the sequence that each token belongs to, [T]."""
    tokens = torch.arange(len(batch.input_ids), dtype=batch.cu_seqlens.dtype, device=batch.cu_seqlens.device)
    return torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True)


def _sums(x: Tensor, batch: Batch) -> Tensor:
    """The sum of the tokens of each sequence, [S, E], added in the same order every time."""
    if x.device.type == "cpu":
        return torch.segment_reduce(x, "sum", lengths=batch.cu_seqlens.diff().long(), unsafe=True)
    # On a GPU, index_add adds in any order. A product with a matrix of zeros and ones does not.
    slots = torch.arange(len(batch.is_real), device=x.device)
    return (sequence_of_token(batch) == slots[:, None]).to(x.dtype) @ x
