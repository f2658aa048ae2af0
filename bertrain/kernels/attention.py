"""Attention within each of many sequences stored one after another, tuned for the lengths of BERT (up to 512 tokens).

    out, sums, _ = ragged_attention_forward(qkv, plan_attention(cu_seqlens, T), dropout)

With a `window`, a token attends only to tokens at most so many positions away (0: to all). Tiles of keys that no query
of a tile can see are skipped, so the work grows with the length alone. Where `rotary.py` has rotated queries and keys,
the backward rotates their gradients back, in registers.

The projection writes `qkv[T, 3, H, D]` and the output projection reads `out[T, H, D]`: no tensor is stacked or
transposed in between. The backward writes every row of `dqkv[T, 3, H, D]`.

Why it is fast: tiles of work are listed on the device, longest sequences first, so that short tiles finish last and no
program runs for padding. Dropout comes from a counter (see `random.py`) at three instructions per element, handles two
bf16 at a time, and is recomputed in the backward. The softmax uses base 2 without a running maximum, and only tiles at
a sequence's end are masked. The backward has one kernel for queries and one for keys and values; both recompute the
weights, which is cheaper than passing sums between programs. Without atomics, two runs are bitwise equal. The grid
follows from shapes alone, so that the host never waits for the device.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.arguments import AttentionPlan, Cast, Dropout, Fp8Rows, Rotary
from bertrain.kernels.arithmetic import HAS_ASSEMBLY, KERNEL_LOG2_E, LOG2_E, exp2, log2, reciprocal
from bertrain.kernels.attention_pairs import drop, drop_both, drop_gradient, uses_pairs
from bertrain.kernels.backend import generation, jit, on_cpu, tl
from bertrain.kernels.fp8 import empty_rows, limit_and_scale, quantize, widen
from bertrain.kernels.random import (
    attention_keep,
    attention_keep_mask,
    attention_key,
    attention_threshold,
    attention_words,
    load_stream_key,
)

# Rows of a tile, the work of one program. Small tiles are fastest on Hopper: four or five programs per multiprocessor
# hide latency better than one large program.
TILE = 64
# The backward reads the log-sum of a row and its delta (see there) together. So they are interleaved, CHUNK of one and
# CHUNK of the other, tile after tile: every read is aligned, and one read gets both.
CHUNK = 32


def ragged_attention_plain(qkv: Tensor, cu_seqlens: Tensor, dropout: Dropout, window: int = 0) -> Tensor:
    """The specification: one sequence at a time, in differentiable PyTorch."""
    num_heads, head_dim = qkv.shape[2:]
    boundaries = cu_seqlens.tolist()
    outputs = []
    for start, end in itertools.pairwise(boundaries):
        if start == end:
            continue
        query, key, value = qkv[start:end].permute(1, 2, 0, 3)  # each [H, L, D]
        scores = query @ key.transpose(1, 2) / math.sqrt(head_dim)
        if window > 0:
            places = torch.arange(end - start, device=qkv.device)
            scores = scores.masked_fill((places[:, None] - places).abs() > window, -torch.inf)
        probabilities = torch.softmax(scores, dim=-1)
        if dropout.p > 0:
            keep = attention_keep_mask(dropout.seed, dropout.site, num_heads, start, end - start, dropout.p)
            probabilities = torch.where(keep, probabilities / (1 - dropout.p), 0)
        outputs.append((probabilities @ value).transpose(0, 1))
    return torch.cat(outputs)


@jit
def _plan_kernel(cu_seqlens, tiles, num_sequences, capacity, BLOCK: tl.constexpr, TILE: tl.constexpr):
    # Each program places BLOCK sequences: a sequence's first tile is the number of tiles of all sequences before it
    # (longer, or as long with a smaller index). No sort, no scan, no second launch.
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = own < num_sequences
    start = tl.load(cu_seqlens + own, mask=valid, other=0)
    length = tl.load(cu_seqlens + own + 1, mask=valid, other=0) - start
    place = tl.zeros([BLOCK], dtype=tl.int32)
    total = 0
    for first in range(0, num_sequences, BLOCK):
        other = first + tl.arange(0, BLOCK)
        other_valid = other < num_sequences
        other_start = tl.load(cu_seqlens + other, mask=other_valid, other=0)
        other_length = tl.load(cu_seqlens + other + 1, mask=other_valid, other=0) - other_start
        other_tiles = (other_length + TILE - 1) // TILE
        longer = other_length[None, :] > length[:, None]
        tie = (other_length[None, :] == length[:, None]) & (other[None, :] < own[:, None])
        before = (longer | tie) & other_valid[None, :]
        place += tl.sum(tl.where(before, other_tiles[None, :], 0), axis=1)
        total += tl.sum(other_tiles, axis=0)
    for block in range(tl.max((length + TILE - 1) // TILE, axis=0)):
        exists = valid & (block * TILE < length)
        entry = tiles + (place + block) * 4
        tl.store(entry, start, mask=exists)
        tl.store(entry + 1, length, mask=exists)
        tl.store(entry + 2, tl.zeros([BLOCK], dtype=tl.int32) + block * TILE, mask=exists)
        tl.store(entry + 3, place, mask=exists)
    # Unused entries get length 0; the programs share this work.
    for first in range(total + tl.program_id(0) * BLOCK, capacity, BLOCK * tl.num_programs(0)):
        unused = first + tl.arange(0, BLOCK)
        tl.store(tiles + unused * 4 + 1, tl.zeros([BLOCK], dtype=tl.int32), mask=unused < capacity)


@jit
def _tile(tiles, H: tl.constexpr):
    """Head and tile number of this program; start, length, first row and first tile of the tile's sequence."""
    tile = tl.program_id(0) // H
    entry = tiles + tile * 4
    start, length, row, first_tile = (
        tl.load(entry),
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
    )
    return tl.program_id(0) % H, tile, start, length, row, first_tile


