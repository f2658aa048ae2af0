"""Words to numbers: BERT's WordPiece vocabulary, its exact tokenizer, and the training of a new vocabulary."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.data.text.documents import find_inputs, read_documents

CONTINUATION = "##"
SPECIAL_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 200  # in characters; a longer one is [UNK]
CACHED_WORDS = 500_000  # about 100 MB; then the cache begins anew
ASCII_PARTS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]").findall  # of a word: letters and digits, and single signs
IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


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


class Tokenizer:
    """Sentences to WordPiece numbers, exactly as Google's BERT makes them, at the price of a look-up a word.

    Whatever stands between two spaces of the cleaned text is tokenized by itself, so it is tokenized once and kept.
    Character classes are those of the running Python's Unicode tables.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        numbers = {word: number for number, word in enumerate(vocabulary.words)}
        self.dtype = vocabulary.dtype
        self._clean = _CharacterTable(_cleaned)
        self._pieces = _Pieces(numbers, self.dtype)
        self._words = _Words(self._pieces, lower_case=vocabulary.lower_case)

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """The word-piece numbers of each sentence, without [CLS] and [SEP]."""
        return [np.frombuffer(self.encode_raw(sentence), self.dtype).tolist() for sentence in sentences]

    def encode_raw(self, sentence: str) -> bytes:
        """The word-piece numbers of a sentence as they lie in an array of `dtype`."""
        if not (sentence.isascii() and sentence.isprintable()):
            sentence = sentence.translate(self._clean)
        encoded = b"".join(map(self._words.__getitem__, sentence.split()))
        if len(self._words) > CACHED_WORDS:
            self._words.clear()
        if len(self._pieces) > CACHED_WORDS:
            self._pieces.clear()
        return encoded


class _CharacterTable(dict[int, int | str | None]):
    """A table for str.translate that asks `rule` about each character it meets for the first time."""

    def __init__(self, rule: Callable[[str], int | str | None]) -> None:
        self._rule = rule

    def __missing__(self, code: int) -> int | str | None:
        self[code] = value = self._rule(chr(code))
        return value


class _Words(dict[str, bytes]):
    """What stands between two spaces -> the numbers of its pieces: folded, split at punctuation, looked up."""

    def __init__(self, pieces: _Pieces, *, lower_case: bool) -> None:
        self._pieces, self._lower_case = pieces, lower_case
        self._split = _CharacterTable(_unaccented_and_split if lower_case else _split_at_punctuation)

    def __missing__(self, word: str) -> bytes:
        # str.lower looks at neighbours (a final sigma), so it must see the word before punctuation is split off.
        folded = word.lower() if self._lower_case else word
        if folded.isascii():
            parts = ASCII_PARTS(folded)  # the same as below, faster
        elif self._lower_case:
            parts = unicodedata.normalize("NFD", folded).translate(self._split).split()
        else:
            parts = folded.translate(self._split).split()
        self[word] = encoded = b"".join(map(self._pieces.__getitem__, parts))
        return encoded


class _Pieces(dict[str, bytes]):
    """A word without punctuation -> the numbers of its pieces: the longest in the vocabulary first, each time."""

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
    """Controls and U+FFFD fall away, ideographs stand alone; str.split sees to every kind of space."""
    code = ord(character)
    if character in "\t\n\r":
        return code
    if code in (0, 0xFFFD) or unicodedata.category(character) in ("Cc", "Cf"):
        return None
    return f" {character} " if any(first <= code <= last for first, last in IDEOGRAPHS) else code


def _split_at_punctuation(character: str) -> int | str | None:
    """Punctuation, and whatever else of ASCII is neither letter, digit nor control, stands alone."""
    is_sign = "!" <= character <= "~" and not character.isalnum()
    return f" {character} " if is_sign or unicodedata.category(character)[0] == "P" else ord(character)


def _unaccented_and_split(character: str) -> int | str | None:
    """The same for decomposed text, less the accents."""
    return None if unicodedata.category(character) == "Mn" else _split_at_punctuation(character)


def build_pipeline(vocabulary: Vocabulary, *, for_models: bool = False) -> Any:
    """BERT's normaliser, splitter and WordPiece model as Hugging Face tokenizers has them.

    It differs from `Tokenizer` in corners (a final sigma, private-use characters, some ideographs, newer signs); it
    trains vocabularies and goes with exported weights.

    `for_models` adds what a model's user expects and training data must not have: special words are recognized in
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
    if size < 100:
        raise UserError(f"--size is {size}; a vocabulary has at least 100 words")
    files, out = find_inputs(inputs), Path(out)
    if not out.parent.is_dir():
        raise UserError(
            f"there is no folder {out.parent} to write the vocabulary into; make it or choose another --out"
        )
    if out.exists() and any(out.samefile(file) for file in files):
        raise UserError(
            f"{out} is one of the texts to train on, and the vocabulary would take its place; choose another --out"
        )
    # The library numbers characters within words (##a) in the order of a hash table, which differs from process to
    # process, and joins the smaller numbers first where pairs are equally frequent. So they are numbered beforehand.
    characters = _train(_distinct_words(files), 0, [], lower_case).keys() - set(SPECIAL_WORDS)
    alphabet = sorted(characters, key=lambda piece: (len(piece), piece))
    counts: Counter[str] = Counter()
    numbers = _train(_sentences(files, counts), size, alphabet, lower_case)
    if len(numbers) < size:
        raise UserError(
            f"the text has only {len(numbers)} word pieces to offer; ask for a smaller --size or give more text"
        )
    vocabulary = Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__)), lower_case)
    try:
        vocabulary.save(out)
    except OSError as error:
        raise UserError(f"could not write {out}: {error.strerror or error}") from None
    if counts["lines_not_utf8"]:
        warn(f"{counts['lines_not_utf8']:,} line(s) held bytes that are not UTF-8; those bytes were left out")
    return vocabulary


def _train(sentences: Iterator[str], size: int, alphabet: list[str], lower_case: bool) -> dict[str, int]:
    """Number of each word of a new vocabulary: special words, `alphabet`, other characters, and joined ones."""
    from tokenizers import trainers

    pipeline = build_pipeline(Vocabulary(SPECIAL_WORDS, lower_case))
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL_WORDS, *alphabet],
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    pipeline.train_from_iterator(sentences, trainer)
    return dict(pipeline.get_vocab())


def _distinct_words(files: list[Path]) -> Iterator[str]:
    """What stands between two spaces, each but a few times; enough to see which characters there are, and where."""
    seen: set[str] = set()
    for sentence in _sentences(files, Counter()):
        new = set(sentence.split(" ")) - seen
        if new:
            seen |= new
            yield " ".join(new)
        if len(seen) > CACHED_WORDS:
            seen.clear()


def _sentences(files: list[Path], counts: Counter[str]) -> Iterator[str]:
    for document in read_documents(files, counts):
        yield from document
