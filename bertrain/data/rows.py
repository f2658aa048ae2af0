"""Rows as columns: flat arrays on their way from tokens to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bertrain.data.examples import Pair
from bertrain.data.masking import Ints

Tokens = npt.NDArray[Any]
Item = TypeVar("Item")

ROWS_AT_ONCE = 4096  # gathered together: the indices of their tokens take some 16 MB


@dataclass(frozen=True)
class Rows:
    """Many rows: the tokens of row i are tokens[offsets[i] : offsets[i + 1]].

    Where masks were drawn at preparation, `tokens` are masked, and the last three say what stood where.
    """

    tokens: Tokens
    offsets: Ints
    segment_b: npt.NDArray[np.uint32]
    is_random: npt.NDArray[np.bool_]
    mlm_positions: Tokens | None = None
    mlm_labels: Tokens | None = None
    mlm_offsets: Ints | None = None

    def __len__(self) -> int:
        return len(self.segment_b)

    def take(self, numbers: Ints) -> Rows:
        """The rows of these numbers, in their order."""
        tokens, offsets = take_ragged(self.tokens, self.offsets, numbers)
        taken = Rows(tokens, offsets, self.segment_b[numbers], self.is_random[numbers])
        if self.mlm_positions is None or self.mlm_labels is None or self.mlm_offsets is None:
            return taken
        positions, mlm_offsets = take_ragged(self.mlm_positions, self.mlm_offsets, numbers)
        labels, _ = take_ragged(self.mlm_labels, self.mlm_offsets, numbers)
        return replace(taken, mlm_positions=positions, mlm_labels=labels, mlm_offsets=mlm_offsets)


def rows_of_pairs(tokens: Tokens, pairs: Sequence[Pair], start: int, separator: int) -> Rows:
    """[CLS] A [SEP] B [SEP] of each pair, or [CLS] A [SEP] where there is no B."""
    table = np.array(pairs, dtype=np.int64).reshape(-1, 5)
    a_start, b_start = table[:, 0], table[:, 2]
    a_length, b_length = table[:, 1] - a_start, table[:, 3] - b_start
    lengths = a_length + 2 + np.where(b_length > 0, b_length + 1, 0)
    offsets = _offsets(lengths)
    out = np.full(offsets[-1], separator, dtype=tokens.dtype)
    out[offsets[:-1]] = start
    for first in range(0, len(table), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        begin = offsets[:-1][some]
        out[_ranges(begin + 1, a_length[some])] = tokens[_ranges(a_start[some], a_length[some])]
        out[_ranges(begin + a_length[some] + 2, b_length[some])] = tokens[_ranges(b_start[some], b_length[some])]
    return Rows(out, offsets, (a_length + 2).astype(np.uint32), table[:, 4].astype(np.bool_))


def in_batches(items: Iterable[Item], size: int | Sequence[int]) -> Iterator[list[Item]]:
    """Lists of `size` items each, or of each of several sizes in turn; the last may be shorter."""
    waiting = iter(items)
    for wanted in repeat(size) if isinstance(size, int) else size:
        if not (batch := list(islice(waiting, wanted))):
            return
        yield batch


def spool_rows(parts: Iterable[Rows], folder: Path) -> Rows:
    """Masked rows of many parts as one, their tokens in files of `folder` rather than in memory."""
    lengths: list[Ints] = []
    counts: list[Ints] = []
    segment_b: list[npt.NDArray[np.uint32]] = []
    is_random: list[npt.NDArray[np.bool_]] = []
    dtype = np.dtype(np.uint16)
    with ExitStack() as open_files:
        names = ("tokens", "mlm_positions", "mlm_labels")
        files = {name: open_files.enter_context(open(folder / name, "xb")) for name in names}
        for part in parts:
            dtype = part.tokens.dtype
            for name, file in files.items():
                file.write(getattr(part, name).data)
            lengths.append(np.diff(part.offsets))
            counts.append(np.diff(np.asarray(part.mlm_offsets)))
            segment_b.append(part.segment_b)
            is_random.append(part.is_random)
    return Rows(
        tokens=np.memmap(folder / "tokens", dtype, "r"),
        offsets=_offsets(np.concatenate(lengths)),
        segment_b=np.concatenate(segment_b),
        is_random=np.concatenate(is_random),
        mlm_positions=np.memmap(folder / "mlm_positions", dtype, "r"),
        mlm_labels=np.memmap(folder / "mlm_labels", dtype, "r"),
        mlm_offsets=_offsets(np.concatenate(counts)),
    )


def take_ragged(values: Tokens, offsets: Ints, numbers: Ints) -> tuple[Tokens, Ints]:
    """values[offsets[n] : offsets[n + 1]] of each of `numbers`, one after another, and their offsets."""
    new_offsets = _offsets(offsets[numbers + 1] - offsets[numbers])
    out = np.empty(new_offsets[-1], values.dtype)
    for first in range(0, len(numbers), ROWS_AT_ONCE):
        some = numbers[first : first + ROWS_AT_ONCE]
        stop = new_offsets[first + len(some)]
        out[new_offsets[first] : stop] = values[_ranges(offsets[some], offsets[some + 1] - offsets[some])]
    return out, new_offsets


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """starts[i], starts[i] + 1, ... starts[i] + lengths[i] - 1 for each i, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)
