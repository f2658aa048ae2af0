"""Words to numbers: BERT's WordPiece vocabulary and tokenizer (Hugging Face tokenizers)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.data.text import find_inputs
from bertrain.errors import UserError

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
        for special in SPECIAL_WORDS:
            if special not in words:
                raise UserError(f"{origin} has no {special} in it: a BERT vocabulary is one word per line")
        if len(set(words)) != len(words):
            repeated = next(word for word in words if words.count(word) > 1)
            raise UserError(f"{origin} lists the word {repeated!r} twice")
        return Vocabulary(words, lower_case)


class Tokenizer:
    """Sentences to WordPiece numbers, many at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pipeline = build_pipeline(vocabulary)

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """The word-piece numbers of each sentence, without [CLS] and [SEP]."""
        encoded = self._pipeline.encode_batch_fast(sentences, add_special_tokens=False)
        return [sentence.ids for sentence in encoded]


def build_pipeline(vocabulary: Vocabulary, *, for_models: bool = False) -> Any:
    """BERT's normaliser, splitter and WordPiece model as Hugging Face tokenizers has them.

    `for_models` adds what a model's user expects and training data must not have: special words are recognised in
    the text, [CLS] and [SEP] are put around it.
    """
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    numbers = {word: number for number, word in enumerate(vocabulary.words)}
    pipeline = Pipeline(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=200))
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=vocabulary.lower_case)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if for_models:
        pipeline.add_special_tokens(list(SPECIAL_WORDS))
        pipeline.post_processor = processors.BertProcessing(
            ("[SEP]", vocabulary.id_of("[SEP]")), ("[CLS]", vocabulary.id_of("[CLS]"))
        )
        pipeline.decoder = decoders.WordPiece(CONTINUATION)
    return pipeline


def train_vocabulary(
    inputs: Iterable[str | Path], out: str | Path, *, size: int = 30522, lower_case: bool = True
) -> Vocabulary:
    """Train a WordPiece vocabulary of `size` words on plain text and write it to `out`, one word per line."""
    from tokenizers import trainers

    if size < 100:
        raise UserError(f"--size is {size}; a vocabulary has at least 100 words")
    files = find_inputs(inputs)
    pipeline = build_pipeline(Vocabulary(SPECIAL_WORDS, lower_case))
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL_WORDS), continuing_subword_prefix=CONTINUATION, show_progress=False
    )
    pipeline.train([str(file) for file in files], trainer)
    numbers = pipeline.get_vocab()
    if len(numbers) < size:
        raise UserError(
            f"the text has only {len(numbers)} word pieces to offer; ask for a smaller --size or give more text"
        )
    vocabulary = Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__)), lower_case)
    vocabulary.save(Path(out))
    return vocabulary
