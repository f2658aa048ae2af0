"""Texts to embed, read as a stream from a file of any size: a text per line, or a column of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest, reading
from bertrain.data.text.records import Problem
from bertrain.tasks.table_task import find_column
from bertrain.tasks.tables import read_lines, read_table, suffix_of

IDS = ("id", "idx", "index")  # columns that identify a row, unless the user names another


class Text(NamedTuple):
    id: str | None  # None if the row has none
    text: str


@dataclass(frozen=True)
class TextFile:
    """A .txt file with a text per line, or a table with a column of texts; compressed or not."""

    path: Path
    column: str = "text"
    id_column: str = ""  # empty: the first of IDS that the table has

    def __iter__(self) -> Iterator[Text]:
        """The texts in order. A row that cannot be read is refused with its line: vectors must match rows."""
        if suffix_of(self.path) == "txt":
            if self.column != TextFile.column or self.id_column:
                raise UserError("option-without-effect", f"{self.path} has no columns; leave --text and --id out")
            for _, line in read_lines(self.path):
                if isinstance(line, Problem):
                    raise UserError("bad-text", str(line))
                yield Text(None, line)
            return
        for row in read_table(self.path, self._select):
            if isinstance(row, Problem):
                raise UserError("bad-text", f"{row}; every row needs a text")
            text, number = row.values
            if text is None:
                raise UserError("bad-text", f"{row.place} has no {self.column!r}; every row needs a text")
            yield Text(number, text)

    def _select(self, names: list[str]) -> list[str | None]:
        text = find_column(names, (self.column,), "; name the column of texts with --text")
        ids = (self.id_column,) if self.id_column else IDS
        return [text, find_column(names, ids, "; name the column of ids with --id", required=bool(self.id_column))]

    def survey(self) -> Survey:
        """Read the whole file once, so that a bad row is refused before anything is computed."""
        num_texts = num_empty = 0
        has_ids = False
        for one in self:
            num_texts += 1
            num_empty += not one.text.strip()
            has_ids |= one.id is not None
        if not num_texts:
            raise UserError("no-texts", f"{self.path} has no text to embed")
        with reading(self.path):
            return Survey(num_texts, num_empty, has_ids, file_digest(self.path)[1])


class Survey(NamedTuple):
    num_texts: int
    num_empty: int
    has_ids: bool
    sha256: str
