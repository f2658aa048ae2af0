"""Where examples come from: what the trainer needs of a data set, and the one door to every layout."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.machine import is_first_rank
from bertrain.data.formats.block import Block
from bertrain.data.formats.masking import Ints
from bertrain.data.formats.shards import MANIFEST, Shards
from bertrain.data.text.tokenizer import Vocabulary


class DataSource(Protocol):
    """A data set open for reading: the sizes of all its rows at hand, the rows themselves on disk.

    Lengths and predictions are an index that every rank has, so each knows the denominators of a step unasked.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def layout(self) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def fingerprint(self) -> str:
        """The identity of the data: two equal ones hold the same rows of the same words."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]: ...

    @property
    def predictions(self) -> npt.NDArray[np.int32] | None:
        """Predictions of each row where masks are static; None where they are drawn at load."""

    @property
    def max_seq_length(self) -> int:
        """Width of the rows the data was made for: no example is longer."""

    @property
    def max_predictions(self) -> int:
        """The most predictions the rows were made for; 0 where masks are drawn at load."""

    @property
    def num_files(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, rows: Ints) -> Block:
        """The examples of `rows`, in that order."""

    def is_random(self, rows: Ints) -> Ints:
        """Next-sentence label of each of `rows`."""


def open_data(folder: str | Path, *, vocab: str | Path | Vocabulary | None = None, verify: str = "hash") -> DataSource:
    """Open a data folder of any layout (or one file of other people's); finds out which, and says so.

    Prepared folders have their vocabulary with them. For others it is `vocab` (a file, or the words themselves), else
    a `vocab.txt` that lies there, else the uncased one that ships with bertrain. `verify` checks each file's "hash"
    or only its "size".
    """
    folder = Path(folder)
    given = vocab if isinstance(vocab, Vocabulary) else None
    if not folder.exists():
        raise UserError(f"no data folder at {folder}; make one with `bertrain data prepare INPUT --out {folder}`")
    if (folder / MANIFEST).is_file():
        shards = Shards.open(folder, verify=verify)
        if vocab and given is None and Vocabulary.load(str(vocab)).words != shards.vocabulary.words:
            raise UserError(
                f"{folder} was prepared with its own vocabulary, which is not {vocab}; leave --vocab out "
                "(pretrain: --data.vocab)"
            )
        return shards
    from bertrain.data.formats import foreign
    from bertrain.data.formats.index import open_index

    index = open_index(folder, verify=verify, say=say_once)
    if given is None and vocab:
        given = foreign.load_vocabulary(str(vocab))
    if given is None:
        given = foreign.vocabulary_beside(folder)
    if given is None:
        given = foreign.load_vocabulary(None)
        say_once(
            f"{folder} names no vocabulary: taking BERT's uncased one; --vocab FILE (pretrain: --data.vocab) names "
            "another"
        )
    return foreign.ForeignData(folder, index, given)


@cache
def say_once(line: str) -> None:
    """A line about what was found or chosen, beside the output; said by the first rank only."""
    if is_first_rank():
        print(line, file=sys.stderr, flush=True)
