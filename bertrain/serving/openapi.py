"""The OpenAPI description of served models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bertrain
from bertrain.serving.models import NamedModel
from bertrain.serving.operations import Field, Kind, Operation
from bertrain.serving.requests import LISTS, MAX_CHARACTERS, MAX_TEXTS

TEXT = {"type": "string", "maxLength": MAX_CHARACTERS}
QUESTION = {
    "type": "object",
    "properties": {"question": TEXT, "context": TEXT},
    "required": ["question", "context"],
}
SCHEMAS: dict[Kind, dict[str, Any]] = {
    "text": TEXT,
    "texts": {"type": "array", "items": TEXT},
    "pairs": {"type": "array", "items": {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}},
    "questions": {"type": "array", "items": QUESTION},
    "count": {"type": "integer", "minimum": 1},
    "flag": {"type": "boolean"},
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            "required": ["code", "message"],
        }
    },
    "required": ["error"],
}


def describe(models: Sequence[NamedModel]) -> dict[str, Any]:
    """The paths of all models in OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "bertrain serve", "version": bertrain.__version__},
        "paths": {
            f"/{model.name}/{one.name}": {"post": _describe_operation(model, one)}
            for model in models
            for one in model.model.operations
        },
        "components": {"schemas": {"Error": ERROR}},
    }


def _describe_operation(model: NamedModel, operation: Operation) -> dict[str, Any]:
    body = {
        "type": "object",
        "properties": {field.name: _describe_field(field) for field in operation.fields},
        "required": [field.name for field in operation.fields if field.default is None],
        "additionalProperties": False,
        "examples": [operation.example],
    }
    answer = schema_of(operation.answer) | {"description": operation.meaning}
    answers = {
        "type": "object",
        "properties": {"answers": {"type": "array", "items": answer}},
        "required": ["answers"],
        "examples": [{"answers": [operation.answer]}],
    }
    return {
        "operationId": f"{model.name}-{operation.name}",
        "summary": operation.summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": operation.meaning, "content": {"application/json": {"schema": answers}}},
            "4XX": {
                "description": "what is wrong with the request",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }


def _describe_field(field: Field) -> dict[str, Any]:
    found = SCHEMAS[field.kind] | {"description": field.help}
    found |= {"minItems": 1, "maxItems": MAX_TEXTS} if field.kind in LISTS else {}
    return found if field.default is None else found | {"default": field.default}


def schema_of(example: Any) -> dict[str, Any]:
    """The JSON Schema of values like this one. Probabilities by label are an object of numbers."""
    if isinstance(example, dict):
        if all(isinstance(value, float) for value in example.values()) and "number" not in example:
            return {"type": "object", "additionalProperties": {"type": "number"}}
        return {"type": "object", "properties": {name: schema_of(value) for name, value in example.items()}}
    if isinstance(example, list):
        return {"type": "array", "items": schema_of(example[0]) if example else {}}
    kinds = {str: "string", int: "integer", float: "number"}
    return {"type": kinds[type(example)]}
