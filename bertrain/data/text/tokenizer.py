"""Text to token ids: BERT's exact tokenizer, its near twin in Hugging Face tokenizers, and any other of that library.

`tokenizer_of` chooses by the vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from bertrain.data.text.vocabulary import CONTINUATION, SPECIAL_WORDS, Vocabulary

CLASSIFIED = (*range(0x40000), *range(0xE0000, 0xE1000))  # the other characters are unassigned or for private use
LONGEST_WORD = 200  # in characters; a longer word is [UNK]
CACHED_WORDS = 500_000  # about 100 MB; then the cache is cleared
ASCII_PARTS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]").findall  # of a word: runs of letters and digits, single signs
IDEOGRAPH = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
IS_IDEOGRAPH = re.compile(IDEOGRAPH).match
is_cleaned_though_printable = re.compile(f"{IDEOGRAPH[:-1]}\ufffd]").search
CHARACTERS_AT_ONCE = 5  # of a long text, for each token wanted: English has fewer


class Tokenizer:
    """Sentences to WordPiece ids, exactly as Google's BERT tokenizes, at the cost of one look-up per word.

    Each word between spaces of the cleaned text is tokenized once and cached. Character classes are those of the
    running Python's Unicode tables.
    """

    joint = ""
    """What stands before a sentence or word that others precede, so that it is tokenized as in running text."""
    separators = 1
    """How many [SEP] stand between the texts of a pair."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._numbers = {word: number for number, word in enumerate(vocabulary.words)}
        self._longest = max(map(len, self._numbers))
        self.dtype, self._lower_case = vocabulary.dtype, vocabulary.lower_case
        self._clean = _Table(_cleaned)
        self._split = _Table(_unaccented_and_split if self._lower_case else _split_at_punctuation)
        self._words, self._pieces = _Table(self._encode_word), _Table(self._encode_part)

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """The token ids of each sentence, without [CLS] and [SEP]."""
        return [np.frombuffer(self.encode_raw(sentence), self.dtype).tolist() for sentence in sentences]

    def encode_raw(self, sentence: str, enough: int | None = None) -> bytes:
        """The token ids of a sentence as the bytes of an array of `dtype`; the first `enough` of them at least."""
        if enough is None:
            return self._encode_words(sentence)
        encoded, start = b"", 0
        while start < len(sentence) and len(encoded) < enough * self.dtype.itemsize:
            stop = sentence.find(" ", start + enough * CHARACTERS_AT_ONCE)  # each word is tokenized by itself
            stop = len(sentence) if stop < 0 else stop
            encoded += self._encode_words(sentence[start:stop])
            start = stop
        return encoded

    def decode(self, number: int) -> str:
        """The word of an id; pieces keep their ##."""
        return self._vocabulary.words[number]

    def _encode_words(self, text: str) -> bytes:
        """The ids of all words of a text."""
        for table in (self._words, self._pieces):
            if len(table) > CACHED_WORDS:
                table.clear()
        text = text.replace("\n", " ")  # equal here, and the only common character that is not printable
        if not text.isprintable() or (not text.isascii() and is_cleaned_though_printable(text)):
            text = text.translate(self._clean)  # far slower than these looks at the text
        return b"".join(map(self._words.__getitem__, text.split()))

    def _encode_word(self, word: str) -> bytes:
        """The ids of a word between spaces: case folded, split at punctuation, looked up."""
        # str.lower looks at neighbors (a final sigma), so it must see the word before punctuation is split off.
        folded = word.lower() if self._lower_case else word
        if folded.isascii():
            parts = ASCII_PARTS(folded)  # faster, same result
        else:
            folded = unicodedata.normalize("NFD", folded) if self._lower_case else folded
            parts = folded.translate(self._split).split()
        return b"".join(map(self._pieces.__getitem__, parts))

    def _encode_part(self, word: str) -> bytes:
        """The ids of a word without punctuation: each time the longest piece that the vocabulary contains."""
        unknown = array(self.dtype.char, [self._numbers["[UNK]"]]).tobytes()
        if len(word) > LONGEST_WORD:
            return unknown
        found = array(self.dtype.char)
        rest, least = word, 0
        while len(rest) > least:
            for stop in range(min(len(rest), self._longest), least, -1):
                if (number := self._numbers.get(rest[:stop])) is not None:
                    break
            else:
                return unknown
            found.append(number)
            rest, least = CONTINUATION + rest[stop:], len(CONTINUATION)
        return found.tobytes()


