"""MLPerf's reference preparation, written out plainly: what bertrain's fast one must equal, and its yardstick.

Nothing here is shared with bertrain.data. It follows the published algorithm (google-research/bert and mlcommons/
training: tokenization and create_pretraining_data) one character, one sentence and one draw at a time.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Words = list[str]


@dataclass(frozen=True)
class Instance:
    """A row of the reference: masked words, where segment B begins, the label, and what was masked where."""

    words: Words
    segment_b: int
    is_random: bool
    positions: list[int]
    labels: Words


def is_white(character: str) -> bool:
    return character in " \t\n\r" or unicodedata.category(character) == "Zs"


def is_control(character: str) -> bool:
    return character not in "\t\n\r" and unicodedata.category(character) in ("Cc", "Cf")


def is_punctuation(character: str) -> bool:
    code = ord(character)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(character).startswith("P")


def is_ideograph(character: str) -> bool:
    code = ord(character)
    return (
        0x4E00 <= code <= 0x9FFF
        or 0x3400 <= code <= 0x4DBF
        or 0x20000 <= code <= 0x2A6DF
        or 0x2A700 <= code <= 0x2B73F
        or 0x2B740 <= code <= 0x2B81F
        or 0x2B820 <= code <= 0x2CEAF
        or 0xF900 <= code <= 0xFAFF
        or 0x2F800 <= code <= 0x2FA1F
    )


def basic_words(text: str, lower_case: bool) -> Words:
    """Clean, set ideographs apart, split at white space, fold each word, split it at punctuation."""
    cleaned = ""
    for character in text:
        if ord(character) in (0, 0xFFFD) or is_control(character):
            continue
        cleaned += " " if is_white(character) else character
    spaced = ""
    for character in cleaned:
        spaced += " " + character + " " if is_ideograph(character) else character
    parts: Words = []
    for word in spaced.strip().split():
        if lower_case:
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(character for character in decomposed if unicodedata.category(character) != "Mn")
        run = ""
        for character in word:
            if is_punctuation(character):
                parts += [run, character] if run else [character]
                run = ""
            else:
                run += character
        if run:
            parts.append(run)
    return " ".join(parts).strip().split()


def word_pieces(word: str, vocabulary: dict[str, int]) -> Words:
    """The longest piece in the vocabulary, then the longest of what is left; [UNK] if there is none."""
    if len(word) > 200:
        return ["[UNK]"]
    pieces: Words = []
    start = 0
    while start < len(word):
        stop = len(word)
        piece = None
        while start < stop:
            candidate = word[start:stop] if start == 0 else "##" + word[start:stop]
            if candidate in vocabulary:
                piece = candidate
                break
            stop -= 1
        if piece is None:
            return ["[UNK]"]
        pieces.append(piece)
        start = stop
    return pieces


def tokenize(text: str, vocabulary: dict[str, int], lower_case: bool) -> Words:
    return [piece for word in basic_words(text, lower_case) for piece in word_pieces(word, vocabulary)]


def read_lines(path: Path) -> list[str]:
    """Lines as TensorFlow's file reader gives them: up to a newline, carriage returns dropped, bad bytes ignored."""
    pieces = path.read_bytes().replace(b"\r", b"").split(b"\n")
    lines = [piece.decode("utf-8", "ignore") + "\n" for piece in pieces[:-1]]
    rest = pieces[-1].decode("utf-8", "ignore")
    return [*lines, rest] if rest else lines


def instances(
    files: list[Path],
    vocabulary: dict[str, int],
    *,
    lower_case: bool = True,
    max_seq_length: int,
    max_predictions: int,
    masked_lm_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    dupe_factor: int,
    seed: int,
) -> list[Instance]:
    """All instances of one call of the reference, in its order."""
    documents: list[list[Words]] = [[]]
    for path in files:
        for line in read_lines(path):
            sentence = line.strip()
            if not sentence:
                documents.append([])
            words = tokenize(sentence, vocabulary, lower_case)
            if words:
                documents[-1].append(words)
    documents = [document for document in documents if document]
    draw = random.Random(seed)
    draw.shuffle(documents)
    all_words = list(vocabulary)
    result: list[Instance] = []
    for _ in range(dupe_factor):
        for number in range(len(documents)):
            for words, segment_b, is_random in document_pairs(documents, number, max_seq_length, short_seq_prob, draw):
                masked, positions, labels = mask(words, all_words, masked_lm_prob, max_predictions, draw)
                result.append(Instance(masked, segment_b, is_random, positions, labels))
    draw.shuffle(result)
    return result


def document_pairs(
    documents: list[list[Words]], number: int, max_seq_length: int, short_seq_prob: float, draw: random.Random
) -> Iterator[tuple[Words, int, bool]]:
    """Yield (words, where B begins, is random); the caller draws the masks of each before the next is drawn."""
    document = documents[number]
    longest = max_seq_length - 3
    target = longest
    if draw.random() < short_seq_prob:
        target = draw.randint(2, longest)
    chunk: list[Words] = []
    chunk_length = 0
    index = 0
    while index < len(document):
        chunk.append(document[index])
        chunk_length += len(document[index])
        if index == len(document) - 1 or chunk_length >= target:
            cut = draw.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
            a = [word for sentence in chunk[:cut] for word in sentence]
            b: Words = []
            is_random = len(chunk) == 1 or draw.random() < 0.5
            if is_random:
                for _ in range(10):
                    other = draw.randint(0, len(documents) - 1)
                    if other != number:
                        break
                begin = draw.randint(0, len(documents[other]) - 1)
                for sentence in documents[other][begin:]:
                    b += sentence
                    if len(b) >= target - len(a):
                        break
                index -= len(chunk) - cut
            else:
                b = [word for sentence in chunk[cut:] for word in sentence]
            while len(a) + len(b) > longest:
                longer = a if len(a) > len(b) else b
                if draw.random() < 0.5:
                    del longer[0]
                else:
                    longer.pop()
            yield ["[CLS]", *a, "[SEP]", *b, "[SEP]"], len(a) + 2, is_random
            chunk = []
            chunk_length = 0
        index += 1


def mask(
    words: Words, all_words: Words, masked_lm_prob: float, max_predictions: int, draw: random.Random
) -> tuple[Words, list[int], Words]:
    """Masked words, positions ascending, and what stood there."""
    candidates = [index for index, word in enumerate(words) if word not in ("[CLS]", "[SEP]")]
    draw.shuffle(candidates)
    wanted = min(max_predictions, max(1, round(len(words) * masked_lm_prob)))
    masked = list(words)
    chosen = []
    for index in candidates[:wanted]:
        if draw.random() < 0.8:
            masked[index] = "[MASK]"
        elif draw.random() >= 0.5:
            masked[index] = all_words[draw.randint(0, len(all_words) - 1)]
        chosen.append(index)
    positions = sorted(chosen)
    return masked, positions, [words[index] for index in positions]
