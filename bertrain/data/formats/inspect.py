"""`bertrain data inspect`: shows examples as words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bertrain.base.errors import UserError
from bertrain.data.formats.block import split
from bertrain.data.formats.source import open_data

if TYPE_CHECKING:
    from rich.text import Text

STYLES = {"A": "", "B": "cyan", "special": "dim", "masked": "bold red", "label": "green"}
SPECIAL = {"[CLS]", "[SEP]", "[PAD]"}


@dataclass(frozen=True)
class Shown:
    """One example as words. `labels` are the words to predict by position; None where it is unmasked."""

    row: int
    words: list[str]
    segment_b: int
    is_random: bool
    labels: dict[int, str] | None


def inspect_data(folder: str | Path, *, rows: str = "0:5", vocab: str | Path | None = None) -> list[Shown]:
    """The examples of `rows`, given as FIRST:END, of a data folder of any layout, as words."""
    source = open_data(folder, vocab=vocab, verify="size")
    first, last = parse_rows(rows, len(source))
    block = source.read(np.arange(first, last))
    words = source.vocabulary.words
    masks = block.masks
    shown = []
    for index, tokens in enumerate(split(block.tokens, block.lengths)):
        labels = None
        if masks is not None:
            one = masks.take(np.array([index]))
            labels = {int(p): words[label] for p, label in zip(one.positions, one.labels, strict=True)}
        segment_b, is_random = int(block.segment_b[index]), bool(block.is_random[index])
        shown.append(Shown(first + index, [words[token] for token in tokens], segment_b, is_random, labels))
    return shown


def parse_rows(text: str, count: int) -> tuple[int, int]:
    """FIRST:END as two numbers, END at most `count`; either may be omitted."""
    first_text, colon, last_text = text.partition(":")
    try:
        first, last = int(first_text or 0), int(last_text or count)
    except ValueError:
        first = last = -1
    if not colon or not 0 <= first < min(last, count):
        raise UserError("bad-row-range", f"--rows is {text!r}; it must be FIRST:END, such as 0:5, of {count} rows")
    return first, min(last, count)


def lines_of(example: Shown) -> Iterator[Text]:
    """An example as lines: a summary, then each segment; a word to predict is shown as INPUT=LABEL."""
    from rich.text import Text

    is_pair = example.segment_b < len(example.words)
    nature = ("B drawn at random" if example.is_random else "B follows A") if is_pair else "one segment"
    masked = "unmasked" if example.labels is None else f"{len(example.labels)} to predict"
    yield Text(f"row {example.row}: {len(example.words)} tokens, {nature}, {masked}", style="bold")
    yield _segment(example, "A", 0, example.segment_b)
    if is_pair:
        yield _segment(example, "B", example.segment_b, len(example.words))


def _segment(example: Shown, name: str, first: int, last: int) -> Text:
    from rich.text import Text

    line = Text(f"  {name}")
    for position in range(first, last):
        word = example.words[position]
        line.append(" ")
        if example.labels and position in example.labels:
            line.append(word, STYLES["masked"]).append("=").append(example.labels[position], STYLES["label"])
        else:
            line.append(word, STYLES["special" if word in SPECIAL else name])
    return line