@jit
def _block(base, start, head, rows, pitch, D: tl.constexpr):
    """Pointers to the given rows of a sequence in one head's columns of a matrix of `pitch` columns."""
    base += start.to(tl.int64) * pitch + head * D
    return base + (rows[:, None] * pitch + tl.arange(0, D)[None, :])


@jit
def _load(base, start, head, rows, pitch, length, D: tl.constexpr):
    """Rows of one head, zeros past the sequence. Plain loads all start before the program waits for the first; outside
    a pipelined loop, it would wait for each load of the copy engine."""
    return tl.load(_block(base, start, head, rows, pitch, D), mask=(rows < length)[:, None], other=0.0)


@jit
def _store(
    out, out8, values, unit, factor, start, head, rows, pitch, inside,
    D: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store a tile of one head, given in multiples of `unit`, in the dtype of `out`, in FP8, or both."""
    if FULL:
        tl.store(_block(out, start, head, rows, pitch, D), (values * unit).to(out.dtype.element_ty), mask=inside)
    if LIMIT > 0:
        out8 = out8.to(tl.pointer_type(tl.int8), bitcast=True)
        tl.store(_block(out8, start, head, rows, pitch, D), quantize(values * (unit * factor), LIMIT), mask=inside)


@jit
def _peak(values):
    return tl.max(tl.reshape(tl.abs(values), [values.numel]), axis=0)


@jit
def _store_column_sums(out, values, unit, TYPE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Store the sum of each column of a tile given in multiples of `unit`.

    Tensor cores add 16-bit rows, by a product with a matrix whose first row is ones: a third of the instructions of a
    reduction across threads.
    """
    if TYPE is tl.float32:
        tl.store(out + tl.arange(0, D), tl.sum(values, axis=0) * unit)
    else:
        is_first = tl.arange(0, 16)[:, None] == 0
        ones = tl.where(is_first & (tl.arange(0, ROWS) >= 0)[None, :], 1.0, 0.0).to(tl.bfloat16)
        sums = tl.dot(ones, values.to(tl.bfloat16)) * unit
        tl.store(out + tl.arange(0, 16)[:, None] * 0 + tl.arange(0, D)[None, :], sums, mask=is_first)


@jit
def _pinned(operand):
    """A 16-bit operand in registers, complete before the product that reads it starts.

    Otherwise the compiler computes parts of it between the instructions of the product, and the assembler makes each of
    these wait for the previous one.
    """
    if HAS_ASSEMBLY and operand.dtype != tl.float32:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [operand], dtype=operand.dtype, is_pure=True, pack=2
        )
    return operand


