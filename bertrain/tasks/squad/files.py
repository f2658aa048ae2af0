"""SQuAD's files: questions on paragraphs, with the answers that people marked there.

Two forms are read: the official JSON (articles, their paragraphs, questions on each), and tables as Hugging Face
`datasets` saves them (JSON Lines or Parquet, a question in each row). Both become the same Collection.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertrain.base.errors import UserError
from bertrain.tasks.tables import HUB

Version = Literal["v1.1", "v2.0"]
"""v1.1: every question is answered by its paragraph; v2.0: some are not."""

ENDINGS = (".json", ".jsonl", ".parquet")
FORM_OF_JSON = '{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'


class Answer(NamedTuple):
    """A piece of the context, and the character it begins at."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question on a paragraph. No answers: it has none there, or, in a file without answers, none is known."""

    id: str
    text: str
    context: int  # the paragraph's place in the Collection
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Collection:
    """Questions of a file in its order, and the paragraphs they are about."""

    path: Path
    contexts: list[str]
    questions: list[Question]
    is_answered: bool  # false: a file to be predicted, of which no answer is known
    problems: list[str]  # what was passed over, a sentence each


class Row(NamedTuple):
    """One question as it stands in the file, unchecked."""

    place: str  # what a message calls it where it has no id
    context: Any
    question: dict[str, Any]  # id, question, answers, is_impossible


class _DamageError(Exception):
    """What is wrong with one row; it ends the reading, or the row is passed over."""


Complain = Callable[[str], None]
"""Takes a sentence about a damaged row: ends the reading, or notes that it was passed over."""


def read_squad(path: Path, version: Version, *, on_error: Literal["stop", "skip"] = "stop") -> Collection:
    """Read a file of questions. Damaged ones end it, or are passed over; a file that does not fit `version` ends it."""
    contexts: dict[str, int] = {}
    questions: dict[str, Question] = {}
    problems: list[str] = []

    def complain(sentence: str) -> None:
        if on_error == "stop":
            raise UserError(f"{sentence}; mend it, or pass over such rows with --on-error skip")
        problems.append(sentence)

    are_known: set[bool] = set()
    for row in _rows(path, complain):
        try:
            question = _question(row, contexts, questions)
        except _DamageError as damage:
            complain(f"{path}: {_name(row)} {damage}")
            continue
        _refuse_other_version(path, question, row.question, version)
        are_known.add(_is_known(row.question, version))
        questions[question.id] = question
    if not questions:
        raise UserError(f"{path} holds no question that can be used; it should be SQuAD's JSON, {FORM_OF_JSON}")
    if len(are_known) > 1:
        unknown = next(one.id for one in questions.values() if not one.answers)
        raise UserError(
            f"{path}: question {unknown} has no answers while others do; squad/{version} wants a file with all of them "
            "or, to be predicted, with none"
        )
    return Collection(path, list(contexts), list(questions.values()), are_known.pop(), problems)


# --- one question, checked -----------------------------------------------------------------------------------


def _question(row: Row, contexts: dict[str, int], known: dict[str, Question]) -> Question:
    """The question of a row; its context takes its place among `contexts`."""
    identifier = _text(row.question, "id")
    if identifier in known:
        raise _DamageError("has the id of another question before it")
    text = _text(row.question, "question")
    context = _text({"context": row.context}, "context")
    answers = _answers(row.question.get("answers"))
    if row.question.get("is_impossible") and answers:
        raise _DamageError("says is_impossible, and has answers")
    return Question(identifier, text, contexts.setdefault(context, len(contexts)), answers)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise _DamageError(f"has no {name!r}")
    if not isinstance(value, str):
        raise _DamageError(f"has a {name!r} that is no text")
    if not any(character.isprintable() and not character.isspace() for character in value):
        raise _DamageError(f"has an empty {name!r}")
    if not _is_unicode(value):  # no tokenizer takes it
        raise _DamageError(f"has half of a character (a lone surrogate) in its {name!r}")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _answers(given: Any) -> tuple[Answer, ...]:
    """Answers as SQuAD has them, a list of objects, or as a table does, an object of lists."""
    if given is None:
        return ()
    if isinstance(given, dict):
        texts, starts = given.get("text"), given.get("answer_start")
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise _DamageError("has 'answers' without as many 'text' as 'answer_start'")
        given = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise _DamageError("has 'answers' that are no list of texts and places")
    return tuple(Answer(_text(one, "text"), _start(one.get("answer_start"))) for one in given)


