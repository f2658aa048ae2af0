"""dropout(LayerNorm(word + position + segment)): the embeddings in one pass each way.

The backward recomputes the sum from the tables, writes the gradient of each row's sum in float32, and in the same pass
sums the gradients of LayerNorm and of the two segments. A position's gradient is a sum over the sequences that reach
it; a word's comes from PyTorch, whose sort-based sum is deterministic too. ModernBERT has words alone and no bias:
arguments that are None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.arguments import Dropout, EmbeddingIds, EmbeddingTables
from bertrain.kernels.backend import jit, num_multiprocessors, on_cpu, tl
from bertrain.kernels.random import load_stream_key, row_constants, rows_keep, rows_keep_mask


def embed_plain(
    tables: EmbeddingTables, ids: EmbeddingIds, weight: Tensor, ln_bias: Tensor | None, dropout: Dropout, eps: float
) -> Tensor:
    """The specification, in the dtype of the tables."""
    total = tables.words[ids.words]
    if tables.positions is not None and tables.segments is not None:
        total = total + tables.positions[ids.positions] + tables.segments[ids.segments]
    normed = torch.nn.functional.layer_norm(total, total.shape[1:], weight, ln_bias, eps)
    if dropout.p > 0:
        keep = rows_keep_mask(dropout.seed, dropout.site, normed.shape[0], normed.shape[1], dropout.p)
        normed = torch.where(keep, normed / (1 - dropout.p), 0)
    return normed


@jit
def _row_sum(words, positions, segments, word_ids, position_ids, segment_ids, row, columns, inside, N: tl.constexpr):
    """Word + position + segment of one row, and its segment id."""
    word, segment = tl.load(word_ids + row).to(tl.int64), 0
    total = tl.load(words + word * N + columns, mask=inside, other=0.0).to(tl.float32)
    if positions is not None:
        position, segment = tl.load(position_ids + row).to(tl.int64), tl.load(segment_ids + row).to(tl.int32)
        total += tl.load(positions + position * N + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(segments + segment * N + columns, mask=inside, other=0.0).to(tl.float32)
    return total, segment


@jit(do_not_specialize=["site"])
def _embed_forward_kernel(
    words, positions, segments, word_ids, position_ids, segment_ids, weight, ln_bias, y, statistics, seed, site, eps,
    N: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    inside = columns < N
    z, _segment = _row_sum(
        words, positions, segments, word_ids, position_ids, segment_ids, row, columns, inside, N
    )  # fmt: skip
    mean = tl.sum(z, axis=0) / N
    centred = tl.where(inside, z - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / N + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = centred * rstd * scale
    if ln_bias is not None:
        result += tl.load(ln_bias + columns, mask=inside, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        keep = rows_keep(load_stream_key(seed, site), row, columns, THRESHOLD)
        result = tl.where(keep, result * INVERSE_KEEP, 0.0)
    tl.store(y + row.to(tl.int64) * N + columns, result.to(y.dtype.element_ty), mask=inside)
    tl.store(statistics + row * 2, mean)
    tl.store(statistics + row * 2 + 1, rstd)


@jit(do_not_specialize=["site"])
def _embed_backward_kernel(
    dy, second, words, positions, segments, word_ids, position_ids, segment_ids, weight, statistics, dsum, partials,
    seed, site, num_rows,
    N: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Each program walks over many rows and keeps four column sums: two of LayerNorm, one for each segment; or the
    first alone."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < N
    key = load_stream_key(seed, site)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([COLUMNS], dtype=tl.float32)
    dln_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    dfirst = tl.zeros([COLUMNS], dtype=tl.float32)
    dsecond = tl.zeros([COLUMNS], dtype=tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * N + columns
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        gradient += tl.load(second + place, mask=inside, other=0.0).to(tl.float32)
        if THRESHOLD > 0:
            gradient = tl.where(rows_keep(key, row, columns, THRESHOLD), gradient * INVERSE_KEEP, 0.0)
        z, segment = _row_sum(
            words, positions, segments, word_ids, position_ids, segment_ids, row, columns, inside, N
        )  # fmt: skip
        mean, rstd = tl.load(statistics + row * 2), tl.load(statistics + row * 2 + 1)
        normed = tl.where(inside, (z - mean) * rstd, 0.0)
        scaled = gradient * scale
        along = tl.sum(scaled * normed, axis=0) / N
        offset = tl.sum(scaled, axis=0) / N
        dz = rstd * (scaled - normed * along - offset)
        tl.store(dsum + place, dz, mask=inside)
        dweight += gradient * normed
        dln_bias += gradient
        dfirst += tl.where(segment == 0, dz, 0.0)
        dsecond += tl.where(segment == 1, dz, 0.0)
    row_of_sums = partials + tl.program_id(0) * (SUMS * N) + columns
    tl.store(row_of_sums, dweight, mask=inside)
    if SUMS == 4:
        tl.store(row_of_sums + N, dln_bias, mask=inside)
        tl.store(row_of_sums + 2 * N, dfirst, mask=inside)
        tl.store(row_of_sums + 3 * N, dsecond, mask=inside)


@jit
def _position_kernel(
    dsum, cu_seqlens, out, num_sequences, ACCUMULATE: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr
):
    """The gradient of one position: the sum of its rows, sequence by sequence."""
    position = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for sequence in range(num_sequences):
        row = tl.load(cu_seqlens + sequence) + position
        here = row < tl.load(cu_seqlens + sequence + 1)
        total += tl.load(dsum + row.to(tl.int64) * N + columns, mask=inside & here, other=0.0)
    place = out + position * N + columns
    if ACCUMULATE:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


@on_cpu(cpu.embed_forward)
def embed_forward(
    tables: EmbeddingTables, ids: EmbeddingIds, weight: Tensor, ln_bias: Tensor | None, dropout: Dropout, eps: float
) -> tuple[Tensor, Tensor]:
    """The embedded rows in the dtype of `tables.words`, and mean and 1 / deviation of each for the backward."""
    num_rows, width = ids.words.numel(), tables.words.shape[1]
    y = torch.empty(num_rows, width, dtype=tables.words.dtype, device=tables.words.device)
    statistics = torch.empty(num_rows, 2, dtype=torch.float32, device=y.device)
    _embed_forward_kernel[(num_rows,)](
        *tables, *ids, weight, ln_bias, y, statistics, dropout.seed, dropout.site, eps,
        **row_constants(width, dropout.p), num_warps=4,
    )  # fmt: skip
    return y, statistics


@on_cpu(cpu.embed_backward)
def embed_backward(
    dy: Tensor,
    second: Tensor,
    tables: EmbeddingTables,
    ids: EmbeddingIds,
    weight: Tensor,
    statistics: Tensor,
    dropout: Dropout,
) -> tuple[Tensor, Tensor]:
    """Gradient of each row's sum [T, N] and partial column sums [n, 4, N], all in float32.

    The incoming gradient is dy + second. The partial sums are for LayerNorm's weight and bias and for segments 0 and 1;
    for the weight alone [n, 1, N] if there are words alone.
    """
    num_rows, width = dy.shape
    num_programs = min(num_multiprocessors(dy.device) * 4, num_rows)
    dsum = torch.empty(num_rows, width, dtype=torch.float32, device=dy.device)
    sums = 1 if tables.segments is None else 4
    partials = torch.empty(num_programs, sums, width, dtype=torch.float32, device=dy.device)
    _embed_backward_kernel[(num_programs,)](
        dy, second, *tables, *ids, weight, statistics, dsum, partials, dropout.seed, dropout.site, num_rows,
        SUMS=sums, **row_constants(width, dropout.p), num_warps=4,
    )  # fmt: skip
    return dsum, partials


@on_cpu(cpu.position_gradient)
def position_gradient(dsum: Tensor, cu_seqlens: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """Sum the rows of each position into `out`, the float32 gradient of all positions."""
    width = dsum.shape[1]
    grid = (out.shape[0], -(-width // 256))
    _position_kernel[grid](
        dsum, cu_seqlens, out, cu_seqlens.numel() - 1, ACCUMULATE=accumulate, N=width, COLUMNS=256, num_warps=4
    )


@on_cpu(cpu.word_gradient)
def word_gradient(dsum: Tensor, ids: Tensor, out: Tensor) -> None:
    """Add the rows of each word to `out`, the float32 gradient of all words."""
    out.add_(torch.ops.aten.embedding_dense_backward(dsum, ids, len(out), -1, False))
