"""Overlapping windows over texts that are longer than the model reads at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertrain.data.formats.block import flat_ranges, offsets_of
from bertrain.data.formats.masking import Ints


class WindowRanges(NamedTuple):
    """Ranges of tokens, each of one text; the windows of a text are adjacent."""

    text: Ints  # index of each window's text
    first: Ints  # index of its first token in the text
    counts: Ints  # number of its tokens


def overlapping_stride(stride: int, max_seq_length: int) -> int:
    """`stride`, but at most half of a window: so that every token has context on both sides in some window."""
    return min(stride, max(1, max_seq_length // 2))


def cut_windows(lengths: Ints, max_counts: Ints, stride: Ints) -> WindowRanges:
    """Windows over texts of `lengths` tokens: at most `max_counts` tokens each, one every `stride`."""
    num_windows = 1 + np.maximum(0, -(-(lengths - max_counts) // stride))
    text = np.repeat(np.arange(len(num_windows)), num_windows)
    first = flat_ranges(np.zeros_like(num_windows), num_windows) * stride[text]
    return WindowRanges(text, first, np.minimum(max_counts[text], lengths[text] - first))


def has_most_context(windows: WindowRanges, lengths: Ints) -> np.ndarray:
    """Whether each token of the windows, one after another, is in the window that gives it the most context.

    That is the window with the most tokens on the shorter side; then the longest window; then the first.
    """
    window = np.repeat(np.arange(len(windows.counts)), windows.counts)
    left = flat_ranges(np.zeros_like(windows.counts), windows.counts)
    counts = windows.counts[window]
    score = np.minimum(left, counts - 1 - left) + 0.01 * counts
    # The same for the same token of a text in all its windows.
    token = offsets_of(lengths)[windows.text[window]] + windows.first[window] + left
    order = np.lexsort((-score, token))  # stable: of equal scores, the first window comes first
    is_best = np.zeros(len(token), bool)
    is_best[order[np.diff(token[order], prepend=-1) > 0]] = True
    return is_best
