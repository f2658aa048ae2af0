"""Paragraphs to sentences."""

from __future__ import annotations

from collections.abc import Iterable

from bertrain.config.choices import Splitter
from bertrain.data.text.documents import Document


def split_sentences(paragraphs: Iterable[str], *, splitter: Splitter, language: str = "en") -> Document:
    """The non-empty sentences of a document, runs of white space reduced to one space.

    "sentencex" (Wikimedia's library) splits each paragraph by the rules and abbreviations of `language` and drops
    sentences without letter or digit; "lines" makes each paragraph one sentence; "none" the whole document.
    """
    # sentencex panics on white space of more than one byte beside an initial, so white space is replaced first.
    squeezed = [text for text in (" ".join(paragraph.split()) for paragraph in paragraphs) if text]
    if splitter == "none":
        return [" ".join(squeezed)] if squeezed else []
    if splitter == "lines":
        return squeezed
    from sentencex import segment

    sentences = (sentence.strip() for text in squeezed for sentence in segment(language, text))
    return [sentence for sentence in sentences if any(map(str.isalnum, sentence))]
