"""BERT's WordPiece vocabulary: the words in order of their id."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically

CONTINUATION = "##"
SPECIAL_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Vocabulary:
    """The words in order of their id, special ones included."""

    words: tuple[str, ...]
    lower_case: bool

    @property
    def hash(self) -> str:
        """SHA-256 of the words and `lower_case`: equal hashes tokenize alike."""
        text = "\n".join(self.words) + f"\nlower_case={self.lower_case}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of token ids on disk: the smaller of two, if it can hold all ids."""
        return np.dtype(np.uint16 if len(self.words) <= 1 << 16 else np.uint32)

    def id_of(self, word: str) -> int:
        return self.words.index(word)

    @property
    def continues_word(self) -> npt.NDArray[np.bool_]:
        """For each id, whether it is a piece that continues a word."""
        return np.array([word.startswith(CONTINUATION) for word in self.words])

    @property
    def num_unreachable(self) -> int:
        """The number of words with capitals or accents, which lower-cased text never has; [words] do not count."""
        return sum(not word.startswith("[") and word != _folded(word) for word in self.words) if self.lower_case else 0

    def save(self, path: Path) -> None:
        write_atomically(path, "\n".join(self.words) + "\n")

    @staticmethod
    def load(path: str | Path | None = None, *, lower_case: bool | None = True) -> Vocabulary:
        """Read a vocabulary file, one word per line; by default BERT's uncased one, which ships with bertrain.

        Where `lower_case` is None, a vocabulary in which any word has capitals or accents is cased.
        """
        if path is None:
            text = (resources.files("bertrain.data.text") / "vocab-uncased.txt").read_text(encoding="utf-8")
        else:
            try:
                text = Path(path).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
            except OSError:
                raise UserError("missing-vocabulary", f"no vocabulary file at {path}") from None
            except UnicodeDecodeError:
                raise UserError("bad-vocabulary", f"the vocabulary {path} is not UTF-8 text") from None
        words = [line.rstrip("\r") for line in text.rstrip("\n").split("\n")]
        return Vocabulary.of(words, path or "the vocabulary", lower_case=lower_case)

    @staticmethod
    def of(words: Sequence[str], origin: str | Path, *, lower_case: bool | None = True) -> Vocabulary:
        """A vocabulary of these words; refuses words that are none. Errors name `origin`."""
        for special in SPECIAL_WORDS:
            if special not in words:
                raise UserError("bad-vocabulary", f"{origin} lacks {special}: a BERT vocabulary has one word per line")
        if len(set(words)) != len(words):
            repeated = next(word for word, count in Counter(words).items() if count > 1)
            raise UserError("bad-vocabulary", f"{origin} lists the word {repeated!r} twice")
        vocabulary = Vocabulary(tuple(words), lower_case is not False)
        is_cased = lower_case is None and vocabulary.num_unreachable
        return replace(vocabulary, lower_case=False) if is_cased else vocabulary


def _folded(word: str) -> str:
    letters = unicodedata.normalize("NFD", word.lower())
    return "".join(letter for letter in letters if unicodedata.category(letter) != "Mn")
