"""The vocabulary: the words in order of their id. BERT's WordPiece, or that of any tokenizer.json.

A file of one word per line is BERT's, and tokenizer.py splits text with it exactly as Google's code does. Another
tokenizer.json, such as the byte-level BPE of ModernBERT and RoBERTa, is kept whole, for the library `tokenizers`.
"""

from __future__ import annotations

import hashlib
import json
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
from bertrain.base.files import read_json, read_text, write_atomically
from bertrain.base.schema import Count

CONTINUATION = "##"
SPECIAL_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
"""The names of the special words in a tokenizer_config.json."""
OTHER_SPECIAL_WORDS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")  # RoBERTa's
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BPE_WORDS, BPE_MERGES = "vocab.json", "merges.txt"  # of older folders, in place of a tokenizer.json
SPACES = "\u0120\u010a\u0109\u2581"  # a space, a line's end and a tab as byte-level BPE writes them; SentencePiece's


@dataclass(frozen=True)
class Vocabulary:
    """The words in order of their id, special ones included."""

    words: tuple[str, ...]
    lower_case: bool
    tokenizer: str = ""
    """The content of a tokenizer.json; empty: BERT's WordPiece."""
    special: tuple[str, ...] = SPECIAL_WORDS
    """What it has for [PAD], [UNK], [CLS], [SEP] and [MASK]."""

    @property
    def hash(self) -> str:
        """SHA-256 of all that tokenization depends on: equal hashes tokenize alike."""
        text = "\n".join(self.words) + f"\nlower_case={self.lower_case}"
        if self.tokenizer:
            content = json.loads(self.tokenizer)
            rules = {name: content.get(name) for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
            text = json.dumps([rules, self.special], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of token ids on disk: the smaller of two, if it can hold all ids."""
        return np.dtype(np.uint16 if len(self.words) <= 1 << 16 else np.uint32)

    def id_of(self, word: str) -> int:
        """The id of a word, or of what this vocabulary has for a special word of BERT's."""
        return self.words.index(self.special[SPECIAL_WORDS.index(word)] if word in SPECIAL_WORDS else word)

    @property
    def continues_word(self) -> npt.NDArray[np.bool_]:
        """For each id, whether it is a piece that continues a word."""
        if not self.tokenizer or any(word.startswith(CONTINUATION) and len(word) > 2 for word in self.words):
            return np.array([word.startswith(CONTINUATION) for word in self.words])
        # Elsewhere the beginning of a word is marked, by a space before it. Punctuation is a word of its own.
        added = {token["content"] for token in json.loads(self.tokenizer).get("added_tokens", ())}
        return np.array([
            word not in added and word[:1] not in SPACES and (word[0].isalnum() or not word[0].isascii())
            for word in self.words
        ])  # fmt: skip

    @property
    def num_unreachable(self) -> int:
        """The number of words with capitals or accents, which lower-cased text never has; [words] do not count."""
        if self.tokenizer or not self.lower_case:
            return 0
        return sum(not word.startswith("[") and word != _folded(word) for word in self.words)

    def save(self, path: Path) -> None:
        """Write the words to the file `path`, or another tokenizer's files beside where it would be."""
        if self.tokenizer:
            write_atomically(path.with_name(TOKENIZER), self.tokenizer)
            config = json.dumps(dict(zip(ROLES, self.special, strict=True)), indent=2)
            write_atomically(path.with_name(TOKENIZER_CONFIG), config + "\n")
        else:
            write_atomically(path, "\n".join(self.words) + "\n")

    @staticmethod
    def load(path: str | Path | None = None, *, lower_case: bool | None = True) -> Vocabulary:
        """Read a vocabulary file, one word per line; by default BERT's uncased one, which ships with bertrain.

        A file NAME.json, or the tokenizer.json beside a missing `path`, is a tokenizer's; `lower_case` is for one that
        does not say. Where `lower_case` is None, a vocabulary in which any word has capitals or accents is cased.
        """
        if path is not None and (found := _tokenizer_file(Path(path))):
            return Vocabulary.of_tokenizer(found, lower_case=lower_case)
        if path is None:
            text = (resources.files("bertrain.data.text") / "vocab-uncased.txt").read_text(encoding="utf-8")
        else:
            try:
                text = Path(path).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
            except OSError:
                raise UserError("missing-vocabulary", f"there is no vocabulary file {path}; check the path") from None
            except UnicodeDecodeError:
                raise UserError("bad-vocabulary", f"the vocabulary {path} is not UTF-8 text") from None
        words = [line.rstrip("\r") for line in text.rstrip("\n").split("\n")]
        return Vocabulary.of(words, path or "the vocabulary", lower_case=lower_case)

    @staticmethod
    def of_tokenizer(path: Path, *, lower_case: bool | None = None) -> Vocabulary:
        """The vocabulary of a tokenizer.json; with BERT's rules it is the same as that of a vocab.txt."""
        if not path.is_file():
            raise UserError("missing-vocabulary", f"there is no vocabulary file {path}; check the path")
        beside = path.with_name(TOKENIZER_CONFIG)
        named = read_json(beside, {}) if beside.is_file() else {}
        text = _join_bpe(path) if path.name == BPE_WORDS else read_text(path)
        content = json.loads(text) if path.name == BPE_WORDS else read_json(path, {})
        words = _tokenizer_words(content, path)
        is_word_piece = content["model"].get("type") == "WordPiece" and set(SPECIAL_WORDS) <= set(words)
        if is_word_piece and (rules := _bert_rules(content, named)) is not None:
            lowers = rules.get("lowercase", lower_case)
            return Vocabulary.of(words, path, lower_case=lowers if lowers is None else bool(lowers))
        _check_tokenizer(text, path)
        normalizer = content.get("normalizer")
        lowers = isinstance(normalizer, dict) and "lowercase" in json.dumps(normalizer).lower()
        return Vocabulary(tuple(words), lowers, text, _special_words(words, named, path))

    @staticmethod
    def of(words: Sequence[str], origin: str | Path, *, lower_case: bool | None = True) -> Vocabulary:
        """A vocabulary of these words; refuses words that are none. Errors name `origin`."""
        for special in SPECIAL_WORDS:
            if special not in words:
                raise UserError(
                    "bad-vocabulary", f"{origin} lacks {special}; a BERT vocabulary has it, and one word per line"
                )
        if len(set(words)) != len(words):
            repeated = next(word for word, count in Counter(words).items() if count > 1)
            raise UserError("bad-vocabulary", f"{origin} lists the word {repeated!r} twice")
        vocabulary = Vocabulary(tuple(words), lower_case is not False)
        is_cased = lower_case is None and vocabulary.num_unreachable
        return replace(vocabulary, lower_case=False) if is_cased else vocabulary


def _tokenizer_file(path: Path) -> Path | None:
    """The tokenizer.json that a path means; None for a file of words."""
    if path.suffix == ".json":
        return path
    beside = path.with_name(TOKENIZER)
    return beside if path.name == "vocab.txt" and not path.is_file() and beside.is_file() else None


def _tokenizer_words(content: Any, path: Path) -> list[str]:
    """The words of a tokenizer.json, the added ones included, in order of their id."""
    model = content.get("model") if isinstance(content, dict) else None
    numbers = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(numbers, list):  # SentencePiece's: words and their scores
        numbers = {str(entry[0]): number for number, entry in enumerate(numbers)}
    added = content.get("added_tokens") or [] if isinstance(numbers, dict) else []
    if isinstance(numbers, dict) and isinstance(added, list) and all(isinstance(token, dict) for token in added):
        numbers = numbers | {str(token.get("content")): token.get("id") for token in added}
        if sorted(map(str, numbers.values())) == sorted(map(str, range(len(numbers)))):
            return sorted(numbers, key=lambda word: int(numbers[word]))
    raise UserError("bad-vocabulary", f"{path} has no vocabulary with ids 0, 1, 2 and so on")


def _join_bpe(path: Path) -> str:
    """The tokenizer.json of RoBERTa's vocab.json and the merges.txt beside it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    merges = path.with_name(BPE_MERGES)
    numbers = read_json(path, dict[str, Count])
    if missing := [word for word in OTHER_SPECIAL_WORDS if word not in numbers]:
        raise UserError("bad-vocabulary", f"{path} lacks {', '.join(missing)}, which a RoBERTa vocabulary has")
    if not merges.is_file():
        raise UserError("missing-vocabulary", f"there is no {merges}, which {path.name} needs beside it")
    try:
        pipeline = Tokenizer(models.BPE.from_file(str(path), str(merges)))
    except Exception as error:  # the library has no other class
        raise UserError(
            "bad-vocabulary", f"{path} and {merges.name} are not a BPE tokenizer: {str(error)[:200]}"
        ) from None
    pipeline.pre_tokenizer, pipeline.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    start, end = (("<s>", numbers["<s>"]), ("</s>", numbers["</s>"]))
    pipeline.post_processor = processors.RobertaProcessing(end, start, add_prefix_space=False)
    pipeline.add_special_tokens([AddedToken(word, lstrip=word == "<mask>") for word in OTHER_SPECIAL_WORDS])
    text: str = pipeline.to_str()
    return text


def _bert_rules(content: dict[str, Any], named: dict[str, Any]) -> dict[str, Any] | None:
    """The rules of a tokenizer that splits text as BERT's does; None for another."""
    normalizer = content.get("normalizer")
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        strips, lowers = normalizer.get("strip_accents"), normalizer.get("lowercase")
        is_usual = normalizer.get("handle_chinese_chars") is not False and strips in (None, lowers)
        return {"lowercase": lowers} if is_usual else None
    lowers = named.get("do_lower_case")
    if normalizer is None:
        return {} if lowers is None else {"lowercase": lowers}
    # Ours writes BERT's rules out for the library, and says in its config what they are.
    from bertrain.data.text.tokenizer import build_pipeline

    ours = json.loads(build_pipeline(Vocabulary(SPECIAL_WORDS, bool(lowers)), for_models=True).to_str())
    is_ours = all(content.get(stage) == ours[stage] for stage in ("normalizer", "pre_tokenizer"))
    return {"lowercase": lowers} if is_ours and lowers is not None else None


def _special_words(words: Sequence[str], named: dict[str, Any], path: Path) -> tuple[str, ...]:
    """What a tokenizer has for BERT's special words: as `named` in its tokenizer_config.json, or by usual names."""
    found: list[str] = []
    for role, usual, other in zip(ROLES, SPECIAL_WORDS, OTHER_SPECIAL_WORDS, strict=True):
        word = named.get(role)
        word = word.get("content") if isinstance(word, dict) else word
        candidates = [str(one) for one in (word, usual, other) if one in words]
        if not candidates and role == "unk_token":  # byte-level BPE knows every text
            candidates = found[:1]
        if not candidates:
            cure = f'name it in {TOKENIZER_CONFIG} beside it, as "{role}"'
            raise UserError("bad-vocabulary", f"{path} has no {usual} or {other}; {cure}")
        found.append(candidates[0])
    return tuple(found)


def _check_tokenizer(text: str, path: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library has no other class
        raise UserError("bad-vocabulary", f"{path} is not a tokenizer: {str(error)[:200]}") from None


def _folded(word: str) -> str:
    letters = unicodedata.normalize("NFD", word.lower())
    return "".join(letter for letter in letters if unicodedata.category(letter) != "Mn")