@jit
def _of_rows(sums, pitch, head, tile, BM: tl.constexpr, CHUNK: tl.constexpr):
    """Pointers to the log-sums of a tile's rows; the delta of a row is CHUNK further."""
    rows = tl.arange(0, BM)
    return sums + head * pitch + tile * (2 * BM) + ((rows // CHUNK) * (2 * CHUNK) + rows % CHUNK)


@jit
def _is_near(first, own, other_first, others, WINDOW: tl.constexpr):
    """Mask of the pairs of a tile that are at most WINDOW positions apart; both ranges count from their firsts."""
    return tl.abs((first - other_first) + (own - others)) <= WINDOW


@jit
def _within_reach(first, length, SIZE: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """Begin, a multiple of STEP, and end of the positions that a tile of SIZE rows from `first` on attends to."""
    return tl.maximum(first - WINDOW, 0) // STEP * STEP, tl.minimum(first + (SIZE + WINDOW), length)


@jit
def _rotated_back(values, rows, length, cosines, sines, D: tl.constexpr):
    """The gradient of rows before their pairs (i, i + D / 2) were rotated by the angles of their positions."""
    columns = tl.arange(0, D // 2)[None, :]
    places, inside = rows[:, None] * (D // 2) + columns, (rows < length)[:, None]
    cosine, sine = tl.load(cosines + places, mask=inside, other=0.0), tl.load(sines + places, mask=inside, other=0.0)
    left, right = tl.split(tl.permute(tl.reshape(values, [values.shape[0], 2, D // 2]), [0, 2, 1]))
    turned = tl.join(left * cosine + right * sine, right * cosine - left * sine)
    return tl.reshape(tl.permute(turned, [0, 2, 1]), [values.shape[0], D])


@jit
def _forward_careful(
    query, keys_in, start, length, first_row, head, key_of_head, scale_log2,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The softmax with a running maximum: it never overflows, but is slower, since every tile rescales the result."""
    reference = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    result = tl.zeros([BM, D], dtype=tl.float32)
    columns = tl.arange(0, BN)[None, :]
    begin, end = 0, length
    if WINDOW > 0:
        begin, end = _within_reach(first_row, length, BM, BN, WINDOW)
    for column in tl.range(begin, end, BN, num_stages=1):
        keys = keys_in.load([start + column, (H + head) * D])
        values = keys_in.load([start + column, (2 * H + head) * D])
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_log2
        scores = tl.where(column + columns < length, scores, float("-inf"))
        if WINDOW > 0:  # not infinite: a row may see nothing of its first tile, and the next maximum removes that tile
            near = _is_near(first_row, tl.arange(0, BM)[:, None], column, columns, WINDOW)
            scores = tl.where(near, scores, -1e30)
        new_reference = tl.maximum(reference, tl.max(scores, axis=1))
        weights = exp2(scores - new_reference[:, None])
        correction = exp2(reference - new_reference)
        total = total * correction + tl.sum(weights, axis=1)
        if KEEP > 0:
            words = attention_words(key_of_head, first_row, tl.arange(0, BM)[:, None], column, columns)
            weights = tl.where(attention_keep(words, columns, KEEP), weights, 0.0)
        result = tl.dot(weights.to(values.dtype), values, result * correction[:, None], input_precision=PRECISION)
        reference = new_reference
    return reference, total, result


@jit
def _forward_step(
    query, keys, values, length, column, first_row, key_of_head, scale_log2, total, result,
    BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
    EDGE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the sums of weights and of weighted values."""
    columns = tl.arange(0, BN)[None, :]
    weights = exp2(tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_log2)
    if EDGE:  # the last keys belong to the next sequence
        weights = tl.where(column + columns < length, weights, 0.0)
    if WINDOW > 0:
        near = _is_near(first_row, tl.arange(0, BM)[:, None], column, columns, WINDOW)
        weights = tl.where(near, weights, 0.0)
    total += tl.sum(weights, axis=1)
    if KEEP > 0:
        words = attention_words(key_of_head, first_row, tl.arange(0, BM)[:, None], column, columns)
        dropped = drop(weights, words, columns, values.dtype, KEEP, PAIRS)
    else:
        dropped = weights.to(values.dtype)
    result = tl.dot(_pinned(dropped), values, result, input_precision=PRECISION)
    return total, result


@jit(do_not_specialize=["site"])
def _attention_forward_kernel(
    qkv, keys_in, out, out8, scale, peaks, sums, tiles, seed, site, pitch, scale_log2,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr,
    PAIRS: tl.constexpr, INVERSE_KEEP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head, tile, start, length, first_row, _first_tile = _tile(tiles, H)
    if length == 0:
        if LIMIT > 0:
            tl.store(peaks + tl.program_id(0), 0.0)
        return
    rows = first_row + tl.arange(0, BM)
    inside = rows < length
    key_of_head = attention_key(load_stream_key(seed, site), start, head)
    factor = 1.0
    if LIMIT > 0:
        factor = tl.load(scale)
    query = _load(qkv, start, head, rows, 3 * H * D, length, D)
    # As long as the weights stay within 2**-100 ... 2**100, no maximum needs to be subtracted. So the loop finds none
    # and rescales nothing, and its products can overlap.
    reference = tl.zeros([BM], dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    result = tl.zeros([BM, D], dtype=tl.float32)
    # The last keys come first and outside the loop: a branch inside it would keep its products from overlapping.
    begin, end = 0, length
    if WINDOW > 0:
        begin, end = _within_reach(first_row, length, BM, BN, WINDOW)
    last = (end - 1) // BN * BN
    columns = last + tl.arange(0, BN)
    keys = _load(qkv, start, H + head, columns, 3 * H * D, length, D)
    values = _load(qkv, start, 2 * H + head, columns, 3 * H * D, length, D)
    total, result = _forward_step(
        query, keys, values, length, last, first_row, key_of_head, scale_log2, total, result,
        BM, BN, KEEP, PAIRS, PRECISION, True, WINDOW,
    )  # fmt: skip
    for column in tl.range(begin, last, BN, num_stages=STAGES):
        keys = keys_in.load([start + column, (H + head) * D])
        values = keys_in.load([start + column, (2 * H + head) * D])
        total, result = _forward_step(
            query, keys, values, length, column, first_row, key_of_head, scale_log2, total, result,
            BM, BN, KEEP, PAIRS, PRECISION, False, WINDOW,
        )  # fmt: skip
    # If a row leaves that range (never seen in a healthy model), its tile is computed again with a running maximum.
    extreme = inside & ((total > 1e30) | (total < 1e-30))
    if tl.max(extreme.to(tl.int32), axis=0) > 0:
        reference, total, result = _forward_careful(
            query, keys_in, start, length, first_row, head, key_of_head, scale_log2,
            H, D, BM, BN, KEEP, PRECISION, WINDOW,
        )  # fmt: skip
    result = result * tl.where(inside, INVERSE_KEEP * reciprocal(total), 0.0)[:, None]
    rounded = result.to(out.dtype.element_ty)
    tl.store(_block(out, start, head, rows, H * D, D), rounded, mask=inside[:, None])
    if LIMIT > 0:  # from the rounded values, so that casting `out` again gives the same bits
        tl.store(peaks + tl.program_id(0), _peak(result).to(out.dtype.element_ty).to(tl.float32))
        _store(out, out8, widen(rounded), 1.0, factor, start, head, rows, H * D, inside[:, None], D, False, LIMIT)
    # Rows past the sequence get an infinite sum: the backward then computes zero weights there, without a mask.
    row_lse = tl.where(inside, reference + log2(total), float("inf"))
    tl.store(_of_rows(sums, pitch, head, tile, BM, CHUNK), row_lse)


@jit
def _query_step(
    query, dresult, keys, values, length, column, first_row, key_of_head, row_lse, row_delta, scale_log2, dquery,
    BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
    EDGE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the gradient of the queries."""
    columns = tl.arange(0, BN)[None, :]
    weights = exp2(tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_log2 - row_lse[:, None])
    if EDGE:  # the last keys belong to the next sequence
        weights = tl.where(column + columns < length, weights, 0.0)
    if WINDOW > 0:
        near = _is_near(first_row, tl.arange(0, BM)[:, None], column, columns, WINDOW)
        weights = tl.where(near, weights, 0.0)
    gradient = tl.dot(dresult, tl.trans(values), input_precision=PRECISION)
    if KEEP > 0:
        words = attention_words(key_of_head, first_row, tl.arange(0, BM)[:, None], column, columns)
        dscores = drop_gradient(weights, gradient, row_delta[:, None], words, columns, keys.dtype, KEEP, PAIRS)
    else:
        dscores = (weights * (gradient + row_delta[:, None])).to(keys.dtype)
    return tl.dot(_pinned(dscores), keys, dquery, input_precision=PRECISION)


@jit(do_not_specialize=["site"])
def _backward_query_kernel(
    qkv, keys_in, out, dout, sums, dqkv, dqkv8, scale, peaks, partials, tiles, seed, site, cosines, sines, pitch,
    scale_log2,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr,
    PAIRS: tl.constexpr, INVERSE_KEEP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr,
    CHUNK: tl.constexpr, FULL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries; also stores delta = -rowsum(dout * out) * (1 - p) for the other kernel."""
    head, tile, start, length, first_row, _first_tile = _tile(tiles, H)
    if partials is not None:
        partials += (tile * 2 * H + head) * D
    if length == 0:
        if partials is not None:
            tl.store(partials + tl.arange(0, D), tl.zeros([D], dtype=tl.float32))
        if LIMIT > 0:
            tl.store(peaks + tl.program_id(0), 0.0)
        return
    rows = first_row + tl.arange(0, BM)
    begin, end = 0, length
    if WINDOW > 0:
        begin, end = _within_reach(first_row, length, BM, BN, WINDOW)
    last = (end - 1) // BN * BN
    columns = last + tl.arange(0, BN)
    key_of_head = attention_key(load_stream_key(seed, site), start, head)
    factor = 1.0
    if LIMIT > 0:
        factor = tl.load(scale)
    of_rows = _of_rows(sums, pitch, head, tile, BM, CHUNK)
    row_lse = tl.load(of_rows)
    dresult = _load(dout, start, head, rows, H * D, length, D)
    result = _load(out, start, head, rows, H * D, length, D)
    query = _load(qkv, start, head, rows, 3 * H * D, length, D)
    keys = _load(qkv, start, H + head, columns, 3 * H * D, length, D)
    values = _load(qkv, start, 2 * H + head, columns, 3 * H * D, length, D)
    row_delta = tl.sum(result.to(tl.float32) * dresult.to(tl.float32), axis=1) / -INVERSE_KEEP
    tl.store(of_rows + CHUNK, row_delta)
    dquery = _query_step(
        query, dresult, keys, values, length, last, first_row, key_of_head, row_lse, row_delta, scale_log2,
        tl.zeros([BM, D], dtype=tl.float32), BM, BN, KEEP, PAIRS, PRECISION, True, WINDOW,
    )  # fmt: skip
    for column in tl.range(begin, last, BN, num_stages=STAGES):
        keys = keys_in.load([start + column, (H + head) * D])
        values = keys_in.load([start + column, (2 * H + head) * D])
        dquery = _query_step(
            query, dresult, keys, values, length, column, first_row, key_of_head, row_lse, row_delta, scale_log2,
            dquery, BM, BN, KEEP, PAIRS, PRECISION, False, WINDOW,
        )  # fmt: skip
    if cosines is not None:
        dquery = _rotated_back(dquery, rows, length, cosines, sines, D)
    unit = scale_log2 * (INVERSE_KEEP / KERNEL_LOG2_E)
    inside = (rows < length)[:, None]  # the other rows are zero
    if LIMIT > 0:
        tl.store(peaks + tl.program_id(0), _peak(dquery) * unit)
    _store(dqkv, dqkv8, dquery, unit, factor, start, head, rows, 3 * H * D, inside, D, FULL, LIMIT)
    if partials is not None:
        _store_column_sums(partials, dquery, unit, query.dtype, BM, D)


@jit(do_not_specialize=["site"])
def _backward_key_kernel(
    qkv, queries_in, dout_in, sums_in, dqkv, dqkv8, scale, peaks, partials, tiles, seed, site, cosines, sines,
    scale_log2,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr,
    PAIRS: tl.constexpr, INVERSE_KEEP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr,
    CHUNK: tl.constexpr, FULL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, in a loop over queries.

    Tiles are transposed (keys x queries), so that both products take them from registers. Queries past the sequence
    have zero weights (their log-sum is infinite); keys past it affect only rows that are not stored.
    """
    head, tile, start, length, first_column, first_tile = _tile(tiles, H)
    if partials is not None:
        partials += (tile * 2 * H + H + head) * D
    if length == 0:
        if partials is not None:
            tl.store(partials + tl.arange(0, D), tl.zeros([D], dtype=tl.float32))
        if LIMIT > 0:
            tl.store(peaks + tl.program_id(0), 0.0)
        return
    begin, end = 0, length
    if WINDOW > 0:
        begin, end = _within_reach(first_column, length, BN, BM, WINDOW)
    tl.assume(end > begin)  # a path around the loop would keep its products from overlapping
    columns = first_column + tl.arange(0, BN)
    key_of_head = attention_key(load_stream_key(seed, site), start, head)
    factor = 1.0
    if LIMIT > 0:
        factor = tl.load(scale)
    keys = _load(qkv, start, H + head, columns, 3 * H * D, length, D)
    values = _load(qkv, start, 2 * H + head, columns, 3 * H * D, length, D)
    dkeys = tl.zeros([BN, D], dtype=tl.float32)
    dvalues = tl.zeros([BN, D], dtype=tl.float32)
    for row in tl.range(begin, end, BM, num_stages=STAGES):
        query = queries_in.load([start + row, head * D])
        dresult = dout_in.load([start + row, head * D])
        chunks = tl.reshape(sums_in.load([head, (first_tile * BN + row) * 2]), [BM // CHUNK, 2, CHUNK])
        row_lse, row_delta = tl.split(tl.permute(chunks, [0, 2, 1]))
        row_lse, row_delta = tl.reshape(row_lse, [1, BM]), tl.reshape(row_delta, [1, BM])
        # Without the factors 1 / (1 - p) and scale, which are applied at the end.
        weights = exp2(tl.dot(keys, tl.trans(query), input_precision=PRECISION) * scale_log2 - row_lse)
        if WINDOW > 0:
            near = _is_near(first_column, tl.arange(0, BN)[:, None], row, tl.arange(0, BM)[None, :], WINDOW)
            weights = tl.where(near, weights, 0.0)
        gradient = tl.dot(values, tl.trans(dresult), input_precision=PRECISION)
        if KEEP > 0:
            own = tl.arange(0, BN)[:, None]
            words = attention_words(key_of_head, row, tl.arange(0, BM)[None, :], first_column, own)
            dropped, dscores = drop_both(weights, gradient, row_delta, words, own, query.dtype, KEEP, PAIRS)
        else:
            dropped, dscores = weights.to(query.dtype), (weights * (gradient + row_delta)).to(query.dtype)
        dvalues = tl.dot(_pinned(dropped), dresult, dvalues, input_precision=PRECISION)
        dkeys = tl.dot(_pinned(dscores), query, dkeys, input_precision=PRECISION)
    inside = (columns < length)[:, None]
    dkeys, dvalues = tl.where(inside, dkeys, 0.0), tl.where(inside, dvalues, 0.0)
    if cosines is not None:
        dkeys = _rotated_back(dkeys, columns, length, cosines, sines, D)
    unit = scale_log2 * (INVERSE_KEEP / KERNEL_LOG2_E)
    if LIMIT > 0:
        tl.store(peaks + tl.program_id(0), tl.maximum(_peak(dkeys) * unit, _peak(dvalues) * INVERSE_KEEP))
    _store(dqkv, dqkv8, dkeys, unit, factor, start, H + head, columns, 3 * H * D, inside, D, FULL, LIMIT)
    if partials is not None:
        _store_column_sums(partials, dvalues, INVERSE_KEEP, keys.dtype, BN, D)
    _store(dqkv, dqkv8, dvalues, INVERSE_KEEP, factor, start, 2 * H + head, columns, 3 * H * D, inside, D, FULL, LIMIT)


class _Config(NamedTuple):
    """Rows (queries) and columns (keys) of a step, warps, pipeline stages, and a limit of registers per thread."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


# Tuned on an H200 for heads of 64, see docs/notebook/speed.md: the register limits allow a fifth or sixth program per
# multiprocessor. Wider heads need the registers, as do GPUs whose tensor cores read their operands from registers
# (Ampere, Ada, RTX Blackwell): there a limit would spill. Only tests use float32.
CONFIGS = {
    "forward": _Config(64, 32, 4, 3, None),
    "query": _Config(64, 32, 4, 3, 96),
    "key": _Config(32, 64, 4, 3, 128),
}
CONFIGS_UNLIMITED = {name: config._replace(registers=None) for name, config in CONFIGS.items()}
# On those GPUs heads of 128 take twice the warps: with four, Triton 3.6 spills up to 1,400 bytes per thread.
CONFIGS_WIDE = {name: config._replace(warps=8) for name, config in CONFIGS_UNLIMITED.items()}
CONFIGS_FLOAT32 = {name: config._replace(stages=1) for name, config in CONFIGS_UNLIMITED.items()}


def _descriptor(tensor: Tensor, block_rows: int, block_columns: int) -> Any:
    """Describe blocks of a matrix to the copy engine; rows past its end read as zero."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor.flatten(1), [block_rows, block_columns])


def _launch(
    kernel: Any, config: _Config, arguments: tuple, qkv: Tensor, num_tiles: int, p: float, **extra: Any
) -> None:
    num_heads, head_dim = qkv.shape[2:]
    keep = attention_threshold(p)
    kernel[(num_tiles * num_heads,)](
        *arguments, LOG2_E / math.sqrt(head_dim), H=num_heads, D=head_dim, BM=config.rows, BN=config.columns,
        KEEP=keep, PAIRS=uses_pairs(qkv.dtype, keep), INVERSE_KEEP=1 / (1 - p), PRECISION="ieee",
        STAGES=config.stages, CHUNK=CHUNK, num_warps=config.warps, maxnreg=config.registers, **extra,
    )  # fmt: skip


def _config(qkv: Tensor, kernel: str) -> _Config:
    if qkv.dtype == torch.float32:
        return CONFIGS_FLOAT32[kernel]
    is_wide = qkv.shape[3] > 64
    if generation(qkv.device) in (9, 10):
        return (CONFIGS_UNLIMITED if is_wide else CONFIGS)[kernel]
    return (CONFIGS_WIDE if is_wide else CONFIGS_UNLIMITED)[kernel]


@on_cpu(cpu.plan_attention)
def plan_attention(cu_seqlens: Tensor, num_tokens: int) -> AttentionPlan:
    """List the tiles of a batch, longest sequences first. Shapes alone fix their number: the host does not wait."""
    num_sequences = cu_seqlens.numel() - 1
    capacity = num_tokens // TILE + num_sequences
    tiles = torch.empty(capacity, 4, dtype=torch.int32, device=cu_seqlens.device)
    block = 64
    grid = ((num_sequences + block - 1) // block,)
    _plan_kernel[grid](cu_seqlens, tiles, num_sequences, capacity, BLOCK=block, TILE=TILE)
    return AttentionPlan(cu_seqlens, tiles)


@on_cpu(cpu.ragged_attention_forward)
def ragged_attention_forward(
    qkv: Tensor, plan: AttentionPlan, dropout: Dropout, cast: Cast | None = None, *, window: int = 0
) -> tuple[Tensor, Tensor, Fp8Rows | None]:
    """Softmax attention within each sequence of a batch: out [T, H, D], the log-sums for the backward (with space for
    the deltas), and out in FP8 [T, H D] if `cast`.

    qkv is [T, 3, H, D], with D a power of two from 16 to 128.
    """
    tiles = _tiles(plan)
    num_tokens, _, num_heads, head_dim = qkv.shape
    config = _config(qkv, "forward")
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty(num_heads, tiles.shape[0] * TILE * 2, dtype=torch.float32, device=qkv.device)
    keys_in = _descriptor(qkv, config.columns, head_dim)
    out8 = empty_rows(out.flatten(1), cast, tiles.shape[0] * num_heads)
    limit, scale = limit_and_scale(cast, sums)
    arguments = (
        qkv, keys_in, out, out8.rows, scale, out8.peaks, sums, tiles, dropout.seed, dropout.site, sums.shape[1]
    )  # fmt: skip
    extra = {"LIMIT": limit, "WINDOW": window}
    _launch(_attention_forward_kernel, config, arguments, qkv, tiles.shape[0], dropout.p, **extra)
    return out, sums, None if cast is None else out8


@on_cpu(cpu.ragged_attention_backward)
def ragged_attention_backward(
    qkv: Tensor,
    out: Tensor,
    sums: Tensor,
    dout: Tensor,
    plan: AttentionPlan,
    dropout: Dropout,
    cast: Cast | None = None,
    *,
    full: bool = True,
    window: int = 0,
    rotary: Rotary | None = None,
) -> tuple[Tensor, Tensor | None, Fp8Rows | None]:
    """The gradient dqkv [T, 3, H, D], its partial sums [n, 2, H D] for the biases of queries and of values, and dqkv
    in FP8 [T, 3 H D]. dqkv comes in the dtype of qkv if `full`, and in FP8 if `cast`. With `rotary`, by which queries
    and keys were rotated, it is the gradient before the rotation, and there are no sums for biases.

    A bias of keys shifts all scores of a query by the same amount, which the softmax ignores: its gradient is zero. A
    sum over rows would be rounding error, which LAMB and Adam scale up to the size of a gradient.
    """
    tiles = _tiles(plan)
    num_heads, head_dim = qkv.shape[2:]
    dqkv = torch.empty_like(qkv) if full else qkv
    num_programs = tiles.shape[0] * num_heads
    dqkv8 = empty_rows(qkv.flatten(1), cast, 2 * num_programs)
    limit, scale = limit_and_scale(cast, sums)
    partials = None
    if rotary is None:
        partials = torch.empty(tiles.shape[0], 2, num_heads * head_dim, dtype=torch.float32, device=qkv.device)
    config = _config(qkv, "query")  # first: it stores the deltas
    keys_in = _descriptor(qkv, config.columns, head_dim)
    results = (dqkv, dqkv8.rows, scale, dqkv8.peaks)
    common = (partials, tiles, dropout.seed, dropout.site, *(rotary or (None, None)))
    extra = {"LIMIT": limit, "FULL": full, "WINDOW": window}
    arguments = (qkv, keys_in, out, dout, sums, *results, *common, sums.shape[1])
    _launch(_backward_query_kernel, config, arguments, qkv, tiles.shape[0], dropout.p, **extra)
    config = _config(qkv, "key")
    queries_in, dout_in = _descriptor(qkv, config.rows, head_dim), _descriptor(dout, config.rows, head_dim)
    sums_in = _descriptor(sums, 1, 2 * config.rows)
    results = (dqkv, dqkv8.rows, scale, dqkv8.peaks[num_programs:] if cast is not None else dqkv8.peaks)
    key_arguments = (qkv, queries_in, dout_in, sums_in, *results, *common)
    _launch(_backward_key_kernel, config, key_arguments, qkv, tiles.shape[0], dropout.p, **extra)
    return dqkv, partials, None if cast is None else dqkv8


def _tiles(plan: AttentionPlan) -> Tensor:
    assert plan.tiles is not None, "the plan was made for C kernels"
    return plan.tiles
