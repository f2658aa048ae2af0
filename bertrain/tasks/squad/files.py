"""Read SQuAD's files: questions about paragraphs, with the answers that annotators marked there.

Two formats are read: the official JSON (articles, their paragraphs, the questions about each), and tables as Hugging
Face `datasets` saves them (JSON lines or Parquet, a question per row). Both become a Collection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertrain.base.errors import UserError
from bertrain.base.files import is_valid_text, read_json
from bertrain.data.text.records import Problem
from bertrain.tasks.tables import HUB, SKIP_HINT, read_objects

Version = Literal["v1.1", "v2.0"]  # in v2.0, some questions have no answer in their paragraph

SUFFIXES = (".json", ".jsonl", ".parquet")
JSON_FORMAT = '{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'


class Answer(NamedTuple):
    """A span of the context, and the index of its first character."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a paragraph. Without answers, it is unanswerable or, in an unlabeled file, to be predicted."""

    id: str
    text: str
    context: int  # index of the paragraph in the Collection
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Collection:
    path: Path
    contexts: list[str]
    questions: list[Question]
    has_answers: bool  # false for an unlabeled file, which is to be predicted
    problems: list[str]  # a sentence for each question skipped


class RawQuestion(NamedTuple):
    """A question as the file has it, unchecked."""

    place: str  # names it in messages if it has no id
    context: Any
    fields: dict[str, Any]  # id, question, answers, is_impossible


ReportProblem = Callable[[str], None]  # takes a sentence about an unusable question; raises UserError, or notes it


def read_squad(path: Path, version: Version, *, on_error: Literal["stop", "skip"] = "stop") -> Collection:
    """Read a file of questions. Stops at an unusable question or skips it; refuses a file of another version."""
    contexts: dict[str, int] = {}
    questions: dict[str, Question] = {}
    problems: list[str] = []

    def report_problem(sentence: str) -> None:
        if on_error == "stop":
            raise UserError("bad-question", f"{sentence}; {SKIP_HINT}")
        problems.append(sentence)

    read = _read_table if path.suffix in (".jsonl", ".parquet") else _read_articles
    labeled: set[bool] = set()
    for raw in read(path, report_problem):
        try:
            question = _parse_question(raw, contexts, questions)
        except ValueError as error:
            identifier = raw.fields.get("id")
            is_legible = isinstance(identifier, str) and identifier.strip() and identifier.isprintable()
            place = f"{path}: question {shorten(str(identifier))}" if is_legible else raw.place
            report_problem(f"{place} {error}")
            continue
        if version == "v1.1" and raw.fields.get("is_impossible"):
            problem = f"question {question.id} has is_impossible"
            raise UserError("other-squad-version", f"{path}: {problem}, unlike any in squad/v1.1; use squad/v2.0")
        if version == "v2.0":  # an empty list of answers is a label
            labeled.add(raw.fields.get("answers") is not None or bool(raw.fields.get("is_impossible")))
        else:
            labeled.add(bool(question.answers))
        questions[question.id] = question
    if not questions:
        raise UserError("no-usable-question", f"{path} has no usable question; the format of SQuAD is {JSON_FORMAT}")
    if len(labeled) > 1:
        unanswered = next(question.id for question in questions.values() if not question.answers)
        problem = f"question {unanswered} has no answers, but others have"
        raise UserError(
            "partly-answered", f"{path}: {problem}; in squad/{version}, either all questions have answers, or none"
        )
    return Collection(path, list(contexts), list(questions.values()), labeled.pop(), problems)


def _parse_question(raw: RawQuestion, contexts: dict[str, int], known: dict[str, Question]) -> Question:
    identifier = _parse_text(raw.fields, "id")
    if identifier in known:
        raise ValueError("has the id of an earlier question")
    text = _parse_text(raw.fields, "question")
    context = _parse_text({"context": raw.context}, "context")
    answers = _parse_answers(raw.fields.get("answers"))
    if raw.fields.get("is_impossible") and answers:
        raise ValueError("has is_impossible and answers")
    return Question(identifier, text, contexts.setdefault(context, len(contexts)), answers)


def _parse_text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise ValueError(f"has no {name!r}")
    if not isinstance(value, str):
        raise ValueError(f"has a {name!r} that is not a text")
    if not any(character.isprintable() and not character.isspace() for character in value):
        raise ValueError(f"has an empty {name!r}")
    if not is_valid_text(value):
        raise ValueError(f"has invalid Unicode (a lone surrogate) in {name!r}")
    return value


def _parse_answers(answers: Any) -> tuple[Answer, ...]:
    """Answers as a list of objects, as in SQuAD, or as an object of lists, as in tables."""
    if answers is None:
        return ()
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise ValueError("has 'answers' whose 'text' and 'answer_start' differ in length")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise ValueError("has 'answers' that are not a list of objects")
    parsed = []
    for answer in answers:
        text, start = _parse_text(answer, "text"), answer.get("answer_start")
        if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start < 1 << 62:
            raise ValueError("has an answer whose 'answer_start' is not an index of a character")
        parsed.append(Answer(text, start))
    return tuple(parsed)


def shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _read_articles(path: Path, report_problem: ReportProblem) -> Iterator[RawQuestion]:
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        raise UserError(
            "not-squad", f"{path} has no 'data' as in {JSON_FORMAT}; if it has JSON lines, rename it to .jsonl"
        )

    def list_of(parent: Any, name: str, place: str) -> list[Any]:
        children = parent.get(name) if isinstance(parent, dict) else None
        if isinstance(children, list):
            return children
        report_problem(f"{path}: {place} has no list {name!r}")
        return []

    for a, article in enumerate(content["data"], start=1):
        for p, paragraph in enumerate(list_of(article, "paragraphs", f"article {a}"), start=1):
            place = f"paragraph {p} of article {a}"
            for q, fields in enumerate(list_of(paragraph, "qas", place), start=1):
                if isinstance(fields, dict):
                    yield RawQuestion(f"{path}: question {q} of {place}", paragraph.get("context"), fields)
                else:
                    report_problem(f"{path}: question {q} of {place} is not an object")


def _read_table(path: Path, report_problem: ReportProblem) -> Iterator[RawQuestion]:
    for place, fields in read_objects(path, lambda names: names):
        if isinstance(fields, Problem):
            report_problem(str(fields))
        else:
            yield RawQuestion(place, fields.get("context"), fields)


def find_file(folder: Path, prefixes: tuple[str, ...], version: Version) -> Path | None:
    """The file of a split, whose name starts with one of `prefixes` (train; dev, validation; test).

    Prefers files that name the version, and among them the official name (train-v1.1.json). If there is none, it
    searches the folder `data`, like `find_tables`.
    """
    pattern = re.compile(rf"({'|'.join(prefixes)})\b")
    found = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and pattern.match(path.name))
    other = "v2.0" if version == "v1.1" else "v1.1"
    found = [path for path in found if version in path.name] or [path for path in found if other not in path.name]
    found = [path for path in found if path.name in {f"{prefix}-{version}.json" for prefix in prefixes}] or found
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError("ambiguous-files", f"{folder} has several files for squad/{version}: {names}; keep one of them")
    if not found and (folder / HUB).is_dir():
        return find_file(folder / HUB, prefixes, version)
    return found[0] if found else None
