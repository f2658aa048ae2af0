"""DataSource, the interface of every data set, and `open_data`, which opens a data set of any layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bertrain.base.console import remark
from bertrain.base.errors import UserError
from bertrain.data.formats.block import Block, Values
from bertrain.data.formats.masking import Ints
from bertrain.data.text.vocabulary import TOKENIZER, Vocabulary


class DataSource:
    """A data set open for reading: the sizes of all rows are in memory, the rows themselves may be on disk.

    Every rank has the lengths and the predictions, so each computes the loss denominators of a step by itself.
    """

    folder: Path
    layout: str
    vocabulary: Vocabulary
    num_files: int
    fingerprint: str  # equal fingerprints mean equal rows and equal vocabularies
    max_seq_length: int  # the maximum length the data was prepared for, or has
    max_predictions: int  # the maximum predictions per row, likewise; 0 where masks are drawn at load time
    lengths: npt.NDArray[np.int32]
    predictions: npt.NDArray[np.int32] | None  # of each row where masks are static; None if drawn at load time
    texts_per_example: int = 1  # consecutive rows that are one example; a step takes whole examples
    _is_random: Values

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        return len(self) // self.texts_per_example

    @property
    def example_lengths(self) -> npt.NDArray[np.int32]:
        """The tokens of each example, all its texts together."""
        return self.lengths if self.texts_per_example == 1 else self.lengths.reshape(-1, self.texts_per_example).sum(1)

    def read(self, rows: Ints) -> Block:
        """The examples of `rows`, in that order."""
        raise NotImplementedError

    def is_random(self, rows: Ints) -> Ints:
        """Next-sentence label of each of `rows`: 1 where B was drawn at random, as in BERT's reference."""
        return self._is_random[rows].astype(np.int64)


def open_data(
    folder: str | Path, *, vocab: str | Path | Vocabulary | None = None, verify: str = "hash", quiet: bool = False
) -> DataSource:
    """Open a data folder of any layout, or one HDF5 or TFRecord file; the layout is detected.

    Prepared folders contain their vocabulary. For others it is `vocab` (a file or a Vocabulary), else the `vocab.txt`
    in the folder, else the uncased vocabulary that ships with bertrain. `verify` checks each file's "hash" or only its
    "size". Notes on what was detected go to standard error, unless `quiet`: ranks other than the first are quiet.
    """
    from bertrain.data.formats.foreign import ForeignData
    from bertrain.data.formats.index import open_index
    from bertrain.data.formats.shards import MANIFEST, VOCABULARY, Shards

    folder = Path(folder)
    note = (lambda line: None) if quiet else print_once
    if not folder.exists():
        raise UserError("missing-data", f"no data folder at {folder}; make one with `bertrain data prepare`")
    if (folder / MANIFEST).is_file():
        shards = Shards.open(folder, verify=verify)
        if isinstance(vocab, str | Path) and vocab and Vocabulary.load(vocab).words != shards.vocabulary.words:
            cure = "leave --vocab (pretrain: --data.vocab) out"
            raise UserError("other-vocabulary", f"{folder} has its own vocabulary, which differs from {vocab}; {cure}")
        return shards
    index = open_index(folder, verify=verify, note=note)
    if not isinstance(vocab, Vocabulary):
        beside = (folder if folder.is_dir() else folder.parent) / VOCABULARY
        path = vocab or (beside if beside.is_file() or beside.with_name(TOKENIZER).is_file() else None)
        if path is None:
            option = "--vocab FILE (pretrain: --data.vocab)"
            note(f"{folder} contains no {VOCABULARY}: using BERT's uncased vocabulary; {option} selects another")
        vocab = Vocabulary.load(path, lower_case=None)
    return ForeignData(folder, index, vocab)


print_once = cache(remark)
"""Prints a line to standard error, unless this process has printed it before."""
