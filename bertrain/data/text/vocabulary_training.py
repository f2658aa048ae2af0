"""`bertrain data vocab`: trains a WordPiece vocabulary on plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.files import writing
from bertrain.data.text.documents import find_inputs, read_documents
from bertrain.data.text.tokenizer import CACHED_WORDS, build_pipeline
from bertrain.data.text.vocabulary import CONTINUATION, SPECIAL_WORDS, Vocabulary


def train_vocabulary(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    size: int = 30522,
    lower_case: bool = True,
    fewer: bool = False,
) -> Vocabulary:
    """Train a WordPiece vocabulary of `size` words on plain text and write it to `out`, one word per line.

    A text that has not as many is refused; with `fewer`, it gets a smaller vocabulary.

    Example: bertrain.train_vocabulary("articles.txt", "vocab.txt", size=2000)
    """
    if size < 100:
        raise UserError("option-out-of-range", f"--size is {size}; it must be at least 100")
    files, out = find_inputs(inputs), Path(out)
    if not out.parent.is_dir():
        raise UserError("missing-folder", f"--out {out}: the folder {out.parent} does not exist; create it")
    if out.exists() and any(out.samefile(file) for file in files):
        raise UserError("overwrites-input", f"--out {out} is one of the inputs; choose another --out")
    # The library numbers characters within words (##a) in hash-table order, which differs between processes, and of
    # equally frequent pairs it joins those of smaller numbers first. So the characters are numbered beforehand.
    characters = _train(_distinct_words(files), 0, [], lower_case).keys() - set(SPECIAL_WORDS)
    alphabet = sorted(characters, key=lambda piece: (len(piece), piece))
    numbers = _train(chain.from_iterable(read_documents(files)), size, alphabet, lower_case)
    if len(numbers) < size and not fewer:
        raise UserError("too-little-text", f"the text yields only {len(numbers)} word pieces; use a smaller --size")
    vocabulary = Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__)), lower_case)
    with writing(out):
        vocabulary.save(out)
    return vocabulary


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


def _distinct_words(files: list[Path]) -> Iterator[str]:
    """The words between spaces, each only a few times: enough to find all characters and their positions in words."""
    seen: set[str] = set()
    for sentence in chain.from_iterable(read_documents(files)):
        new = set(sentence.split(" ")) - seen
        if new:
            seen |= new
            yield " ".join(new)
        if len(seen) > CACHED_WORDS:
            seen.clear()