class FileTokenizer:
    """Sentences to ids by a tokenizer.json. Special words in the text are tokenized as any other text."""

    joint = " "

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pipeline, self.dtype, self._vocabulary = build_pipeline(vocabulary), vocabulary.dtype, vocabulary
        text_of_token = self._pipeline.encode("a", "b").sequence_ids  # None for special words
        knows_both = {0, 1} <= set(text_of_token)  # one of Japanese alone may know neither letter
        self.separators = max(1, text_of_token[: text_of_token.index(1)][::-1].index(0)) if knows_both else 1

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """The token ids of each sentence, without [CLS] and [SEP]."""
        encodings = self._pipeline.encode_batch_fast(sentences, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_raw(self, sentence: str, enough: int | None = None) -> bytes:  # always all of them
        """The token ids of a sentence as the bytes of an array of `dtype`."""
        return np.array(self._pipeline.encode(sentence, add_special_tokens=False).ids, self.dtype).tobytes()

    def decode(self, number: int) -> str:
        """The text of an id, without the space before it."""
        word = self._vocabulary.words[number]
        shown = "" if word in self._vocabulary.special else self._pipeline.decode([number], skip_special_tokens=False)
        return shown.strip() or word


AnyTokenizer = Tokenizer | FileTokenizer


@lru_cache(maxsize=8)
def tokenizer_of(vocabulary: Vocabulary) -> AnyTokenizer:
    """The tokenizer of a vocabulary, the same each time, with the words it has seen."""
    return FileTokenizer(vocabulary) if vocabulary.tokenizer else Tokenizer(vocabulary)


class _Table(dict[Any, Any]):
    """A cache that calls `rule` once for each new key; for str.translate the keys are the codes of characters."""

    def __init__(self, rule: Callable[[Any], Any]) -> None:
        self._rule = rule

    def __missing__(self, key: Any) -> Any:
        self[key] = value = self._rule(key)
        return value


def _cleaned(code: int) -> int | str | None:
    """Drops control characters and U+FFFD and puts spaces around ideographs; str.split handles all kinds of space."""
    character = chr(code)
    if character in "\t\n\r":
        return code
    if code in (0, 0xFFFD) or unicodedata.category(character) in ("Cc", "Cf"):
        return None
    return f" {character} " if IS_IDEOGRAPH(character) else code


def _split_at_punctuation(code: int) -> int | str:
    """Puts spaces around punctuation and around ASCII signs that are no letters, digits or control characters."""
    character = chr(code)
    is_sign = "!" <= character <= "~" and not character.isalnum()
    return f" {character} " if is_sign or unicodedata.category(character)[0] == "P" else code


def _unaccented_and_split(code: int) -> int | str | None:
    """The same for decomposed text; also drops accents."""
    return None if unicodedata.category(chr(code)) == "Mn" else _split_at_punctuation(code)


def build_pipeline(vocabulary: Vocabulary, *, for_models: bool = False) -> Any:
    """BERT's normalizer, pre-tokenizer and WordPiece model of Hugging Face tokenizers, or the vocabulary's own.

    It trains vocabularies, and then differs from `Tokenizer` in rare characters (a final sigma, private use, some
    ideographs, newer signs). `for_models` is for export with weights: equal to `Tokenizer` on any text, but it also
    recognizes special words and adds [CLS] and [SEP], which a model's user expects and training data must not have.
    """
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    if vocabulary.tokenizer:
        pipeline = Pipeline.from_str(vocabulary.tokenizer)
        pipeline.no_truncation()
        pipeline.no_padding()
        pipeline.encode_special_tokens = not for_models
        return pipeline
    numbers = {word: number for number, word in enumerate(vocabulary.words)}
    pipeline = Pipeline(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    if not for_models:
        pipeline.normalizer = normalizers.BertNormalizer(lowercase=vocabulary.lower_case)
        pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return pipeline
    pipeline.normalizer, pipeline.pre_tokenizer = _exact_stages(vocabulary.lower_case)
    pipeline.add_special_tokens(list(SPECIAL_WORDS))
    pipeline.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary.id_of("[SEP]")), ("[CLS]", vocabulary.id_of("[CLS]"))
    )
    pipeline.decoder = decoders.WordPiece(CONTINUATION)
    return pipeline


def with_special_words(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary of a tokenizer.json for export with weights: it adds [CLS] and [SEP], as training does."""
    from tokenizers import processors

    pipeline = build_pipeline(vocabulary, for_models=True)
    start, end = vocabulary.special[2:4]
    ids = pipeline.encode("a").ids
    if ids[:1] == [vocabulary.id_of(start)] and ids[-1:] == [vocabulary.id_of(end)]:
        return vocabulary
    pipeline.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(word, vocabulary.id_of(word)) for word in (start, end)],
    )
    return replace(vocabulary, tokenizer=pipeline.to_str())


@cache
def _exact_stages(lower_case: bool) -> tuple[Any, Any]:
    """What `Tokenizer` does before it looks words up, with the running Python's Unicode tables written out."""
    from tokenizers import Regex, normalizers
    from tokenizers.pre_tokenizers import Sequence, Split

    space = Regex(_character_class(str.isspace, but="\x0b\x0c\x1c\x1d\x1e\x1f\x85"))
    split = Regex(_character_class(lambda character: _split_at_punctuation(ord(character)) != ord(character)))
    drop = Regex(_character_class(lambda character: _cleaned(ord(character)) is None))
    stages: list[Any] = [normalizers.Replace(drop, "")]
    if lower_case:
        cased, ignored = r"(?!\p{Case_Ignorable})\p{Cased}", r"\p{Case_Ignorable}*"
        stages.append(normalizers.Replace(Regex(rf"{cased}{ignored}\K\u03a3(?!{ignored}{cased})"), "\u03c2"))
        accents = Regex(_character_class(lambda character: unicodedata.category(character) == "Mn"))
        stages += [normalizers.Lowercase(), normalizers.NFD(), normalizers.Replace(accents, "")]
    isolated = (Split(Regex(IDEOGRAPH), "isolated"), Split(split, "isolated"))
    return normalizers.Sequence(stages), Sequence([Split(space, "removed"), *isolated])


def _character_class(holds: Callable[[str], bool], but: str = "") -> str:
    """The regular expression of the characters for which a rule holds."""
    codes = [code for code in CLASSIFIED if holds(chr(code)) and chr(code) not in but]
    firsts = [code for code, before in zip(codes, [-2, *codes], strict=False) if code != before + 1]
    lasts = [code for code, after in zip(codes, [*codes[1:], -2], strict=True) if code != after - 1]
    return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in zip(firsts, lasts, strict=True)) + "]"