def _start(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise _DamageError("has an answer whose 'answer_start' is no place in a text")
    return value


def _is_known(fields: dict[str, Any], version: Version) -> bool:
    """Whether the file says what the answer is: in v2.0 that may be none at all."""
    if version == "v2.0":
        return fields.get("answers") is not None or bool(fields.get("is_impossible"))
    return bool(fields.get("answers")) and bool(_answers(fields["answers"]))


def _refuse_other_version(path: Path, question: Question, fields: dict[str, Any], version: Version) -> None:
    if version == "v1.1" and fields.get("is_impossible"):
        raise UserError(
            f"{path}: question {question.id} says is_impossible, which squad/v1.1 does not know; the task for this "
            "file is squad/v2.0"
        )


def _name(row: Row) -> str:
    identifier = row.question.get("id")
    if isinstance(identifier, str) and identifier.strip() and identifier.isprintable():
        return f"question {shortened(identifier)}"
    return row.place


def shortened(text: str) -> str:
    """As much of a text as a message can hold."""
    return text if len(text) <= 60 else text[:57] + "..."


# --- the rows of each form -----------------------------------------------------------------------------------


def _rows(path: Path, complain: Complain) -> Iterator[Row]:
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    text = _read_text(path)
    return _line_rows(path, text, complain) if path.suffix == ".jsonl" else _article_rows(path, text, complain)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start:,} is not); save it as UTF-8") from None


def read_json(text: str, place: str) -> Any:
    """The value of a JSON text; what is wrong with it is said with line and column."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is no JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        raise UserError(f"{place} is no JSON that can be read: {error}") from None


def read_json_file(path: Path) -> Any:
    """The value in a JSON file."""
    return read_json(_read_text(path), str(path))


def _article_rows(path: Path, text: str, complain: Complain) -> Iterator[Row]:
    """The questions of SQuAD's own form."""
    content = read_json(text, str(path))
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        raise UserError(
            f"{path} has no list 'data' at its top, so it is not SQuAD's JSON, {FORM_OF_JSON}; a table of questions, "
            "an object a line, should be called .jsonl"
        )
    for a, article in enumerate(content["data"], start=1):
        place = f"article {a}"
        for p, paragraph in enumerate(_parts(article, "paragraphs", path, place, complain), start=1):
            place = f"paragraph {p} of article {a}"
            for q, question in enumerate(_parts(paragraph, "qas", path, place, complain), start=1):
                place = f"question {q} of paragraph {p} of article {a}"
                if isinstance(question, dict):
                    yield Row(place, paragraph.get("context"), question)
                else:
                    complain(f"{path}: {place} is no object")


def _parts(whole: Any, name: str, path: Path, place: str, complain: Complain) -> list[Any]:
    parts = whole.get(name) if isinstance(whole, dict) else None
    if isinstance(parts, list):
        return parts
    complain(f"{path}: {place} has no list {name!r}")
    return []


def _line_rows(path: Path, text: str, complain: Complain) -> Iterator[Row]:
    """The questions of a table, an object in each line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            column = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
            complain(f"{path}: {place} is no JSON{column}")
            continue
        if isinstance(fields, dict):
            yield Row(place, fields.get("context"), fields)
        else:
            complain(f"{path}: {place} is no object")


def _parquet_rows(path: Path) -> Iterator[Row]:
    """The questions of a Parquet table."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=4096):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(f"row {number}", fields.get("context"), fields)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is no Parquet file that can be read: {what}") from None


# --- which file is which -------------------------------------------------------------------------------------


def find_file(folder: Path, kinds: tuple[str, ...], version: Version) -> Path | None:
    """The one file of a folder whose name begins with one of `kinds` (train; dev, validation; test), if there is one.

    Of several, those count that name the version, and the official name (train-v1.1.json) comes before others. Where
    there is none, a folder `data` is looked into, as in `find_tables`.
    """
    found = sorted(
        path for path in folder.iterdir() if path.suffix in ENDINGS and re.match(rf"({'|'.join(kinds)})\b", path.name)
    )
    other = "v2.0" if version == "v1.1" else "v1.1"
    found = [path for path in found if version in path.name] or [path for path in found if other not in path.name]
    official = [path for path in found if path.name in {f"{kind}-{version}.json" for kind in kinds}]
    found = official or found
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(f"{folder} has more than one file to choose from for squad/{version}: {names}; keep one there")
    if not found and (folder / HUB).is_dir():
        return find_file(folder / HUB, kinds, version)
    return found[0] if found else None
