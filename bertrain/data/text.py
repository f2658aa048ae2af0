"""Plain text to documents: one sentence per line, a blank line between documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from bertrain.errors import UserError

Document = list[str]


def find_inputs(inputs: Iterable[str | Path]) -> list[Path]:
    """The text files behind `inputs`: files as given, folders by their files in order of name."""
    files: list[Path] = []
    for entry in map(Path, inputs):
        if entry.is_dir():
            inside = sorted(path for path in entry.rglob("*") if path.is_file() and not path.name.startswith("."))
            if not inside:
                raise UserError(f"the input folder {entry} holds no file")
            files += inside
        elif entry.is_file():
            files.append(entry)
        else:
            raise UserError(f"no input file or folder at {entry}")
    return files


def read_documents(files: Iterable[Path]) -> Iterator[Document]:
    """Each document as its list of non-empty sentences. The end of a file ends a document."""
    for path in files:
        document: Document = []
        for line in _lines(path):
            sentence = line.strip()
            if sentence:
                document.append(sentence)
            elif document:
                yield document
                document = []
        if document:
            yield document


def _lines(path: Path) -> Iterator[str]:
    try:
        # Bytes that are not UTF-8 become U+FFFD, which BERT's text cleaning then drops.
        with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
            yield from lines
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
