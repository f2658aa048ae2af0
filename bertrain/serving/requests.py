"""The body of a request, checked against the fields of its operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.base.files import is_valid_text
from bertrain.base.schema import JsonError, check_value, parse_json
from bertrain.serving.operations import Operation

MAX_BODY = 1 << 20  # bytes
MAX_TEXTS = 1000  # of one request
MAX_CHARACTERS = 100_000  # of one text
MAX_TOP = 100


@dataclass(frozen=True)
class Ask:
    """A request: texts, pairs of texts, or pairs of a question and its context; and its options by name."""

    operation: str
    texts: list[Any]  # the first of `nearest` is its query
    options: dict[str, Any]
    num_bytes: int

    def name_of(self, index: int, what: str = "text") -> str:
        """What a message calls a text: its number in the field that the client sent."""
        if self.operation == "nearest":
            return f"{what} {index}" if index else "the query"
        return f"{what} {index + 1}"


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
    schema = {field.name + "?" * (field.default is not None): field.schema for field in operation.fields}
    try:
        content = check_value(content, schema)
    except JsonError as error:
        raise UserError("wrong-field", f"{operation.name}: {error}") from None
    options = {field.name: content.get(field.name, field.default) for field in operation.fields}
    items = options.pop(operation.fields[0].name)
    items = [(one["question"], one["context"]) if isinstance(one, dict) else one for one in items]
    if not 1 <= options.get("top", 1) <= MAX_TOP:
        raise UserError("wrong-field", f"{operation.name}: top is {options['top']}; ask for 1 to {MAX_TOP}")
    if not 1 <= len(items) <= MAX_TEXTS:
        raise UserError("wrong-number-of-texts", f"there are {len(items)} texts; send 1 to {MAX_TEXTS}")
    texts = [options.pop("query"), *items] if "query" in options else items
    ask = Ask(operation.name, texts, options, len(body))
    for index, text in enumerate(texts):
        for part in [text] if isinstance(text, str) else text:
            _check_text(ask.name_of(index), part)
    return ask


def _check_text(name: str, text: str) -> None:
    if not any(character.isprintable() and not character.isspace() for character in text):
        raise UserError("empty-text", f"{name} is empty")
    if len(text) > MAX_CHARACTERS:
        raise UserError("text-too-long", f"{name} has {len(text):,} characters; send at most {MAX_CHARACTERS:,}")
    if not is_valid_text(text):
        raise UserError("bad-text", f"{name} has invalid Unicode (a lone surrogate)")
