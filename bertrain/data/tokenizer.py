"""Words to numbers: BERT's WordPiece vocabulary and tokenizer (Hugging Face tokenizers)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bertrain.errors import UserError

CONTINUATION = "##"


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

    def id_of(self, word: str) -> int:
        return self.words.index(word)

    @property
    def continues_word(self) -> npt.NDArray[np.bool_]:
        """For each number, whether it is a piece that continues the word before it."""
        return np.array([word.startswith(CONTINUATION) for word in self.words])

    def save(self, path: Path) -> None:
        path.write_text("\n".join(self.words) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path | None = None, *, lower_case: bool = True) -> Vocabulary:
        """Read a vocabulary file, one word per line; without a path, the uncased one that ships with bertrain."""
        if path is None:
            text = (resources.files("bertrain") / "data" / "vocab-uncased.txt").read_text(encoding="utf-8")
        else:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except OSError:
                raise UserError(f"no vocabulary file at {path}") from None
            except UnicodeDecodeError:
                raise UserError(f"the vocabulary {path} is not UTF-8 text") from None
        words = tuple(line.rstrip("\r") for line in text.rstrip("\n").split("\n"))
        origin = path or "the vocabulary"
        for special in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
            if special not in words:
                raise UserError(f"{origin} has no {special} in it: a BERT vocabulary is one word per line")
        if len(set(words)) != len(words):
            repeated = next(word for word in words if words.count(word) > 1)
            raise UserError(f"{origin} lists the word {repeated!r} twice")
        return Vocabulary(words, lower_case)


class Tokenizer:
    """Sentences to WordPiece numbers, many at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Tokenizer as Pipeline
        from tokenizers import models, normalizers, pre_tokenizers

        self._pipeline = Pipeline(
            models.WordPiece(
                {word: number for number, word in enumerate(vocabulary.words)},
                unk_token="[UNK]",
                max_input_chars_per_word=200,
            )
        )
        self._pipeline.normalizer = normalizers.BertNormalizer(lowercase=vocabulary.lower_case)
        self._pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """The word-piece numbers of each sentence, without [CLS] and [SEP]."""
        encoded = self._pipeline.encode_batch_fast(sentences, add_special_tokens=False)
        return [sentence.ids for sentence in encoded]
