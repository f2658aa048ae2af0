"""`bertrain data vocab`: trains a WordPiece vocabulary on plain text."""

from __future__ import annotations

import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from bertrain.base.errors import UserError
from bertrain.base.files import writing
from bertrain.data.text.documents import find_inputs, read_documents
from bertrain.data.text.progress import progress
from bertrain.data.text.tokenizer import CACHED_WORDS, build_pipeline
from bertrain.data.text.vocabulary import CONTINUATION, SPECIAL_WORDS, Vocabulary

T = TypeVar("T")
ENDING_S = 1.0  # that an interrupted thread gets
WAKE_UP_S = 0.2  # until Ctrl-C is heard that another thread received


def train_vocabulary(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    size: int = 30522,
    lower_case: bool = True,
    fewer: bool = False,
    stride: int = 1,
) -> Vocabulary:
    """Train a WordPiece vocabulary of `size` words on plain text and write it to `out`, one word per line.

    A text with too few word pieces is refused, or with `fewer` gets a smaller vocabulary. Only every `stride`-th
    document is read.

    Example: bertrain.train_vocabulary("articles.txt", "vocab.txt", size=2000)
    """
    if size < 100:
        raise UserError("option-out-of-range", f"--size is {size}; it must be at least 100")
    files, out = find_inputs(inputs), Path(out)
    if not out.parent.is_dir():
        raise UserError("missing-folder", f"--out {out}: the folder {out.parent} does not exist; create it")
    if out.suffix == ".json":
        raise UserError(
            "unknown-format", f"--out {out}: a vocabulary is a text of one word per line; name it vocab.txt"
        )
    if out.exists() and any(out.samefile(file) for file in files):
        raise UserError("overwrites-input", f"--out {out} is one of the inputs; choose another --out")
    with progress("vocabulary", 2 * sum(file.stat().st_size for file in files) // stride) as report:
        read = _Text(files, stride, lower_case, report)
        numbers = _interruptible(lambda: _train_twice(read, size, lower_case), read.stop)
    if len(numbers) > size and not fewer:
        letters = f"the letters of the text and the special words alone are {len(numbers):,}"
        raise UserError("option-out-of-range", f"--size is {size}, but {letters}; use a larger --size")
    if len(numbers) < size and not fewer:
        raise UserError("too-little-text", f"the text yields only {len(numbers)} word pieces; use a smaller --size")
    vocabulary = Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__)), lower_case)
    with writing(out):
        vocabulary.save(out)
    return vocabulary


class _Text:
    """The sentences of some files, for several passes: reports the characters read, and ends when it is stopped."""

    def __init__(self, files: list[Path], stride: int, lower_case: bool, report: Callable[[int], None]) -> None:
        self._files, self._stride, self._report = files, stride, report
        self._dropped = _unknown_marks() if lower_case else {}
        self._done, self._stopped = 0, threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def sentences(self) -> Iterator[str]:
        documents = islice(read_documents(self._files), 0, None, self._stride)
        for sentence in chain.from_iterable(documents):
            if self._stopped.is_set():
                raise KeyboardInterrupt
            self._done += len(sentence) + 1
            self._report(self._done)
            yield sentence if sentence.isascii() else sentence.translate(self._dropped)

    def distinct_words(self) -> Iterator[str]:
        """The words between spaces, each only a few times: enough to find all characters and their places in words."""
        seen: set[str] = set()
        for sentence in self.sentences():
            new = set(sentence.split(" ")) - seen
            if new:
                seen |= new
                yield " ".join(new)
            if len(seen) > CACHED_WORDS:
                seen.clear()


@cache
def _unknown_marks() -> dict[int, None]:
    """Accents that our tokenizer drops but the library keeps while it trains: its Unicode tables are older."""
    from tokenizers.normalizers import BertNormalizer

    keeps = BertNormalizer(lowercase=True).normalize_str
    marks = (number for number in range(sys.maxunicode + 1) if unicodedata.category(chr(number)) == "Mn")
    return {number: None for number in marks if keeps(chr(number))}


def _interruptible(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """What `work` returns. It runs in a thread: while the library computes in the main one, Ctrl-C would wait."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while not future.done():  # one wait without an end would sleep on if another thread received the signal
            wait([future], WAKE_UP_S)
        return future.result()
    except KeyboardInterrupt:
        stop()
        thread.join(ENDING_S)
        raise


def _train_twice(text: _Text, size: int, lower_case: bool) -> dict[str, int]:
    """The id of each word.

    The library numbers characters within words (##a) in hash-table order, which differs between processes, and of
    equally frequent pairs it joins those of smaller numbers first. So the characters are numbered beforehand.
    """
    characters = _train(text.distinct_words(), 0, [], lower_case).keys() - set(SPECIAL_WORDS)
    alphabet = sorted(characters, key=lambda piece: (len(piece), piece))
    return _train(text.sentences(), size, alphabet, lower_case)


def _train(sentences: Iterator[str], size: int, alphabet: list[str], lower_case: bool) -> dict[str, int]:
    """The id of each word of a new vocabulary: special words, `alphabet`, other characters, and joined ones."""
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
