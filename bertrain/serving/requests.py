"""The body of a request, checked against the fields of its operation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.base.schema import Count, JsonError, check_value, parse_json
from bertrain.serving.operations import Kind, Operation

MAX_BODY = 1 << 20  # bytes
MAX_TEXTS = 1000  # of one request
MAX_CHARACTERS = 100_000  # of one text
SCHEMAS: dict[Kind, Any] = {
    "text": str,
    "texts": list[str],
    "pairs": list[tuple[str, str]],
    "questions": [{"question": str, "context": str}],
    "count": Count,
    "flag": bool,
}
LISTS = ("texts", "pairs", "questions")


@dataclass(frozen=True)
class Ask:
    """A request: texts, pairs of texts, or pairs of a question and its context; and its options by name."""

    operation: str
    texts: list[Any]
    options: dict[str, Any]


def parse(operation: Operation, body: bytes) -> Ask:
    """The request in a body; raises UserError for anything else."""
    try:
        content = parse_json(body)
    except JsonError as error:
        raise UserError("malformed-body", f"the body is {error}") from None
    known = {field.name: field for field in operation.fields}
    if not isinstance(content, dict):
        raise UserError("malformed-body", f"the body is not a JSON object with {' and '.join(known)}")
    if unknown := next((name for name in content if name not in known), None):
        advice = f"{nearest(unknown, list(known))}; its fields are {', '.join(known)}"
        raise UserError("unknown-field", f"{operation.name} has no field {unknown[:60]!r}{advice}")
    schema = {field.name + "?" * (field.default is not None): SCHEMAS[field.kind] for field in operation.fields}
    try:
        content = check_value(content, schema)
    except JsonError as error:
        raise UserError("wrong-field", f"{operation.name}: {error}") from None
    options = {field.name: content.get(field.name, field.default) for field in operation.fields}
    (items,) = (options.pop(field.name) for field in operation.fields if field.kind in LISTS)
    items = [(one["question"], one["context"]) if isinstance(one, dict) else one for one in items]
    if options.get("top", 1) < 1:
        raise UserError("wrong-field", f"{operation.name}: top is 0; ask for one or more")
    if not 1 <= len(items) <= MAX_TEXTS:
        raise UserError("wrong-number-of-texts", f"there are {len(items)} texts; send 1 to {MAX_TEXTS}")
    texts = [options.pop("query"), *items] if "query" in options else items
    for place, text in _strings(texts):
        _check_text(place, text)
    return Ask(operation.name, texts, options)


def _strings(texts: Sequence[Any]) -> Iterator[tuple[int, str]]:
    for number, text in enumerate(texts, start=1):
        yield from ((number, part) for part in ([text] if isinstance(text, str) else text))


def _check_text(number: int, text: str) -> None:
    if not any(character.isprintable() and not character.isspace() for character in text):
        raise UserError("empty-text", f"text {number} is empty")
    if len(text) > MAX_CHARACTERS:
        raise UserError("text-too-long", f"text {number} has {len(text):,} characters; send at most {MAX_CHARACTERS:,}")
    if re.search("[\ud800-\udfff]", text):
        raise UserError("bad-text", f"text {number} has invalid Unicode (a lone surrogate)")
