"""BERT's WordPiece vocabulary: the words in order of their id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
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
    """The words in order of their number, the special ones among them, and a hash of it all."""

    words: tuple[str, ...]
    lower_case: bool

    @property
    def hash(self) -> str:
        """SHA-256 of the words and of the case rule: two equal hashes tokenize alike."""
        text = "\n".join(self.words) + f"\nlower_case={self.lower_case}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smaller of the two types that words have on disk, if it holds them all."""
        return np.dtype(np.uint16 if len(self.words) <= 1 << 16 else np.uint32)

    def id_of(self, word: str) -> int:
        return self.words.index(word)

    @property
    def continues_word(self) -> npt.NDArray[np.bool_]:
        """For each number, whether it is a piece that continues the word before it."""
        return np.array([word.startswith(CONTINUATION) for word in self.words])

    @property
    def num_unreachable(self) -> int:
        """Words with capitals, where text is put into lower case; words in brackets stand for themselves."""
        return sum(word != word.lower() and not word.startswith("[") for word in self.words) if self.lower_case else 0

    def save(self, path: Path) -> None:
        write_atomically(path, "\n".join(self.words) + "\n")

    @staticmethod
    def load(path: str | Path | None = None, *, lower_case: bool = True) -> Vocabulary:
        """Read a vocabulary file, one word per line; without a path, the uncased one that ships with bertrain."""
        if path is None:
            text = (resources.files("bertrain.data.text") / "vocab-uncased.txt").read_text(encoding="utf-8")
        else:
            try:
                text = Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark at the beginning
            except OSError:
                raise UserError(f"no vocabulary file at {path}") from None
            except UnicodeDecodeError:
                raise UserError(f"the vocabulary {path} is not UTF-8 text") from None
        words = [line.rstrip("\r") for line in text.rstrip("\n").split("\n")]
        return Vocabulary.of(words, path or "the vocabulary", lower_case=lower_case)

    @staticmethod
    def of(words: Sequence[str], origin: str | Path, *, lower_case: bool = True) -> Vocabulary:
        """A vocabulary of these words, if they are one."""
        for special in SPECIAL_WORDS:
            if special not in words:
                raise UserError(f"{origin} has no {special} in it: a BERT vocabulary is one word per line")
        if len(set(words)) != len(words):
            repeated = next(word for word in words if words.count(word) > 1)
            raise UserError(f"{origin} lists the word {repeated!r} twice")
        return Vocabulary(tuple(words), lower_case)
