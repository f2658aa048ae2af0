"""Text to WordPiece ids: BERT's exact tokenizer, and its near twin in Hugging Face tokenizers."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from bertrain.data.text.vocabulary import CONTINUATION, SPECIAL_WORDS, Vocabulary

LONGEST_WORD = 200  # in characters; a longer word is [UNK]
CACHED_WORDS = 500_000  # about 100 MB; then the cache is cleared
ASCII_PARTS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]").findall  # of a word: runs of letters and digits, single signs
IS_IDEOGRAPH = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
).match


class Tokenizer:
    """Sentences to WordPiece ids, exactly as Google's BERT tokenizes, at the cost of one look-up per word.

    Each word between spaces of the cleaned text is tokenized once and cached. Character classes are those of the
    running Python's Unicode tables.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        numbers = {word: number for number, word in enumerate(vocabulary.words)}
        self.dtype = vocabulary.dtype
        self._clean = _CharacterTable(_cleaned)
        self._pieces = _Pieces(numbers, self.dtype)
        self._words = _Words(self._pieces, lower_case=vocabulary.lower_case)

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """The token ids of each sentence, without [CLS] and [SEP]."""
        return [np.frombuffer(self.encode_raw(sentence), self.dtype).tolist() for sentence in sentences]

    def encode_raw(self, sentence: str) -> bytes:
        """The token ids of a sentence as the bytes of an array of `dtype`."""
        if not (sentence.isascii() and sentence.isprintable()):
            sentence = sentence.translate(self._clean)
        encoded = b"".join(map(self._words.__getitem__, sentence.split()))
        if len(self._words) > CACHED_WORDS:
            self._words.clear()
        if len(self._pieces) > CACHED_WORDS:
            self._pieces.clear()
        return encoded


class _CharacterTable(dict[int, int | str | None]):
    """A table for str.translate that calls `rule` once for each new character."""

    def __init__(self, rule: Callable[[str], int | str | None]) -> None:
        self._rule = rule

    def __missing__(self, code: int) -> int | str | None:
        self[code] = value = self._rule(chr(code))
        return value


class _Words(dict[str, bytes]):
    """A word between spaces -> the ids of its pieces: case folded, split at punctuation, looked up."""

    def __init__(self, pieces: _Pieces, *, lower_case: bool) -> None:
        self._pieces, self._lower_case = pieces, lower_case
        self._split = _CharacterTable(_unaccented_and_split if lower_case else _split_at_punctuation)

    def __missing__(self, word: str) -> bytes:
        # str.lower looks at neighbours (a final sigma), so it must see the word before punctuation is split off.
        folded = word.lower() if self._lower_case else word
        if folded.isascii():
            parts = ASCII_PARTS(folded)  # faster, same result
        elif self._lower_case:
            parts = unicodedata.normalize("NFD", folded).translate(self._split).split()
        else:
            parts = folded.translate(self._split).split()
        self[word] = encoded = b"".join(map(self._pieces.__getitem__, parts))
        return encoded


class _Pieces(dict[str, bytes]):
    """A word without punctuation -> the ids of its pieces: each time the longest that the vocabulary contains."""

    def __init__(self, numbers: dict[str, int], dtype: np.dtype[Any]) -> None:
        self._numbers, self._typecode = numbers, dtype.char
        self._longest = max(map(len, numbers))

    def __missing__(self, word: str) -> bytes:
        self[word] = encoded = array(self._typecode, self._greedy(word)).tobytes()
        return encoded

    def _greedy(self, word: str) -> list[int]:
        numbers, unknown = self._numbers, [self._numbers["[UNK]"]]
        if len(word) > LONGEST_WORD:
            return unknown
        found: list[int] = []
        rest, least = word, 0
        while len(rest) > least:
            for stop in range(min(len(rest), self._longest), least, -1):
                if (number := numbers.get(rest[:stop])) is not None:
                    break
            else:
                return unknown
            found.append(number)
            rest, least = CONTINUATION + rest[stop:], len(CONTINUATION)
        return found


def _cleaned(character: str) -> int | str | None:
    """Drops control characters and U+FFFD and puts spaces around ideographs; str.split handles all kinds of space."""
    code = ord(character)
    if character in "\t\n\r":
        return code
    if code in (0, 0xFFFD) or unicodedata.category(character) in ("Cc", "Cf"):
        return None
    return f" {character} " if IS_IDEOGRAPH(character) else code


def _split_at_punctuation(character: str) -> int | str | None:
    """Puts spaces around punctuation and around ASCII signs that are no letters, digits or control characters."""
    is_sign = "!" <= character <= "~" and not character.isalnum()
    return f" {character} " if is_sign or unicodedata.category(character)[0] == "P" else ord(character)


def _unaccented_and_split(character: str) -> int | str | None:
    """The same for decomposed text; also drops accents."""
    return None if unicodedata.category(character) == "Mn" else _split_at_punctuation(character)


def build_pipeline(vocabulary: Vocabulary, *, for_models: bool = False) -> Any:
    """BERT's normalizer, pre-tokenizer and WordPiece model of Hugging Face tokenizers.

    It differs from `Tokenizer` in rare characters (a final sigma, private use, some ideographs, newer signs). It trains
    vocabularies and is exported with weights. `for_models` also recognizes special words in the text and adds [CLS]
    and [SEP], which a model's user expects and training data must not have.
    """
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    numbers = {word: number for number, word in enumerate(vocabulary.words)}
    pipeline = Pipeline(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=vocabulary.lower_case)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if for_models:
        pipeline.add_special_tokens(list(SPECIAL_WORDS))
        pipeline.post_processor = processors.BertProcessing(
            ("[SEP]", vocabulary.id_of("[SEP]")), ("[CLS]", vocabulary.id_of("[CLS]"))
        )
        pipeline.decoder = decoders.WordPiece(CONTINUATION)
    return pipeline
