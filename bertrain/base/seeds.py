"""One master seed, everything else derived: stateless random numbers.

Each random choice of a run (the order of examples, masks, dropout, initial weights) is a pure function of
the master seed and of its purpose: (seed, epoch, row), (seed, step, bin) or (seed, name). No generator
state exists, so none is saved, and neither ranks, workers nor restarts can change a draw.

The mixer is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection on 64-bit words that
passes the usual statistical batteries, applied to arrays at a few nanoseconds a number.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """SplitMix64's finalizer, element by element; wraps modulo 2**64. The argument is not changed."""
    words = words + _GOLDEN
    words ^= words >> np.uint64(30)
    words *= _MULTIPLY_1
    words ^= words >> np.uint64(27)
    words *= _MULTIPLY_2
    words ^= words >> np.uint64(31)
    return words


def combine(key: int, values: npt.ArrayLike) -> Words:
    """One random word for each of `values` under `key`: the same value gives the same word."""
    return mix(mix(np.asarray(values).astype(np.uint64)) ^ np.uint64(key))


def derive(*parts: int | str) -> int:
    """A 63-bit seed from a path such as (seed, "dropout", step, bin). Equal paths give equal seeds."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def permute(positions: npt.ArrayLike, size: int, key: int) -> npt.NDArray[np.int64]:
    """The images of `positions` under a random permutation of range(size) that `key` selects.

    A Feistel network of four rounds permutes the next power of four at or above `size`; values that
    land outside are permuted again until they land inside (cycle walking, under four rounds on average). So a
    slice of a permutation of 157 million rows costs only its own length, in time and in memory.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    low_mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    words = np.array(positions, dtype=np.uint64)
    outside = np.ones(words.shape, dtype=bool)
    while outside.any():
        left, right = words[outside] >> shift, words[outside] & low_mask
        for round_number in range(4):
            left, right = right, left ^ (combine(derive(key, round_number), right) & low_mask)
        words[outside] = (left << shift) | right
        outside = words >= np.uint64(size)
    return words.astype(np.int64)
