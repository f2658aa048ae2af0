"""The OpenAPI description of served models: the schemas are those of the examples of each operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bertrain
from bertrain.serving.models import NamedModel
from bertrain.serving.operations import Operation

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
ERROR = {"error": {"code": "empty-text", "message": "text 1 is empty"}}


def describe(models: Sequence[NamedModel]) -> dict[str, Any]:
    """The paths of all models in OpenAPI 3.1."""
    paths = {
        f"/{model.name}/{one.name}": {"post": {"operationId": f"{model.name}-{one.name}"} | _describe(one)}
        for model in models
        for one in model.model.operations
    }
    return {"openapi": "3.1.0", "info": {"title": "bertrain serve", "version": bertrain.__version__}, "paths": paths}


def _describe(operation: Operation) -> dict[str, Any]:
    fields = {
        field.name: schema_of(operation.example.get(field.name, field.default)) | {"description": field.help}
        for field in operation.fields
    }
    for field in operation.fields:
        fields[field.name] |= {} if field.default is None else {"default": field.default}
    body = schema_of(operation.example) | {
        "properties": fields,
        "required": [field.name for field in operation.fields if field.default is None],
        "additionalProperties": False,
    }
    answers = {"answers": [operation.answer]}
    return {
        "summary": operation.summary,
        "requestBody": {"required": True, "content": _json(body, operation.example)},
        "responses": {
            "200": {"description": operation.meaning, "content": _json(schema_of(answers), answers)},
            "4XX": {"description": "what is wrong with the request", "content": _json(schema_of(ERROR), ERROR)},
        },
    }


def _json(schema: dict[str, Any], example: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema, "example": example}}


def schema_of(example: Any) -> dict[str, Any]:
    """The JSON Schema of values like this one; `probabilities` have any labels for names."""
    if isinstance(example, dict):
        fields = {name: schema_of(value) for name, value in example.items()}
        if "probabilities" in fields:
            fields["probabilities"] = {"type": "object", "additionalProperties": {"type": "number"}}
        return {"type": "object", "properties": fields, "required": list(fields)}
    if isinstance(example, list):
        return {"type": "array", "items": schema_of(example[0])}
    return {"type": TYPES[type(example)]}
