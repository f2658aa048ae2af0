"""Paragraphs to sentences."""

from __future__ import annotations

from collections.abc import Iterable

from bertrain.config.choices import Splitter
from bertrain.data.text.documents import Document


def split_sentences(paragraphs: Iterable[str], *, splitter: Splitter, language: str = "en") -> Document:
    """The sentences of a document, without runs of white space and without empty ones.

    "sentencex" splits each paragraph by the rules and abbreviations of `language` (Wikimedia's library of that name)
    and drops what has neither letter nor digit; "lines" takes each paragraph for a sentence; "none" makes one sentence
    of the whole document.
    """
    # Rust's sentencex panics on white space of more than one byte beside an initial, so it never sees any.
    squeezed = [text for text in (" ".join(paragraph.split()) for paragraph in paragraphs) if text]
    if splitter == "none":
        return [" ".join(squeezed)] if squeezed else []
    if splitter == "lines":
        return squeezed
    from sentencex import segment

    sentences = (sentence.strip() for text in squeezed for sentence in segment(language, text))
    return [sentence for sentence in sentences if any(map(str.isalnum, sentence))]
